"""``sluice train``: one run, from its settings to its certificate."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.cli.output import JsonFlag, print_json

if TYPE_CHECKING:
    from sluice.cli.train_output import Screen
    from sluice.experiments.run import Training, TrainResult
    from sluice.experiments.settings import TrainSettings
    from sluice.mechanism.base import Mechanism

RUNS = Path("runs")

_DATA, _BUDGET, _OPTIMISER, _GATE, _RUN = "Data and model", "Budget", "Optimisation", "Scaling and gate", "Run"


@dataclass(frozen=True, kw_only=True)
class _Operation:
    """How a run is carried out: none of it changes what is released."""

    data_dir: Path | None
    checkpoint_every: int | None
    max_physical_batch_size: int
    tensorboard: bool


def _option(name: str, panel: str, text: str) -> Any:
    return typer.Option(name, help=text, rich_help_panel=panel, show_default=False)


def train(
    dataset: Annotated[
        str | None,
        _option("--dataset", _DATA, "digits, mnist, fashion-mnist, cifar-10, imdb, or a .npz file or folder."),
    ] = None,
    classes: Annotated[
        int | None,
        _option("--classes", _DATA, "How many classes your own data can have; the highest label tells if not given."),
    ] = None,
    data_dir: Annotated[Path | None, _option("--data-dir", _DATA, "Folder with data sets, looked at first.")] = None,
    features: Annotated[
        str | None, _option("--features", _DATA, "What the model sees: plain, scattering or bag-of-words.")
    ] = None,
    model: Annotated[
        str | None,
        _option("--model", _DATA, "linear, mlp, pixel-cnn, scattering-cnn, bilstm, embedding or bag-of-words."),
    ] = None,
    activation: Annotated[
        str | None, _option("--activation", _DATA, "tanh, relu, tempered-sigmoid[:s,T,o]; for nets.")
    ] = None,
    hold_out: Annotated[
        float | None,
        _option("--hold-out", _DATA, "Keep this share of the training records aside to choose settings with."),
    ] = None,
    method: Annotated[
        str | None, _option("--method", _BUDGET, "dpsr-cg (selective release), dpsgd, ...: see sluice methods.")
    ] = None,
    epsilon: Annotated[float | None, _option("--epsilon", _BUDGET, "Budget that noise is calibrated to.")] = None,
    delta: Annotated[float | None, _option("--delta", _BUDGET, "Probability with which epsilon may fail.")] = None,
    noise_multiplier: Annotated[
        float | None, _option("--noise-multiplier", _BUDGET, "Noise, if not calibrated: epsilon is what results.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            "-o",
            metavar="NAME=VALUE",
            help="A setting that only this method has (sluice methods NAME); may be repeated.",
            rich_help_panel=_BUDGET,
            show_default=False,
        ),
    ] = None,
    releases: Annotated[int | None, _option("--releases", _BUDGET, "Updates to release.")] = None,
    batch_size: Annotated[int | None, _option("--batch-size", _BUDGET, "Expected size of a batch.")] = None,
    accountant: Annotated[str | None, _option("--accountant", _BUDGET, "pld (tight) or rdp.")] = None,
    optimizer: Annotated[str | None, _option("--optimizer", _OPTIMISER, "sgd, adam or adamw.")] = None,
    lr: Annotated[float | None, _option("--lr", _OPTIMISER, "Learning rate.")] = None,
    momentum: Annotated[float | None, _option("--momentum", _OPTIMISER, "Of sgd.")] = None,
    lr_schedule: Annotated[
        str | None, _option("--lr-schedule", _OPTIMISER, "constant, linear or cosine; falls by release.")
    ] = None,
    ema_decay: Annotated[
        float | None, _option("--ema-decay", _OPTIMISER, "Publish the average of released weights; 0: the last.")
    ] = None,
    max_grad_norm: Annotated[
        float | None, _option("--max-grad-norm", _GATE, "The most that a record's weighted gradient measures.")
    ] = None,
    scaling: Annotated[str | None, _option("--scaling", _GATE, "clip, global or normalise.")] = None,
    scaling_bound: Annotated[
        float | None, _option("--scaling-bound", _GATE, "S of global scaling, gamma of normalise.")
    ] = None,
    gate: Annotated[str | None, _option("--gate", _GATE, "clipping-bias, coin or none.")] = None,
    beta: Annotated[float | None, _option("--beta", _GATE, "Threshold of the gate.")] = None,
    clip_range: Annotated[float | None, _option("--clip-range", _GATE, "Clip of the gate's difference.")] = None,
    gate_noise: Annotated[
        float | None, _option("--gate-noise", _GATE, "Noise of the decision; calibrated if not given.")
    ] = None,
    reference_noise: Annotated[
        float | None, _option("--reference-noise", _GATE, "Noise of the public reference; calibrated if not given.")
    ] = None,
    large_norm: Annotated[
        float | None, _option("--large-norm", _GATE, "Gradient norm from which a record counts fully.")
    ] = None,
    reference_decay: Annotated[
        float | None, _option("--reference-decay", _GATE, "Weight of the past in the public reference.")
    ] = None,
    max_attempts: Annotated[
        int | None, _option("--max-attempts", _GATE, "Give up on a release after this many; dpsur: on the run.")
    ] = None,
    hidden_reference: Annotated[
        bool | None,
        _option(
            "--hidden-reference/--public-reference", _GATE, "Compare as the paper does: no epsilon is proved then."
        ),
    ] = None,
    coin_probability: Annotated[
        float | None, _option("--coin-probability", _GATE, "Of the coin gate; the other gate's if not given.")
    ] = None,
    seed: Annotated[
        int | None, _option("--seed", _RUN, "Repeatable noise, for experiments only; cryptographic if not given.")
    ] = None,
    evaluate_every: Annotated[
        int | None, _option("--evaluate-every", _RUN, "Releases between two looks at the test set; 0: only at the end.")
    ] = None,
    config: Annotated[
        Path | None, _option("--config", _RUN, "TOML or JSON file with settings; options win over it.")
    ] = None,
    run: Annotated[
        str | None,
        _option("--run", _RUN, "Name (in runs/) or path of the new run; DATASET-METHOD-NUMBER if not given."),
    ] = None,
    resume: Annotated[
        str | None, _option("--resume", _RUN, "Go on with this run, by its own settings; no other setting is allowed.")
    ] = None,
    checkpoint_every: Annotated[
        int | None,
        _option(
            "--checkpoint-every",
            _RUN,
            "Releases between two checkpoints; if not given, 1, or a hundred in all with a seed.",
        ),
    ] = None,
    threads: Annotated[
        int | None, _option("--threads", _RUN, "Threads of PyTorch; its own choice if not given.")
    ] = None,
    max_physical_batch_size: Annotated[
        int,
        typer.Option(
            "--max-physical-batch-size", help="Records in memory at once; changes no result.", rich_help_panel=_RUN
        ),
    ] = 1024,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write public values for TensorBoard.", rich_help_panel=_RUN)
    ] = False,
    show_private: Annotated[
        bool,
        typer.Option(
            "--show-private",
            help="Show attempts and metric of each release, on your own screen: they must not be published.",
            rich_help_panel=_RUN,
        ),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Train a model with differential privacy and certify what it cost.

    Settings that are not given come from --config, else from the defaults of the data set. Noise is calibrated to the
    budget by the sound accountant. The run folder gets public/, which may be published, and private/, which must not.

    Example: sluice train --dataset digits --epsilon 3
    """
    given = dict(locals())
    from sluice.cli.train_output import Screen, print_plan, print_result, result_as_json
    from sluice.experiments.run import recorded_run
    from sluice.experiments.settings import assignment

    overrides = _given_settings(given)
    if option:
        overrides["options"] = dict(assignment(item, argument="option") for item in option)
    operation = _Operation(
        data_dir=data_dir,
        checkpoint_every=checkpoint_every,
        max_physical_batch_size=max_physical_batch_size,
        tensorboard=tensorboard,
    )
    _set_threads(threads)
    screen = Screen(show_private=show_private, quiet=as_json)
    if resume is None:
        settings, path = _new_run(overrides, config, run)
        mechanism, result = None, None
    else:
        _refuse_settings([*overrides, *(name for name in ("config", "run") if given[name] is not None)])
        path = _existing(resume)
        recorded = recorded_run(path)
        settings, mechanism, result = recorded.settings, recorded.mechanism, recorded.result
    if result is not None:
        screen.say(f"{path} is finished: nothing is left to do.")
    else:
        training = _training(settings, mechanism, operation, screen)
        if not as_json:
            print_plan(training)
        result = _carry_out(training, path, operation, screen, is_new=resume is None)
    if as_json:
        print_json(result_as_json(result))
    else:
        print_result(result)


def _given_settings(given: dict[str, Any]) -> dict[str, Any]:
    from sluice.experiments.settings import TrainSettings

    names = {field.name for field in fields(TrainSettings)}
    return {name: value for name, value in given.items() if name in names and value is not None}


def _refuse_settings(named: list[str]) -> None:
    from sluice._base.errors import InputError

    if named:
        raise InputError(
            f"{', '.join(named)} cannot be given with --resume: a run goes on by the settings that it began with."
        )


def _set_threads(threads: int | None) -> None:
    if threads is None:
        return
    import os

    import torch

    from sluice._base.errors import InputError

    processors = os.cpu_count() or 1
    if not 1 <= threads <= processors:  # PyTorch crashes where the system cannot make so many
        raise InputError(f"threads={threads} is not allowed: it must be from 1 to {processors}, the processors here.")
    torch.set_num_threads(threads)


def _new_run(overrides: dict[str, Any], config: Path | None, run: str | None) -> tuple[TrainSettings, Path]:
    from sluice._base.errors import InputError
    from sluice.experiments.settings import settings_from
    from sluice.runs.folder import may_begin

    settings = settings_from(overrides, file=config)
    path = _new_path(run, settings)
    if not may_begin(path):
        raise InputError(
            f"run={str(path)!r} exists: choose another name, or go on with it by sluice train --resume {path}"
        )
    return settings, path


def _training(settings: TrainSettings, mechanism: Mechanism | None, operation: _Operation, screen: Screen) -> Training:
    from sluice.experiments.preparing import prepare
    from sluice.experiments.run import Training

    return Training(
        settings=settings,
        splits=prepare(settings, data_dir=operation.data_dir),
        mechanism=mechanism,
        checkpoint_every=operation.checkpoint_every,
        max_physical_batch_size=operation.max_physical_batch_size,
        report=screen.report,
        report_private=screen.report_private,
    )


def _carry_out(training: Training, path: Path, operation: _Operation, screen: Screen, *, is_new: bool) -> TrainResult:
    from contextlib import ExitStack

    from sluice._base.interrupts import sigterm_as_interrupt

    try:
        with ExitStack() as stack:
            stack.enter_context(sigterm_as_interrupt())
            if operation.tensorboard:
                from sluice.experiments.monitoring import TensorBoard

                screen.also(stack.enter_context(TensorBoard(path / "private")).report)
            stack.enter_context(screen.shown(training.settings.releases))
            return training.start(path) if is_new else training.resume(path)
    except KeyboardInterrupt:
        where = f" --data-dir {operation.data_dir}" if operation.data_dir is not None else ""
        screen.say(f"interrupted. Go on with: sluice train --resume {path}{where}")
        raise typer.Exit(130) from None


def _new_path(run: str | None, settings: TrainSettings) -> Path:
    if run is not None:
        return RUNS / run if Path(run).name == run else Path(run)
    name = f"{Path(settings.dataset).stem}-{settings.method}"
    number = 1
    while (RUNS / f"{name}-{number}").exists():
        number += 1
    return RUNS / f"{name}-{number}"


def _existing(run: str) -> Path:
    path = Path(run)
    return RUNS / run if not path.exists() and path.name == run else path
