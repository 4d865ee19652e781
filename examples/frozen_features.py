"""Fine-tuning on frozen features: a net trained on public records, its last layer on private ones.

Here the digits 0 to 4 play the public records and 5 to 9 the private ones. What the frozen part does to a record depends
on that record alone, so it costs no privacy; only the new layer is trained privately.

    python examples/frozen_features.py --quick
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from sluice import ClippingBiasGate, GlobalScaling, PrivacyEngine
from sluice.data import Examples, load


def records_of(examples: Examples, classes: range) -> tuple[torch.Tensor, torch.Tensor]:
    positions = torch.nonzero((examples.labels >= classes.start) & (examples.labels < classes.stop)).flatten()
    images, labels = examples.batch(positions)
    return images, labels - classes.start


parser = argparse.ArgumentParser()
parser.add_argument("--quick", action="store_true", help="fewer steps")
quick = parser.parse_args().quick

digits = load("digits")
torch.manual_seed(0)
backbone = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 64))

# Public records: ordinary training.
public_images, public_labels = records_of(digits.train, range(5))
pretrained = nn.Sequential(backbone, nn.Linear(64, 5))
public_optimizer = torch.optim.Adam(pretrained.parameters(), lr=0.003)
for _ in range(30 if quick else 150):
    public_optimizer.zero_grad()
    F.cross_entropy(pretrained(public_images), public_labels).backward()
    public_optimizer.step()

# Private records: the frozen part is evaluated, the new layer is trained privately.
model = nn.Sequential(
    backbone.requires_grad_(False).eval(), nn.LayerNorm(64, elementwise_affine=False), nn.Linear(64, 5)
)
engine = PrivacyEngine()
engine.make_private_with_epsilon(
    module=model,
    optimizer=torch.optim.SGD(model[-1].parameters(), lr=0.5, momentum=0.9),
    data_loader=TensorDataset(*records_of(digits.train, range(5, 10))),
    sample_rate=0.25,
    target_epsilon=3.0,
    target_delta=1e-5,
    releases=20 if quick else 100,
    max_grad_norm=1.0,
    scaling=GlobalScaling(bound=1.0),
    gate=ClippingBiasGate(beta=3.0),
)
for _ in engine.releases(F.cross_entropy):
    pass

test_images, test_labels = records_of(digits.test, range(5, 10))
model.eval()
with torch.no_grad():
    accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
print(f"test accuracy {accuracy:.3f}, epsilon {engine.get_certified_epsilon(1e-5):.2f} at delta 1e-5")
