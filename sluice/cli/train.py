"""``sluice train``: one run, from its settings to its certificate."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from sluice._base.interrupts import sigterm_as_interrupt
from sluice.cli.launching import is_started_here, is_worker, joined, restarts, run_workers
from sluice.cli.output import print_json
from sluice.experiments.settings import BUDGET, DATA, RUN, TrainSettings, settings_from
from sluice.experiments.settings_files import assignment, settings_in

if TYPE_CHECKING:
    from sluice.cli.train_output import Screen
    from sluice.experiments.recorded import RecordedRun
    from sluice.experiments.run import Training, TrainResult
    from sluice.training.distributed.workers import Workers

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
        metadata=_shown(
            RUN,
            "Name (in runs/) or path of the new run; DATASET-METHOD-NUMBER if not given.",
            names=("--run", "--name"),  # torchrun takes --run for an option of its own
        ),
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
    workers: int | None = field(
        default=None,
        metadata=_shown(RUN, "Processes on this machine that share each batch; torchrun starts them on several."),
    )
    worker_timeout: float = field(
        default=60.0, metadata=_shown(RUN, "Seconds without a sign of life after which a worker counts as lost.")
    )
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
    operation = _Operation(**{each.name: given.pop(each.name) for each in fields(_Operation)})
    if _is_to_be_shared(operation):
        timeout, threads = operation.worker_timeout, operation.threads
        raise typer.Exit(run_workers(operation.workers or 1, sys.argv[1:], timeout=timeout, threads=threads))
    overrides = {name: value for name, value in given.items() if value is not None}
    if operation.option:
        overrides["options"] = dict(assignment(item, argument="option") for item in operation.option)
    _set_threads(operation.threads)
    workers = joined(timeout=operation.worker_timeout)
    with _quiet_unless_first(workers), workers.announced():
        _train(overrides, operation, workers)
        with sigterm_as_interrupt():
            workers.leave()


@contextmanager
def _quiet_unless_first(workers: Workers) -> Iterator[None]:
    """Where `run_workers` watches, worker 0 alone says that it was interrupted, or that another one is lost."""
    from sluice.training.distributed.workers import WorkerLostError

    try:
        yield
    except (WorkerLostError, KeyboardInterrupt) as error:
        if is_started_here() and not workers.is_first:
            raise typer.Exit(130 if isinstance(error, KeyboardInterrupt) else 3) from None
        raise


def _train(overrides: dict[str, Any], operation: _Operation, workers: Workers) -> None:
    from sluice.cli.train_output import Screen, print_plan, print_result, result_as_json
    from sluice.runs.folder import RunFolder

    screen = Screen(show_private=operation.show_private, quiet=operation.as_json or not workers.is_first)
    run = workers.from_first(lambda: _chosen_run(overrides, operation))
    path, result = run.path, run.recorded.result
    if result is not None:
        if workers.is_first:
            RunFolder.look(path).close_private()
            screen.say(f"{path} is finished: nothing is left to do.")
    else:
        defaults = _defaults(overrides, operation.config) if run.is_new else frozenset()
        training = _training(run.recorded, operation, screen, workers, defaults=defaults)
        if not run.is_new:
            training = _with_features_of(run, training, operation, screen, workers)
        if not workers.is_first:
            return _assist(training)
        if not operation.as_json:
            print_plan(training)
        result = _carry_out(training, path, operation, screen, is_new=run.is_new)
    if not workers.is_first:
        return None
    if operation.as_json:
        print_json(result_as_json(result))
    else:
        print_result(result)
    return None


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


@dataclass(frozen=True, kw_only=True)
class _ChosenRun:
    """Where a run is, and what is known of it before it is trained."""

    path: Path
    is_new: bool
    recorded: RecordedRun


def _chosen_run(overrides: dict[str, Any], operation: _Operation) -> _ChosenRun:
    from sluice.experiments.recorded import recorded_run

    if operation.resume is None:
        return _new_run(overrides, operation)
    given_too = [name for name in ("config", "recipe", "run") if getattr(operation, name) is not None]
    _refuse_settings([*overrides, *given_too])
    path = _existing(operation.resume)
    return _ChosenRun(path=path, is_new=False, recorded=recorded_run(path))


def _new_run(overrides: dict[str, Any], operation: _Operation) -> _ChosenRun:
    from sluice._base.errors import InputError
    from sluice.experiments.recorded import RecordedRun, recorded_run
    from sluice.runs.folder import may_begin

    settings = settings_from(overrides, file=operation.config, recipe=operation.recipe)
    restarted, may_restart = restarts()
    if may_restart and operation.run is None:
        raise InputError(
            "--max-restarts needs --run: a worker that is started again must find the run that it was part of."
        )
    path = _new_path(operation.run, settings)
    if may_begin(path):
        return _ChosenRun(path=path, is_new=True, recorded=RecordedRun(settings=settings, mechanism=None, result=None))
    if restarted:
        recorded = recorded_run(path)
        if _is_continued(recorded.settings, settings, defaults=_defaults(overrides, operation.config)):
            return _ChosenRun(path=path, is_new=False, recorded=recorded)
    raise InputError(f"run={str(path)!r} exists: choose another name, or resume it: sluice train --resume {path}")


def _is_to_be_shared(operation: _Operation) -> bool:
    """Whether this process only has to start the workers."""
    from sluice._base import validate
    from sluice._base.errors import InputError

    validate.positive(worker_timeout=operation.worker_timeout)
    if operation.workers is None or is_started_here():
        return False
    validate.positive_integer(workers=operation.workers)
    if is_worker():
        raise InputError(
            f"workers={operation.workers} cannot be given to torchrun, which has started the workers already."
        )
    return operation.workers > 1


def _defaults(overrides: dict[str, Any], config: Path | None) -> frozenset[str]:
    """The settings that nobody chose and that depend on how many records there are."""
    files = [settings_in(config)] if config is not None else []
    chosen = {name for each in (*files, overrides) for name in (*each, *each.get("options", {}))}
    return frozenset(("batch_size", "validation_batch_size")) - chosen


def _is_continued(recorded: TrainSettings, settings: TrainSettings, *, defaults: frozenset[str]) -> bool:
    """Whether a run has these settings, but for what was fitted to its records where nobody chose it."""
    batch_size = recorded.batch_size if "batch_size" in defaults else settings.batch_size
    options = recorded.options if "validation_batch_size" in defaults else settings.options
    return replace(settings, batch_size=batch_size, options=options) == recorded


def _with_features_of(
    run: _ChosenRun, training: Training, operation: _Operation, screen: Screen, workers: Workers
) -> Training:
    """The same training with the version of the features that the run began with, where that can still be computed."""
    from sluice.experiments.preparing import feature_versions

    for version in feature_versions(training.settings)[1:]:
        if workers.from_first(partial(training.has_data_of, run.path)):
            break
        training = _training(run.recorded, operation, screen, workers, features_version=version)
    return training


def _training(
    recorded: RecordedRun,
    operation: _Operation,
    screen: Screen,
    workers: Workers,
    *,
    features_version: int | None = None,
    defaults: frozenset[str] = frozenset(),
) -> Training:
    from sluice.experiments.fitting import fitted
    from sluice.experiments.preparing import feature_versions, prepare
    from sluice.experiments.run import Training

    settings = recorded.settings
    version = feature_versions(settings)[0] if features_version is None else features_version
    splits = workers.in_turn(lambda: prepare(settings, data_dir=operation.data_dir, features_version=version))
    return Training(
        settings=fitted(settings, train=splits.train, defaults=defaults),
        splits=splits,
        mechanism=recorded.mechanism,
        checkpoint_every=operation.checkpoint_every,
        max_physical_batch_size=operation.max_physical_batch_size,
        report=screen.report,
        report_private=screen.report_private,
    )


def _assist(training: Training) -> None:
    from sluice._base.memory import keep_freed_memory

    keep_freed_memory()
    with sigterm_as_interrupt():
        training.assist()


def _carry_out(training: Training, path: Path, operation: _Operation, screen: Screen, *, is_new: bool) -> TrainResult:
    from contextlib import ExitStack

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
