"""One training step by other libraries, in each of their modes, with the noise that they add by default."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable

from torch import Tensor, nn

from sluice.experiments.bench.scenarios import mean_loss, sgd

OPACUS_MODES = ("hooks", "functorch", "ew", "ghost")
FASTDP_MODES = ("MixOpt", "ghost")
#: Opacus keeps every per-sample gradient of a physical batch; larger batches are cut so that these fit into this.
_OPACUS_BYTES = 2 * 2**30


class Skipped(Exception):
    """A method cannot run a model; the message says why."""


def opacus(mode: str, model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    try:
        from opacus.grad_sample.utils import wrap_model
        from opacus.optimizers import get_optimizer_class
        from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
        from opacus.validators import ModuleValidator
    except ImportError as error:
        raise Skipped("Opacus is not installed: pip install 'sluice[bench]'") from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = ModuleValidator.fix(model)
        wrapped = wrap_model(model, grad_sample_mode=mode, batch_first=True, loss_reduction="mean")
    bytes_each = 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    part = len(y) if mode == "ghost" else max(1, min(len(y), _OPACUS_BYTES // bytes_each))
    kind = get_optimizer_class(clipping="flat", distributed=False, grad_sample_mode=mode)
    private = kind(sgd(model), noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=len(y))
    criterion: Callable[..., Tensor] = nn.CrossEntropyLoss()
    if mode == "ghost":
        criterion = DPLossFastGradientClipping(wrapped, private, nn.CrossEntropyLoss())

    def step() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for i in range(0, len(y), part):
                private.signal_skip_step(do_skip=i + part < len(y))
                criterion(wrapped(x[i : i + part]), y[i : i + part]).backward()
                private.step()
                private.zero_grad()

    return step


def fastdp(mode: str, model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    optimizer = sgd(model)
    trained = sum(p.requires_grad for p in model.parameters())
    try:
        from fastDP import PrivacyEngine
    except ImportError as error:
        raise Skipped("fastDP is not installed; it is on GitHub, awslabs/fast-differential-privacy") from error
    with contextlib.redirect_stdout(io.StringIO()):  # it prints while it is set up
        engine = PrivacyEngine(
            model,
            batch_size=len(y),
            sample_size=8 * len(y),
            epochs=1,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            clipping_mode=mode,
            clipping_fn="Abadi",
        )
        engine.attach(optimizer)

    def step() -> None:
        mean_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        step()
    if len(engine.named_params) < trained:
        raise Skipped(f"fastDP leaves {trained - len(engine.named_params)} of {trained} parameters untrained")
    return step
