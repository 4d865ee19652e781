"""Private training in an ordinary PyTorch loop: any optimizer, a scheduler, an average of weights, small memory.

python examples/plain_loop.py --quick
python examples/plain_loop.py --no-gate        # plain DP-SGD, for comparison
"""

import argparse

import torch
from torch import nn

from sluice import ClippingBiasGate, GlobalScaling, PrivacyEngine
from sluice.data import load

parser = argparse.ArgumentParser()
parser.add_argument("--quick", action="store_true", help="20 releases instead of 200")
parser.add_argument("--no-gate", action="store_true", help="release every attempt")
options = parser.parse_args()
releases = 20 if options.quick else 200

digits = load("digits")
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
original_optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

engine = PrivacyEngine()
model, optimizer, loader = engine.make_private_with_epsilon(
    module=model,
    optimizer=original_optimizer,
    data_loader=digits.train,  # a map-style data set will do: batches are Poisson samples
    sample_rate=256 / len(digits.train),
    target_epsilon=3.0,
    target_delta=1e-5,
    releases=releases,
    max_grad_norm=1.0,
    scaling=GlobalScaling(bound=1.0),
    gate=None if options.no_gate else ClippingBiasGate(beta=3.0),
    lr_scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(original_optimizer, releases),  # advances by release
    ema_decay=0.95,
    max_physical_batch_size=128,  # at most so many records in memory at once; changes no result
)

# The loader ends by itself when the last release is made. How many turns that takes is sensitive, and so is the loss:
# do not publish either. Released weights may be published at any time.
for images, labels in loader:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()  # releases an update, or forgets the attempt

test_images, test_labels = digits.test.batch(range(len(digits.test)))
with engine.averaged() as averaged, torch.no_grad():
    accuracy = (averaged(test_images).argmax(1) == test_labels).float().mean().item()
print(f"test accuracy {accuracy:.3f} after {engine.released} releases")
print(f"epsilon {engine.get_certified_epsilon(1e-5):.3f} at delta 1e-5")
