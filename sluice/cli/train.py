"""``sluice train``: one run, from its settings to its certificate."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from sluice.cli.output import print_json
from sluice.experiments.settings import BUDGET, DATA, RUN, TrainSettings, assignment, settings_from, settings_in

if TYPE_CHECKING:
    from sluice.cli.train_output import Screen
    from sluice.experiments.run import Training, TrainResult
    from sluice.mechanism.base import Mechanism

RUNS = Path("runs")


def _shown(group: str | None, text: str, **metadata: Any) -> dict[str, Any]:
    return {"group": group, "help": text, **metadata}


@dataclass(frozen=True, kw_only=True)
class _Operation:
    """How a run is carried out and shown: none of it changes what is released."""

    data_dir: Path | None = field(default=None, metadata=_shown(DATA, "Folder with data sets, looked at first."))
    option: list[str] | None = field(
        default=None,
        metadata=_shown(
            BUDGET,
            "A setting that only this method has (sluice methods NAME); may be repeated.",
            names=("--option", "-o"),
            metavar="NAME=VALUE",
        ),
    )
    config: Path | None = field(
        default=None, metadata=_shown(RUN, "TOML or JSON file with settings; options win over it.")
    )
    recipe: str | None = field(
        default=None,
        metadata=_shown(
            RUN, "Which defaults: best, or paper for the nets and settings of the paper; the best known if not given."
        ),
    )
    run: str | None = field(
        default=None,
        metadata=_shown(RUN, "Name (in runs/) or path of the new run; DATASET-METHOD-NUMBER if not given."),
    )
    resume: str | None = field(
        default=None, metadata=_shown(RUN, "Resume this run, by its own settings; no other setting is allowed.")
    )
    checkpoint_every: int | None = field(
        default=None,
        metadata=_shown(
            RUN, "Releases between two checkpoints; if not given, each release is kept, or a hundred with a seed."
        ),
    )
    threads: int | None = field(default=None, metadata=_shown(RUN, "Threads of PyTorch; its own choice if not given."))
    max_physical_batch_size: int = field(
        default=1024, metadata=_shown(RUN, "Records in memory at once; changes no result.")
    )
    tensorboard: bool = field(default=False, metadata=_shown(RUN, "Also write public values for TensorBoard."))
    show_private: bool = field(
        default=False,
        metadata=_shown(
            RUN, "Show attempts and metric of each release, on your own screen: they must not be published."
        ),
    )
    as_json: bool = field(
        default=False, metadata=_shown(None, "Print one JSON object instead of text.", names=("--json",))
    )


def train(**given: Any) -> None:
    """Train a model with differential privacy and certify what it cost.

    Settings that are not given come from --config, else from the defaults of the data set. Noise is calibrated to the
    budget by the sound accountant. The run folder gets public/, which may be published, and private/, which must not.

    Example: sluice train --dataset digits --epsilon 3
    """
    from sluice.cli.train_output import Screen, print_plan, print_result, result_as_json
    from sluice.experiments.run import recorded_run

    operation = _Operation(**{each.name: given.pop(each.name) for each in fields(_Operation)})
    overrides = {name: value for name, value in given.items() if value is not None}
    if operation.option:
        overrides["options"] = dict(assignment(item, argument="option") for item in operation.option)
    _set_threads(operation.threads)
    screen = Screen(show_private=operation.show_private, quiet=operation.as_json)
    defaults: frozenset[str] = frozenset()
    if operation.resume is None:
        settings, path = _new_run(overrides, operation)
        mechanism, result = None, None
        defaults = _defaults(overrides, operation.config)
    else:
        given_too = [name for name in ("config", "recipe", "run") if getattr(operation, name) is not None]
        _refuse_settings([*overrides, *given_too])
        path = _existing(operation.resume)
        recorded = recorded_run(path)
        settings, mechanism, result = recorded.settings, recorded.mechanism, recorded.result
    if result is not None:
        screen.say(f"{path} is finished: nothing is left to do.")
    else:
        training = _training(settings, mechanism, operation, screen, defaults=defaults)
        if operation.resume is not None:
            training = _with_features_of(path, training, operation, screen)
        if not operation.as_json:
            print_plan(training)
        result = _carry_out(training, path, operation, screen, is_new=operation.resume is None)
    if operation.as_json:
        print_json(result_as_json(result))
    else:
        print_result(result)


def _parameters() -> Iterator[inspect.Parameter]:
    """The command's options: one for each setting, None where it is not given, and those of the operation."""
    for options in (TrainSettings, _Operation):
        kinds = get_type_hints(options)
        for each in fields(options):
            if each.name == "options":
                continue  # given one by one, as --option
            is_setting = options is TrainSettings
            option = typer.Option(
                *_names(each.name, each.metadata),
                help=each.metadata["help"],
                rich_help_panel=each.metadata["group"],
                metavar=each.metadata.get("metavar"),
                show_default=not is_setting,
            )
            yield inspect.Parameter(
                each.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None if is_setting else each.default,
                annotation=Annotated[kinds[each.name] | None if is_setting else kinds[each.name], option],
            )


def _names(name: str, metadata: Any) -> tuple[str, ...]:
    dashed = f"--{name.replace('_', '-')}"
    if "names" in metadata:
        return tuple(metadata["names"])
    return (f"{dashed}/--{metadata['otherwise']}" if "otherwise" in metadata else dashed,)


# The command line reads a function's signature: this one is made of fields, so that every setting is written down once.
train.__signature__ = inspect.Signature(list(_parameters()))  # type: ignore[attr-defined]
train.__annotations__ = {name: each.annotation for name, each in inspect.signature(train).parameters.items()}


def _refuse_settings(named: list[str]) -> None:
    from sluice._base.errors import InputError

    if named:
        raise InputError(
            f"{', '.join(named)} cannot be given with --resume: a run resumes with the settings that it began with."
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


def _new_run(overrides: dict[str, Any], operation: _Operation) -> tuple[TrainSettings, Path]:
    from sluice._base.errors import InputError
    from sluice.runs.folder import may_begin

    settings = settings_from(overrides, file=operation.config, recipe=operation.recipe)
    path = _new_path(operation.run, settings)
    if not may_begin(path):
        raise InputError(f"run={str(path)!r} exists: choose another name, or resume it: sluice train --resume {path}")
    return settings, path


def _defaults(overrides: dict[str, Any], config: Path | None) -> frozenset[str]:
    """The settings that nobody chose and that depend on how many records there are."""
    files = [settings_in(config)] if config is not None else []
    chosen = {name for each in (*files, overrides) for name in (*each, *each.get("options", {}))}
    return frozenset(("batch_size", "validation_batch_size")) - chosen


def _with_features_of(path: Path, training: Training, operation: _Operation, screen: Screen) -> Training:
    """The same training with the version of the features that the run began with, where that can still be computed."""
    from sluice.experiments.preparing import feature_versions

    settings = training.settings
    for version in feature_versions(settings)[1:]:
        if training.has_data_of(path):
            break
        training = _training(settings, training.mechanism, operation, screen, features_version=version)
    return training


def _training(
    settings: TrainSettings,
    mechanism: Mechanism | None,
    operation: _Operation,
    screen: Screen,
    *,
    features_version: int | None = None,
    defaults: frozenset[str] = frozenset(),
) -> Training:
    from sluice.experiments.preparing import feature_versions, prepare
    from sluice.experiments.run import Training

    version = feature_versions(settings)[0] if features_version is None else features_version
    return Training(
        settings=settings,
        splits=prepare(settings, data_dir=operation.data_dir, features_version=version),
        mechanism=mechanism,
        checkpoint_every=operation.checkpoint_every,
        max_physical_batch_size=operation.max_physical_batch_size,
        report=screen.report,
        report_private=screen.report_private,
        defaults=defaults,
    )


def _carry_out(training: Training, path: Path, operation: _Operation, screen: Screen, *, is_new: bool) -> TrainResult:
    from contextlib import ExitStack

    from sluice._base.interrupts import sigterm_as_interrupt
    from sluice._base.memory import keep_freed_memory

    keep_freed_memory()
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
        screen.say(f"interrupted. Resume with: sluice train --resume {path}{where}")
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
