"""``sluice features``: what a model can see of images and texts without any cost of privacy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sluice.cli.output import JsonFlag, print_json, print_table

if TYPE_CHECKING:
    from sluice.features import RowFeatures
    from sluice.features.base import ImageShape

app = typer.Typer(
    help="Features that cost no privacy: list, build and look at them. Example: sluice features list",
    no_args_is_help=True,
)

Expression = Annotated[
    str, typer.Argument(metavar="NAME", help="A feature, with options if wanted, or several joined by +.")
]
Shape = Annotated[
    str | None,
    typer.Option("--shape", help="CHANNELSxHEIGHTxWIDTH of the images; 3x32x32 for patches, else 1x28x28."),
]


@app.command("list")
def list_features(as_json: JsonFlag = False) -> None:
    """List the features, what they are made of, and which synthetic images made their constants.

    Example: sluice features list
    """
    from sluice.features.catalog import FEATURES

    if as_json:
        rows = [
            {"name": name, "summary": entry.summary, "of": entry.domain, "prior": entry.prior, "origin": entry.origin}
            for name, entry in FEATURES.items()
        ]
        print_json({"features": rows})
        return
    print_table(
        ("name", "what it is", "of", "made from synthetic"),
        ((name, entry.summary, entry.domain, entry.prior or "-") for name, entry in FEATURES.items()),
    )


@app.command()
def build(expression: Expression, shape: Shape = None, as_json: JsonFlag = False) -> None:
    """Build the public constants of features and keep them in the cache: afterwards no network and no waiting is needed.

    Example: sluice features build stroke-net
    """
    from sluice.features.constants import constants_digest, constants_path

    features = _built(expression, shape, show_progress=not as_json)
    rows = []
    for _, feature, known in features.blocks:
        path = constants_path(feature, features.shape) if known else None
        rows.append((feature.written(), str(path or "-"), constants_digest(feature, features.shape) or "-"))
    if as_json:
        names = ("feature", "file", "sha256")
        print_json({"built": [dict(zip(names, row, strict=True)) for row in rows]})
        return
    print_table(("feature", "file", "sha256"), rows)


@app.command()
def show(
    expression: Expression,
    shape: Shape = None,
    output: Annotated[Path, typer.Option("--output", help="The picture to write.")] = Path("features.png"),
    as_json: JsonFlag = False,
) -> None:
    """Say where features come from, and draw the synthetic images and dictionaries behind them.

    Example: sluice features show patches --output patches.png
    """
    from sluice._base.files import write_atomically
    from sluice.features.catalog import blocks_of
    from sluice.features.sheet import sheet

    origins = {block.name: block.entry.origin for block in blocks_of(expression)}
    features = _built(expression, shape, show_progress=not as_json)
    pictures = sheet(features)
    if pictures is not None:
        write_atomically(output, pictures, public=True)
    if as_json:
        print_json({"origins": origins, "picture": str(output) if pictures is not None else None})
        return
    for name, origin in origins.items():
        typer.echo(f"{name}: {origin}")
    if pictures is not None:
        typer.echo(f"Written: {output}")


def _built(expression: str, shape: str | None, *, show_progress: bool) -> RowFeatures:
    from sluice._base.errors import InputError
    from sluice.features.catalog import has_rows
    from sluice.features.rows import RowFeatures

    if not has_rows(expression):
        raise InputError(f"features={expression!r} is not allowed here: it has nothing to build or to show.")
    return RowFeatures.of(expression, _shape(shape, expression), show_progress=show_progress)


def _shape(text: str | None, expression: str) -> ImageShape:
    from sluice._base.errors import InputError

    if text is None:
        return (3, 32, 32) if "patches" in expression else (1, 28, 28)
    sizes = [int(size) for size in text.split("x") if size.isdecimal()]
    if len(sizes) != 3 or "x".join(map(str, sizes)) != text or not all(sizes):
        raise InputError(f"shape={text!r} is not allowed: it must be CHANNELSxHEIGHTxWIDTH, such as 1x28x28.")
    channels, height, width = sizes
    return channels, height, width
