"""``sluice attack``: membership inference against a model of a public data set, or against a run of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.cli.output import JsonFlag, print_json, print_table

if TYPE_CHECKING:
    from sluice.experiments.attacks.request import AttackRequest

#: Which attacks read an option that not all of them do.
_READ_BY = {
    "shadows": ("lira", "rmia"),
    "shadow_method": ("shadow", "lira", "rmia"),
    "jobs": ("lira", "rmia"),
    "targets": ("loss", "lira", "rmia"),
    "epochs": ("shadow", "white-box"),
}
_OF_A_DATASET = ("method", "epsilon", "records", "change", "targets", "results")


def attack(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN]", help="Attack this finished run; results go to its private/attacks/.", show_default=False
        ),
    ] = None,
    attacks: Annotated[
        list[str] | None,
        typer.Option(
            "--attacks", help="loss, shadow, white-box, lira, rmia, separated by commas.", show_default="loss"
        ),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option("--dataset", help="Instead: train a target on part of this public data set, and attack it."),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option("--method", help="How the target is trained: see sluice methods.", show_default="non-private"),
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option("--epsilon", help="Budget of a private target.", show_default="3")
    ] = None,
    records: Annotated[
        int | None, typer.Option("--records", help="Use so many records of the data set, drawn by the seed.")
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Change a setting of the target; repeatable."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Draws members, and seeds every model.")] = 0,
    shadows: Annotated[
        int | None,
        typer.Option(
            "--shadows", help="Of lira and rmia: how many models, each on half of the records.", show_default="16"
        ),
    ] = None,
    shadow_method: Annotated[
        str | None,
        typer.Option(
            "--shadow-method",
            help="same: as the target, which private targets need; ordinary: without privacy.",
            show_default="ordinary for shadow, else same",
        ),
    ] = None,
    targets: Annotated[
        int | None, typer.Option("--targets", help="How many targets the same shadow models attack.", show_default="1")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option("--epochs", help="Of the nets of shadow and white-box.", show_default="50")
    ] = None,
    results: Annotated[
        Path | None, typer.Option("--results", help="Folder for a JSON file and a ROC plot; only for public data sets.")
    ] = None,
    work: Annotated[
        Path | None, typer.Option("--work", help="Folder where models are kept; in the user's cache if not given.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option("--data-dir", help="Folder with data sets, looked at first.")] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", help="Shadow models at once; -1: as many as there are processors.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Try to tell which records a model was trained on. That an attack fails is no evidence of privacy.

    loss: a threshold on it, beside the gap attack (member if the model is right). shadow, white-box: the paper's two, on its
    split 2:1:2:1. lira, rmia: against shadow models on random halves. Models that are trained already are used again, and a
    command that was interrupted resumes when it is repeated.

    Example: sluice attack --dataset digits --attacks loss,lira --shadows 16
    """
    _attack(dict(locals()))


def _attack(given: dict[str, Any]) -> None:
    from sluice._base.interrupts import sigterm_as_interrupt
    from sluice.experiments.attacks.request import attacked_targets

    as_json, results = given.pop("json"), given["results"]
    requests = _requests(given)

    def report(done: int, total: int) -> None:
        if not as_json:
            typer.echo(f"sluice: {done} of {total} shadow models are trained", err=True)

    try:
        with sigterm_as_interrupt():
            payloads = [
                _told(request, results, *found, number, as_json)
                for request in requests
                for number, found in enumerate(attacked_targets(request, report=report))
            ]
    except KeyboardInterrupt:
        typer.echo("sluice: interrupted. Models that are trained are kept; to resume, run the same command.", err=True)
        raise typer.Exit(130) from None
    if as_json:
        print_json({"targets": payloads})


def _requests(given: dict[str, Any]) -> list[AttackRequest]:
    """One for each attack. What nothing would read is refused."""
    from sluice._base import validate
    from sluice._base.errors import InputError
    from sluice.cli.reproduce_cells import words_of
    from sluice.experiments.attacks.request import ATTACKS, AttackRequest
    from sluice.experiments.tables.accuracy_cells import parse_overrides

    names = words_of(tuple(given.pop("attacks") or ("loss",)))
    for name in names:
        validate.one_of(ATTACKS, attacks=name)
    asked = {name: value for name, value in given.items() if value is not None}
    for option, readers in _READ_BY.items():
        if option in asked and not set(names) & set(readers):
            raise InputError(
                f"{option}={asked[option]} has no effect: only {', '.join(readers)} read it. Leave it out."
            )
    if "run" in asked:
        for option in _OF_A_DATASET:
            if option in asked:
                raise InputError(
                    f"{option}={str(asked[option])!r} is not allowed with RUN, which has its own records and settings, and whose "
                    "results are private. Leave it out."
                )
    asked.pop("results", None)
    changes = parse_overrides(asked.pop("change", ()))
    method = asked.pop("shadow_method", None)

    def request(name: str) -> AttackRequest:
        read = {key: value for key, value in asked.items() if name in _READ_BY.get(key, ATTACKS)}
        kind = method or ("ordinary" if name == "shadow" else "same")
        return AttackRequest(attack=name, changes=changes, shadow_method=kind, **read)

    return [request(name) for name in names]


def _told(
    request: AttackRequest, results: Path | None, target: Any, attacks: Any, number: int, as_json: bool
) -> dict[str, Any]:
    """Write and print what was found of one target."""
    from sluice.experiments.attacks.results import COLUMNS, cells_of, described, write_plot, write_result

    extra = {"attack": request.attack, "seed": request.seed, "target": number, "records": len(target.pool)}
    if request.attack in ("lira", "rmia"):
        extra |= {"shadows": request.shadows}
    if request.attack in ("lira", "rmia", "shadow"):
        extra |= {"shadow_method": request.shadow_method}
    payload = described(target, attacks, extra)
    folder, public = request.private_folder or results, request.private_folder is None
    if folder is not None:
        stem = request.attack if not public else _stem(request, target, number)
        write_result(folder / f"{stem}.json", payload, public=public)
        write_plot(folder / f"{stem}.png", target, attacks, public=public)
    if as_json:
        return {**payload, "private": not public}
    print_table(
        COLUMNS,
        (cells_of(name, found) for name, found in payload["attacks"].items()),
        title=f"{target.settings.dataset}, {target.settings.method} ({_proved(target.epsilon)}): {payload['members']:,} members, "
        f"{payload['non_members']:,} non-members; accuracy {100 * payload['train_accuracy']:.1f} % on members, "
        f"{100 * payload['test_accuracy']:.1f} % on others",
    )
    if not public:
        typer.echo(
            "PRIVATE: these figures depend on who is in the training data without any noise. Do not publish them."
        )
    typer.echo("An attack shows what is leaked at least. That it finds little is no evidence of privacy.")
    if folder is not None:
        typer.echo(f"Written: {folder / stem}.json, .png{'' if public else ' (private)'}")
    return payload


def _proved(epsilon: float | None) -> str:
    from sluice._base.rounding import rounded_up

    return "nothing is proved" if epsilon is None else f"epsilon {rounded_up(epsilon)} is proved"


def _stem(request: AttackRequest, target: Any, number: int) -> str:
    """Other settings, records or shadow models: another file, so that no result replaces that of another target."""
    from sluice.runs.folder import configuration_hash

    asked = {"shadows": request.shadows, "shadow_method": request.shadow_method, "records": len(target.pool)}
    key = configuration_hash({**asked, "settings": target.settings.to_dict()})[:8]
    return f"{target.settings.dataset}-{target.settings.method}-{request.attack}-{key}-seed{request.seed}-{number}"
