from __future__ import annotations

import pytest
import torch

pl = pytest.importorskip("lightning.pytorch", reason="needs pip install 'sluice[lightning]'")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from sluice import PrivacyEngine  # noqa: E402
from sluice._base.errors import InputError  # noqa: E402
from sluice.integrations import Privacy  # noqa: E402
from sluice.integrations.lightning import fit  # noqa: E402
from sluice.mechanism.gates import CoinGate  # noqa: E402
from sluice.runs.ledger import read_ledger  # noqa: E402

STEPS = 6


class Automatic(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        self.seen = 0

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        self.seen += 1
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("private_loss", loss)
        return {"loss": loss} if batch_idx % 2 else loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Manual(Automatic):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self(x), y))
        optimizer.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


def data() -> DataLoader:
    generator = torch.Generator().manual_seed(5)
    y = torch.arange(60) % 3
    return DataLoader(TensorDataset(torch.randn(60, 4, generator=generator) + y[:, None], y), batch_size=20)


def budget(**fields) -> Privacy:
    return Privacy(
        **{"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 1.0, "accountant": "rdp", "seed": 3, **fields}
    )


def trainer(**settings) -> pl.Trainer:
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    return pl.Trainer(**{"max_steps": STEPS, "accelerator": "cpu", **quiet, **settings})


def weights(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def plain(privacy: Privacy, *, scheduled: bool) -> torch.Tensor:
    """The same run in an ordinary loop."""
    module = Automatic()
    inner = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LinearLR(inner, 1.0, 0.1, total_iters=STEPS) if scheduled else None
    engine = PrivacyEngine(accountant="rdp", seed=3)
    _, optimizer, loader = engine.make_private(
        module=module.net,
        optimizer=inner,
        data_loader=data(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        releases=STEPS,
        gate=privacy.gate,
        lr_scheduler=schedule,
        max_physical_batch_size=privacy.max_physical_batch_size,
    )
    for x, y in loader:
        F.cross_entropy(module.net(x), y).backward()
        optimizer.step()
    engine.close()
    return weights(module)


@pytest.mark.parametrize("kind", [Automatic, Manual])
@pytest.mark.parametrize("gate", [None, CoinGate(probability=0.5)], ids=["none", "coin"])
def test_a_step_is_a_release_and_weights_are_those_of_an_ordinary_loop(kind, gate):
    privacy = budget(gate=gate, max_physical_batch_size=8)
    module, run = kind(), trainer()
    engine = fit(run, module, data(), privacy=privacy)
    assert run.global_step == engine.released == STEPS
    assert torch.allclose(weights(module), plain(privacy, scheduled=kind is Automatic), atol=1e-6)
    assert engine.get_certified_epsilon(1e-3) == engine.get_epsilon(1e-3)


def test_the_module_is_left_as_it_was():
    module = Automatic()
    fit(trainer(), module, data(), privacy=budget())
    assert not {"training_step", "configure_optimizers", "optimizers"} & set(module.__dict__)
    assert module.seen >= STEPS


@pytest.mark.parametrize("seed", [3, None])
def test_a_run_resumes_from_its_checkpoint(tmp_path, seed):
    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.should_stop = trainer.global_step >= 3

    privacy, ledger = budget(seed=seed), tmp_path / "ledger.jsonl"
    first = trainer(callbacks=[Stop()])
    fit(first, Automatic(), data(), privacy=privacy, ledger=ledger)
    first.save_checkpoint(tmp_path / "half.ckpt")
    assert first.global_step == 3
    module, second = Automatic(), trainer()
    engine = fit(second, module, data(), privacy=privacy, ledger=ledger, ckpt_path=str(tmp_path / "half.ckpt"))
    assert second.global_step == engine.released == STEPS
    assert read_ledger(ledger).spent == STEPS
    if seed is not None:
        assert torch.allclose(weights(module), plain(privacy, scheduled=True), atol=1e-6)


def test_a_checkpoint_without_the_ledger_is_refused(tmp_path):
    """What was released since the checkpoint is known to the ledger alone."""
    first = trainer()
    fit(first, Automatic(), data(), privacy=budget(seed=None))
    first.save_checkpoint(tmp_path / "half.ckpt")
    with pytest.raises(InputError, match="would not be charged"):
        fit(trainer(), Automatic(), data(), privacy=budget(seed=None), ckpt_path=str(tmp_path / "half.ckpt"))


def test_epochs_say_how_many_releases_there_are():
    run = trainer(max_steps=-1, max_epochs=2)
    assert fit(run, Automatic(), data(), privacy=budget()).released == run.global_step == 6


class Two(Automatic):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.net[0].parameters(), lr=1.0), torch.optim.SGD(self.net[2].parameters(), lr=1.0)]


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (Automatic, {"accumulate_grad_batches": 2}, "one step is one release"),
        (Automatic, {"gradient_clip_val": 1.0}, "each record's gradient is clipped"),
        (Automatic, {"precision": "bf16-mixed"}, "norms are measured"),
        (Automatic, {"max_steps": -1, "max_epochs": -1}, "the trainer has no end"),
        (Two, {}, "returned 2 optimizers"),
    ],
)
def test_what_would_be_wrong_is_refused(kind, settings, message):
    with pytest.raises(InputError, match=message):
        fit(trainer(**settings), kind(), data(), privacy=budget())


def test_a_checkpoint_without_privacy_is_refused(tmp_path):
    run = trainer(max_steps=1)
    run.fit(Automatic(), data())
    run.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(InputError, match="training without privacy"):
        fit(trainer(), Automatic(), data(), privacy=budget(), ckpt_path=str(tmp_path / "plain.ckpt"))


class Plateau(Automatic):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "private_loss"}}


@pytest.mark.parametrize(
    ("module", "callbacks"),
    [
        (Plateau, []),
        (Automatic, [pl.callbacks.EarlyStopping("private_loss")]),
        (Automatic, [pl.callbacks.EarlyStopping("private_loss_epoch")]),
    ],
)
def test_nothing_follows_what_training_logs(module, callbacks):
    with pytest.raises(InputError, match="logs it from private records"):
        fit(trainer(callbacks=callbacks), module(), data(), privacy=budget())
