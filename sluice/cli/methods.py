"""``sluice methods``: the systems that can train, what they prove, and the settings that only they have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.cli.output import JsonFlag, print_json, print_table

if TYPE_CHECKING:
    from sluice.methods import Method


def methods(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Describe this method.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """List the methods of sluice train --method, one line each, with the epsilon that they can prove.

    With a NAME: where the method comes from, what it does, what is proved, and its own options.

    Example: sluice methods dpsur
    """
    from sluice.methods import METHODS, method_of

    if name is not None:
        _print_one(method_of(name), as_json)
    elif as_json:
        print_json({"methods": [_described(method) for method in METHODS.values()]})
    else:
        print_table(
            ("method", "what it does", "what it proves"),
            ((method.name, method.summary, method.proves) for method in METHODS.values()),
        )


def _print_one(method: Method, as_json: bool) -> None:
    import inspect
    import sys

    module = sys.modules[_home(method)]
    about = inspect.getdoc(module) or ""
    if as_json:
        print_json({**_described(method), "about": about})
        return
    typer.echo(about)
    options = _described(method)["options"]
    if options:
        typer.echo("\nOptions, given as -o NAME=VALUE:\n")
        explained = inspect.getdoc(method.options) or ""
        typer.echo(explained.partition("Attributes:\n")[2])
        print_table(("option", "default"), options.items())


def _home(method: Method) -> str:
    return f"sluice.methods.{method.name.replace('-', '_')}"


def _described(method: Method) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "name": method.name,
        "summary": method.summary,
        "proves": method.proves,
        "options": asdict(method.options()),
    }
