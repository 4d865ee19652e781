"""A training loop in the manner of an Opacus tutorial, moved to Sluice.

Three lines differ from the original: the import, and the two arguments that turn DP-SGD into selective release. Without
these two it is plain DP-SGD, as before. docs/training.md shows the difference.

    python examples/opacus_port.py --quick
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sluice import ClippingBiasGate, GlobalScaling, PrivacyEngine
from sluice.data import load

parser = argparse.ArgumentParser()
parser.add_argument("--quick", action="store_true", help="one epoch instead of ten")
EPOCHS = 1 if parser.parse_args().quick else 10
EPSILON, DELTA = 3.0, 1e-5

digits = load("digits")
train_loader = DataLoader(TensorDataset(*digits.train.batch(range(len(digits.train)))), batch_size=128, shuffle=True)
test_x, test_y = digits.test.batch(range(len(digits.test)))

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
criterion = nn.CrossEntropyLoss()

privacy_engine = PrivacyEngine()
model, optimizer, train_loader = privacy_engine.make_private_with_epsilon(
    module=model,
    optimizer=optimizer,
    data_loader=train_loader,
    target_epsilon=EPSILON,
    target_delta=DELTA,
    epochs=EPOCHS,
    max_grad_norm=1.0,
    scaling=GlobalScaling(bound=1.0),
    gate=ClippingBiasGate(),
)

for epoch in range(1, EPOCHS + 1):
    model.train()
    for images, labels in train_loader:
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()

    model.eval()
    with torch.no_grad():
        accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
    epsilon = privacy_engine.get_epsilon(DELTA)  # of a run that is planned to stop here, as in Opacus
    print(
        f"epoch {epoch}: test accuracy {accuracy:.3f}, epsilon {epsilon:.2f} at delta {DELTA} if planned to stop here"
    )
