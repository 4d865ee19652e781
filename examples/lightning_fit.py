"""Private training by Lightning's Trainer: stopped half way, resumed, and the epsilon of the whole.

python examples/lightning_fit.py --quick      # needs pip install 'sluice[lightning]'
"""

import argparse
import tempfile
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from sluice.integrations import Privacy
from sluice.integrations.lightning import fit

parser = argparse.ArgumentParser()
parser.add_argument("--quick", action="store_true", help="20 releases instead of 200")
options = parser.parse_args()
steps = 20 if options.quick else 200

generator = torch.Generator().manual_seed(0)
labels = torch.arange(512) % 4
points = torch.randn(512, 8, generator=generator) + 2 * nn.functional.one_hot(labels, 8)
train = DataLoader(TensorDataset(points[:384], labels[:384]), batch_size=64)
test = DataLoader(TensorDataset(points[384:], labels[384:]), batch_size=64)


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.model(x), y)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("accuracy", (self.model(x).argmax(1) == y).float().mean())

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Interrupt(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        trainer.should_stop = trainer.global_step >= steps // 2


privacy = Privacy(target_epsilon=3.0, delta=1e-5, max_grad_norm=1.0)
quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
with tempfile.TemporaryDirectory() as folder:
    ledger, checkpoint = Path(folder) / "ledger.jsonl", str(Path(folder) / "half.ckpt")

    # The number of steps is part of what is promised, so the first part says how long the whole is, too.
    trainer = pl.Trainer(max_steps=steps, callbacks=[Interrupt()], enable_checkpointing=False, **quiet)
    fit(trainer, Classifier(), train, privacy=privacy, ledger=ledger)
    trainer.save_checkpoint(checkpoint)
    print(f"stopped after {trainer.global_step} steps")

    module = Classifier()
    trainer = pl.Trainer(max_steps=steps, enable_checkpointing=False, **quiet)
    engine = fit(trainer, module, train, privacy=privacy, ledger=ledger, ckpt_path=checkpoint)

accuracy = trainer.validate(module, test, verbose=False)[0]["accuracy"]
print(f"test accuracy {accuracy:.3f} after {trainer.global_step} steps, {engine.released} releases")
print(f"epsilon {engine.get_certified_epsilon(1e-5):.3f} at delta 1e-5")
