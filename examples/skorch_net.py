"""Private training of a skorch net: stopped half way, resumed, and the epsilon of the whole.

python examples/skorch_net.py --quick      # needs pip install 'sluice[skorch]'
"""

import argparse
import tempfile

import torch
from skorch.callbacks import Callback
from torch import nn

from sluice.integrations import Privacy
from sluice.integrations.skorch import PrivateClassifier

parser = argparse.ArgumentParser()
parser.add_argument("--quick", action="store_true", help="4 epochs instead of 30")
options = parser.parse_args()
epochs = 4 if options.quick else 30

generator = torch.Generator().manual_seed(0)
labels = torch.arange(512) % 4
points = torch.randn(512, 8, generator=generator) + 2 * nn.functional.one_hot(labels, 8)
x, y = points[:384].numpy(), labels[:384].numpy()


class Stop(Callback):
    def on_epoch_end(self, net: PrivateClassifier, **_: object) -> None:
        if len(net.history) == epochs // 2:
            raise KeyboardInterrupt  # as if someone pressed Ctrl-C


def net(folder: str, callbacks: list[Callback]) -> PrivateClassifier:
    return PrivateClassifier(
        nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)),
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.Adam,
        lr=0.05,
        batch_size=64,
        max_epochs=epochs,
        train_split=None,
        callbacks=callbacks,
        verbose=0,
        privacy=Privacy(target_epsilon=3.0, delta=1e-5, max_grad_norm=1.0),
        private_folder=folder,
    )


with tempfile.TemporaryDirectory() as folder:
    first = net(folder, [Stop()]).fit(x, y)
    print(f"stopped after {first.privacy_engine_.released} releases")
    first.privacy_engine_.close()

    second = net(folder, []).fit(x, y)
    engine = second.privacy_engine_
    engine.close()

accuracy = (second.predict(points[384:].numpy()) == labels[384:].numpy()).mean()
print(f"test accuracy {accuracy:.3f} after {engine.released} releases")
print(f"epsilon {engine.get_certified_epsilon(1e-5):.3f} at delta 1e-5")
