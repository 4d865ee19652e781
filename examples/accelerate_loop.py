"""Private training in a loop written for Accelerate: stopped half way, resumed, and the epsilon of the whole.

python examples/accelerate_loop.py --quick      # needs pip install 'sluice[accelerate]'
"""

import argparse
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sluice import PrivacyEngine
from sluice.integrations.accelerate import prepare

parser = argparse.ArgumentParser()
parser.add_argument("--quick", action="store_true", help="20 releases instead of 200")
options = parser.parse_args()
releases = 20 if options.quick else 200

generator = torch.Generator().manual_seed(0)
labels = torch.arange(512) % 4
points = torch.randn(512, 8, generator=generator) + 2 * nn.functional.one_hot(labels, 8)
train = DataLoader(TensorDataset(points[:384], labels[:384]), batch_size=64)


def run(folder: Path, *, until: int) -> tuple[nn.Module, PrivacyEngine]:
    """Train until so many releases are made, from where the folder says; keep the state there."""
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    adam = torch.optim.Adam(model.parameters(), lr=0.05)
    engine = PrivacyEngine()
    engine.make_private_with_epsilon(
        module=model,
        optimizer=adam,
        data_loader=train,
        target_epsilon=3.0,
        target_delta=1e-5,
        releases=releases,
        max_grad_norm=1.0,
        lr_scheduler=torch.optim.lr_scheduler.LinearLR(adam, 1.0, 0.1, total_iters=releases),
        ledger=folder / "ledger.jsonl",
    )
    model, optimizer, loader = prepare(accelerator, engine)
    if (folder / "state").exists():
        accelerator.load_state(str(folder / "state"))
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        if engine.released >= until:
            break
    accelerator.save_state(str(folder / "state"))
    engine.close()
    return model, engine


with tempfile.TemporaryDirectory() as name:
    _, engine = run(Path(name), until=releases // 2)
    print(f"stopped after {engine.released} releases")
    model, engine = run(Path(name), until=releases)

with torch.no_grad():
    accuracy = (model(points[384:]).argmax(1) == labels[384:]).float().mean().item()
print(f"test accuracy {accuracy:.3f} after {engine.released} releases")
print(f"epsilon {engine.get_certified_epsilon(1e-5):.3f} at delta 1e-5")
