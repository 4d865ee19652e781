"""``sluice attack``: membership inference against a model of a public data set, or against a run of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.cli.output import JsonFlag, print_json, print_table

if TYPE_CHECKING:
    from sluice.experiments.attacks.request import AttackRequest

app = typer.Typer(
    help="Try to tell which records a model was trained on. That an attack fails is no evidence of privacy.",
    no_args_is_help=True,
)

Dataset = Annotated[
    str | None, typer.Option("--dataset", help="Train a target on part of this public data set, and attack it.")
]
Run = Annotated[
    Path | None, typer.Option("--run", help="Attack this finished run instead; results go to its private/attacks/.")
]
Method = Annotated[str, typer.Option("--method", help="How the target is trained: see sluice methods.")]
Epsilon = Annotated[float, typer.Option("--epsilon", help="Budget of a private target.")]
Records = Annotated[
    int | None, typer.Option("--records", help="Use so many records of the data set, drawn by the seed.")
]
Change = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Change a setting of the target; repeatable.")
]
Seed = Annotated[int, typer.Option("--seed", help="Draws members, and seeds every model.")]
Shadows = Annotated[int, typer.Option("--shadows", help="How many shadow models, each on half of the records.")]
ShadowMethod = Annotated[
    str,
    typer.Option("--shadow-method", help="same: as the target, which private targets need; ordinary: without privacy."),
]
Targets = Annotated[int, typer.Option("--targets", help="How many targets the same shadow models attack.")]
Epochs = Annotated[int, typer.Option("--epochs", help="Of the attack net.")]
Results = Annotated[
    Path | None, typer.Option("--results", help="Folder for a JSON file and a ROC plot; only for public data sets.")
]
Work = Annotated[
    Path | None, typer.Option("--work", help="Folder where models are kept; in the user's cache if not given.")
]
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="Folder with data sets, looked at first.")]
Jobs = Annotated[int | None, typer.Option("--jobs", help="Models at once; -1: as many as there are processors.")]


@app.command("loss")
def loss(
    dataset: Dataset = None,
    run: Run = None,
    method: Method = "non-private",
    epsilon: Epsilon = 3.0,
    records: Records = None,
    change: Change = None,
    seed: Seed = 0,
    targets: Targets = 1,
    results: Results = None,
    work: Work = None,
    data_dir: DataDir = None,
    json: JsonFlag = False,
) -> None:
    """The loss of each record as its score, and the gap attack (member if the model is right) as a control.

    Example: sluice attack loss --dataset digits
    """
    _attack(dict(locals(), attack="loss"))


@app.command("shadow")
def shadow(
    dataset: Dataset = None,
    run: Run = None,
    method: Method = "non-private",
    epsilon: Epsilon = 3.0,
    records: Records = None,
    change: Change = None,
    seed: Seed = 0,
    shadow_method: ShadowMethod = "ordinary",
    epochs: Epochs = 50,
    results: Results = None,
    work: Work = None,
    data_dir: DataDir = None,
    json: JsonFlag = False,
) -> None:
    """Black-Box/Shadow: a shadow model on records of the attacker teaches a net how members look. Split 2:1:2:1.

    Example: sluice attack shadow --dataset digits --method dpsgd --shadow-method same
    """
    _attack(dict(locals(), attack="shadow"))


@app.command("white-box")
def white_box(
    dataset: Dataset = None,
    run: Run = None,
    method: Method = "non-private",
    epsilon: Epsilon = 3.0,
    records: Records = None,
    change: Change = None,
    seed: Seed = 0,
    epochs: Epochs = 50,
    results: Results = None,
    work: Work = None,
    data_dir: DataDir = None,
    json: JsonFlag = False,
) -> None:
    """White-Box/Partial: the attacker knows some members, and sees logits, losses and the last layer's gradients.

    Example: sluice attack white-box --dataset digits
    """
    _attack(dict(locals(), attack="white-box"))


@app.command("lira")
def lira(
    dataset: Dataset = None,
    run: Run = None,
    method: Method = "non-private",
    epsilon: Epsilon = 3.0,
    records: Records = None,
    change: Change = None,
    seed: Seed = 0,
    shadows: Shadows = 16,
    shadow_method: ShadowMethod = "same",
    targets: Targets = 1,
    results: Results = None,
    work: Work = None,
    data_dir: DataDir = None,
    jobs: Jobs = None,
    json: JsonFlag = False,
) -> None:
    """LiRA: likelihood ratios under shadow models with and without each record, online and offline.

    Models that are trained already are used again, and a command that was interrupted resumes when it is repeated.

    Example: sluice attack lira --dataset digits --shadows 16
    """
    _attack(dict(locals(), attack="lira"))


@app.command("rmia")
def rmia(
    dataset: Dataset = None,
    run: Run = None,
    method: Method = "non-private",
    epsilon: Epsilon = 3.0,
    records: Records = None,
    change: Change = None,
    seed: Seed = 0,
    shadows: Shadows = 16,
    shadow_method: ShadowMethod = "same",
    targets: Targets = 1,
    results: Results = None,
    work: Work = None,
    data_dir: DataDir = None,
    jobs: Jobs = None,
    json: JsonFlag = False,
) -> None:
    """RMIA: each record against the population, relative to shadow models; it uses the same models as lira.

    Example: sluice attack rmia --dataset digits --shadows 4
    """
    _attack(dict(locals(), attack="rmia"))


def _attack(given: dict[str, Any]) -> None:
    from sluice._base.errors import InputError
    from sluice._base.interrupts import sigterm_as_interrupt
    from sluice.experiments.attacks.request import AttackRequest, attacked_targets
    from sluice.experiments.tables.accuracy_cells import parse_overrides

    as_json, results = given.pop("json"), given.pop("results")
    changes = parse_overrides(given.pop("change") or ())
    request = AttackRequest(**given, changes=changes)
    if results is not None and request.private_folder is not None:
        raise InputError(
            f"results={str(results)!r} is not allowed with --run: what an attack finds is private, and goes to "
            f"{request.private_folder}. Leave it out."
        )

    def report(done: int, total: int) -> None:
        if not as_json:
            typer.echo(f"sluice: {done} of {total} shadow models are trained", err=True)

    try:
        with sigterm_as_interrupt():
            payloads = [
                _told(request, results, *found, number, as_json)
                for number, found in enumerate(attacked_targets(request, report=report))
            ]
    except KeyboardInterrupt:
        typer.echo("sluice: interrupted. Models that are trained are kept; to resume, run the same command.", err=True)
        raise typer.Exit(130) from None
    if as_json:
        print_json({"targets": payloads})


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
        return payload
    proved = "nothing is proved" if target.epsilon is None else f"epsilon {target.epsilon:.3g} is proved"
    print_table(
        COLUMNS,
        (cells_of(name, found) for name, found in payload["attacks"].items()),
        title=f"{target.settings.dataset}, {target.settings.method} ({proved}): {payload['members']:,} members, "
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


def _stem(request: AttackRequest, target: Any, number: int) -> str:
    """Other settings, records or shadow models: another file, so that no result replaces that of another target."""
    from sluice.runs.folder import configuration_hash

    asked = {"shadows": request.shadows, "shadow_method": request.shadow_method, "records": len(target.pool)}
    key = configuration_hash({**asked, "settings": target.settings.to_dict()})[:8]
    return f"{target.settings.dataset}-{target.settings.method}-{request.attack}-{key}-seed{request.seed}-{number}"
