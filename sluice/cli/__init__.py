"""The ``sluice`` command. Each family of commands lives in its own module here, and only the one called is loaded.

Commands import torch and the rest inside their bodies, so that ``sluice --help`` answers at once.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Annotated

import typer
from typer.exceptions import TyperException

from sluice import __version__
from sluice._base.errors import SluiceError
from sluice._base.extras import needing_extras

#: The module of each command, or family of commands, in the order of the help.
COMMANDS = {
    "epsilon": "accounting",
    "plan": "accounting",
    "serve": "serve",
    "reproduce": "reproduce",
    "data": "data",
    "features": "features",
    "bench": "bench",
    "audit": "audit",
    "attack": "attack",
    "train": "train",
    "methods": "methods",
    "verify": "runs",
    "predict": "runs",
    "certificate": "runs",
    "report": "runs",
    "private": "runs",
}
EXAMPLES = (
    "sluice train --dataset digits --epsilon 3",
    "sluice methods",
    "sluice verify runs/digits-dpsr-cg-1",
    "sluice predict runs/digits-dpsr-cg-1 images.npz",
    "sluice certificate runs/digits-dpsr-cg-1",
    "sluice report runs/digits-dpsr-cg-1 runs/digits-dpsgd-1 -o report.html",
    "sluice private runs/digits-dpsr-cg-1",
    "sluice audit rehearse --run runs/digits-dpsr-cg-1",
    "sluice plan --dataset-size 60000 --batch-size 1024 --releases 1000 --epsilon 1 --delta 1e-5",
    "sluice epsilon --dataset-size 60000 --batch-size 1024 --noise-multiplier 2 --releases 1000 --delta 1e-5",
    "sluice serve",
    "sluice reproduce q-sup",
    "sluice reproduce accuracy --datasets mnist --methods dpsgd,dpsr-cg --epsilons 3",
    "sluice attack --dataset digits --attacks loss,lira",
    "sluice features list",
    "sluice data verify",
    "sluice bench gradients",
)


def command_line(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """The command line with these commands."""
    app = typer.Typer(
        name="sluice",
        help="Train PyTorch models with differential privacy by selective release.",
        epilog="Examples:\n\n" + "\n\n".join(EXAMPLES),
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)
    for name in names:
        module = import_module(f"sluice.cli.{COMMANDS[name]}")
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name)
        else:
            app.command()(getattr(module, name))
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sluice {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; errors become one or two lines on stderr and exit code 2."""
    # Imports make many objects and no garbage: looking for it after every 700 of them takes a tenth of all start-up.
    gc.set_threshold(100_000, *gc.get_threshold()[1:])
    given = sys.argv[1:] if arguments is None else arguments
    called = given[:1] if given and given[0] in COMMANDS else COMMANDS  # all, to list them or to say what was meant
    command = typer.main.get_command(command_line(called))
    try:
        with needing_extras():
            code = command.main(args=given, prog_name="sluice", standalone_mode=False)
    except TyperException as error:
        if not error.format_message():  # the command was called bare: its help is already on the screen
            sys.exit(2)
        context = getattr(error, "ctx", None)
        where = context.command_path if context else "sluice"
        _fail(f"{where}: {error.format_message()}\nSee '{where} --help'.")
    except SluiceError as error:
        _fail(f"sluice: {error}")
    except OSError as error:
        _fail(f"sluice: {error.strerror or error}: {error.filename or ''}".rstrip(": "))
    except (KeyboardInterrupt, typer.Abort):
        typer.echo("sluice: interrupted", err=True)
        sys.exit(130)
    else:
        sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> None:
    typer.echo(message, err=True)
    sys.exit(2)
