from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from sluice.cli.option_fields import from_fields


@dataclass(frozen=True, kw_only=True)
class Inner:
    count: Annotated[int, typer.Option("--count", help="How many.")] = 4


@dataclass(frozen=True, kw_only=True)
class Outer:
    words: Annotated[tuple[str, ...], typer.Option("--words", help="Some.")] = ("a", "b")
    others: Annotated[tuple[str, ...], typer.Option("--others", show_default="the table's")] = ()
    fixed: str = field(default="fixed", init=False)
    inner: Inner = field(default_factory=Inner)
    quick: Annotated[bool, typer.Option("--quick")] = False


@pytest.mark.parametrize(
    ("typed", "given"),
    [
        ([], Outer()),
        (["--words", "c", "--words", "d,e"], Outer(words=("c", "d,e"))),
        (["--count", "7", "--quick"], Outer(inner=Inner(count=7), quick=True)),
    ],
)
def test_what_is_typed_fills_the_fields(typed, given):
    seen = []
    app = typer.Typer()

    @app.command()
    @from_fields
    def command(options: Outer) -> None:
        """Say it."""
        seen.append(options)

    assert CliRunner().invoke(app, typed).exit_code == 0
    assert seen == [given]
    text = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "100"}).output
    assert "Say it." in text
    assert "[default: (a,b)]" in text
    assert "[default: (the table's)]" in text
    assert "fixed" not in text
    assert text.index("--words") < text.index("--others") < text.index("--count") < text.index("--quick")
