"""``sluice audit``: can the epsilon of a run be refuted by what it releases?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.cli.output import JsonFlag, print_json

if TYPE_CHECKING:
    from sluice.audit.evidence import Evidence
    from sluice.audit.result import AuditResult
    from sluice.audit.trials import Trials
    from sluice.experiments.settings import TrainSettings
    from sluice.mechanism.base import Mechanism

app = typer.Typer(
    no_args_is_help=True,
    help="Bound epsilon from below by what a run releases of made-up records. An audit can refute a claim, never prove one.",
)

Confidence = Annotated[float, typer.Option(help="Of each bound.")]
Claimed = Annotated[
    float | None, typer.Option(help="Epsilon to put to the test; if not given, that of the accountant.")
]


@app.command()
def rehearse(
    run: Annotated[Path | None, typer.Option(help="Folder of the run whose mechanism is rehearsed.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML or JSON file with settings, in place of a run.")] = None,
    setting: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A setting of sluice train; may be repeated.")
    ] = None,
    canaries: Annotated[int, typer.Option(help="Made-up records, each in the data by a coin.")] = 1000,
    kind: Annotated[str, typer.Option(help="loud, quiet, mislabelled or blank.")] = "loud",
    runs: Annotated[
        int | None, typer.Option(help="Instead: so many runs with one canary each, for small models.")
    ] = None,
    two_runs: Annotated[
        int | None,
        typer.Option(
            help="Instead: so many releases with one canary and as many without, every record in each; 4000 is usual."
        ),
    ] = None,
    spend: Annotated[
        bool,
        typer.Option(
            "--spend", help="Rehearse on the run's own records: a second release, which spends epsilon again."
        ),
    ] = False,
    confidence: Confidence = 0.95,
    claimed_epsilon: Claimed = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder with data sets, looked at first.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Make a run's own releases on stand-in records with canaries among them, and audit that.

    Test records stand in for the training records, so nothing is spent. The result is written into the run's public
    folder (audit.json, audit.html) and shown on its certificate; the rehearsed model is thrown away. With --spend the
    releases are counted in a ledger of their own, audit-ledger.jsonl. The exit code is 1 if the claim is refuted.

    Example: sluice audit rehearse --run runs/digits-dpsr-cg-1 --canaries 1000
    """
    from sluice._base import validate
    from sluice._base.errors import InputError
    from sluice._base.progress import progress
    from sluice.audit.canaries import KINDS
    from sluice.experiments.preparing import prepare
    from sluice.experiments.rehearsal import Rehearsal, planned_size
    from sluice.experiments.two_runs import two_runs as make_two_runs

    validate.one_of(KINDS, kind=kind)
    if runs is not None and two_runs is not None:
        raise InputError("runs and two_runs cannot be given together: each is an audit of its own.")
    settings, mechanism = _what(run, config, setting)
    ledger = _ledger_to_spend(run, many=runs is not None or two_runs is not None) if spend else None
    splits = prepare(settings, data_dir=data_dir)
    if mechanism is None:
        from sluice.methods import planned_mechanism

        mechanism = planned_mechanism(settings, dataset_size=planned_size(settings, splits))
    total = runs or (2 * two_runs if two_runs else mechanism.releases)
    try:
        with progress("rehearsing", total=total) as advance:
            rehearsal = Rehearsal(
                settings=settings,
                splits=splits,
                mechanism=mechanism,
                confidence=confidence,
                claimed_epsilon=claimed_epsilon,
                report=lambda done: advance(1),
                ledger=ledger,
                begun=lambda: _certify(run),
            )
            found: Evidence | Trials
            if two_runs is not None:
                found = make_two_runs(rehearsal, releases=two_runs)
            elif runs is not None:
                found = rehearsal.repeatedly(runs=runs)
            else:
                found = rehearsal.once(canaries=canaries, kind=kind)  # type: ignore[arg-type]  # one of KINDS
    except BaseException:
        if run is not None and ledger is not None and ledger.exists():  # what was spent is spent
            _certify_again(run)
        raise
    if run is not None:
        _write(run, found)
    _finish(found.result, as_json=as_json)


@app.command()
def show(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")], as_json: JsonFlag = False
) -> None:
    """Show what the last audit of a run found. The exit code is 1 if its claim is refuted.

    Example: sluice audit show runs/digits-dpsr-cg-1
    """
    from sluice.audit.files import read_audit
    from sluice.runs.folder import RunFolder

    _finish(read_audit(RunFolder.look(run)), as_json=as_json)


@app.command()
def scores(
    file: Annotated[
        Path, typer.Argument(metavar="FILE.npz", help="Arrays 'scores' and 'members', one value a canary.")
    ],
    delta: Annotated[float, typer.Option(help="At which epsilon is bounded.")] = 1e-5,
    claimed_epsilon: Claimed = None,
    guesses: Annotated[
        int | None, typer.Option(help="How many to make, fixed before; if not given, planned for the claim.")
    ] = None,
    confidence: Confidence = 0.95,
    page: Annotated[Path | None, typer.Option(help="Write a page with plots to this file.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Audit by scores and coins from any library: higher scores for canaries that seem to be in the data.

    The number of guesses is planned as for a Gaussian mechanism with the claimed epsilon, or with 1. The exit code is 1
    if the claim is refuted.

    Example: sluice audit scores scores.npz --delta 1e-5 --claimed-epsilon 1
    """
    from sluice._base import validate
    from sluice._base.files import write_atomically
    from sluice.audit.curves import Claim
    from sluice.audit.evidence import Evidence
    from sluice.audit.guesses import Channel, Plan, plan_guesses
    from sluice.audit.page import audit_page

    validate.open_fraction(delta=delta, confidence=confidence)
    arrays = _arrays(file)
    claim = None if claimed_epsilon is None else Claim.of_epsilon(claimed_epsilon, delta=delta)
    if guesses is None:
        channel = Channel.of_epsilon(1.0 if claim is None else max(claim.epsilon, 0.1), delta=delta)
        count = len(arrays["members"])
        plan = plan_guesses(channel, canaries=count, scores=("scores",), delta=delta, confidence=confidence)
    else:
        plan = Plan.fixed(guesses, confidence=confidence)
    evidence = Evidence(
        scores={"scores": arrays["scores"]},
        members=arrays["members"],
        plan=plan,
        delta=delta,
        claim=claim,
        kind="scores",
    )
    found = evidence.result
    if page is not None:
        write_atomically(page, audit_page(evidence).encode("utf-8"), public=True)
    _finish(found, as_json=as_json)


def _what(run: Path | None, config: Path | None, setting: list[str] | None) -> tuple[TrainSettings, Mechanism | None]:
    from sluice._base.errors import InputError
    from sluice.experiments.run import recorded_run
    from sluice.experiments.settings import settings_from
    from sluice.experiments.settings_files import assignment

    if run is None:
        overrides = dict(assignment(item, argument="setting") for item in setting or [])
        return settings_from(overrides, file=config), None
    if config is not None or setting:
        raise InputError("config and setting cannot be given with --run: a run is rehearsed by its own settings.")
    recorded = recorded_run(run)
    return recorded.settings, recorded.mechanism


def _ledger_to_spend(run: Path | None, *, many: bool) -> Path:
    """Where the releases of an audit on a run's own records are counted, each before it is made."""
    from sluice._base.errors import InputError
    from sluice.runs.folder import RunFolder

    if run is None or many:
        raise InputError(
            "spend is for one run with canaries on the records of a run: give --run, and neither --runs nor --two-runs."
        )
    path = RunFolder.look(run).audit_ledger_path
    if path.exists():
        raise InputError(
            f"spend is not allowed: {path} says that the records of this run were used for an audit already. Rehearse on "
            "stand-in records, which spends nothing."
        )
    return path


def _write(run: Path, found: Evidence | Trials) -> None:
    from sluice.audit.files import write_audit
    from sluice.runs.folder import RunFolder

    folder = RunFolder.look(run)
    if folder.ledger_path.exists():
        write_audit(folder, found)
        _certify_again(run)


def _certify(run: Path | None) -> None:
    """Write the certificate of a run anew, where it has one."""
    from sluice.runs.certificate import write_certificate
    from sluice.runs.folder import RunFolder

    if run is None:
        return
    folder = RunFolder.look(run)
    if folder.certificate_path.exists():
        write_certificate(folder)


def _certify_again(run: Path) -> None:
    """Write the certificate of a run anew, and say what an audit has spent on its records."""
    from sluice.runs.folder import RunFolder
    from sluice.runs.ledger import read_ledger
    from sluice.runs.spent_again import spent_again

    _certify(run)
    folder = RunFolder.look(run)
    again = spent_again(folder, read_ledger(folder.ledger_path))
    if again is not None:
        typer.echo(f"sluice: {again.sentence}", err=True)


def _arrays(file: Path) -> dict[str, Any]:
    from sluice._base.errors import InputError
    from sluice.data.array_files import read_archive

    try:
        found = read_archive(file, ("scores", "members"))
    except OSError as error:
        raise InputError(f"FILE={str(file)!r} cannot be read: {error.strerror}. Give an .npz file.") from error
    if len(found) < 2:
        raise InputError(f"FILE={str(file)!r} is not allowed: it must hold arrays 'scores' and 'members'.")
    return found


def _finish(found: AuditResult, *, as_json: bool) -> None:
    if as_json:
        print_json(found.to_dict())
    else:
        for name, value in found.rows:
            typer.echo(f"{name + ':':<30} {value}")
        if found.rehearsal:
            typer.echo("A rehearsal: its model was thrown away, and must not be published.")
        for note in found.notes:
            typer.echo(f"Note: {note}")
    if found.refuted:
        raise typer.Exit(1)
