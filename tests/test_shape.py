"""The shape of the package: how large its parts are, what may import what, and where torch is not needed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = {file.relative_to(ROOT): file.read_text("utf-8") for file in sorted(ROOT.glob("sluice/**/*.py"))}

#: Each may import what stands before it, and nothing else: neither lazily nor for types.
ROOMS = (
    *("_base", "accounting", "mechanism", "randomness", "gradients", "runs", "training", "methods"),
    *("data", "features", "models", "attacks", "experiments", "cli"),
)

MOST_LINES = 450
MOST_PARAMETERS = 8
#: Opacus's words, the words of a command line, and the one call that loads any data set.
WORDS_OF_OTHERS = ("make_private", "make_private_with_epsilon", "make_private_by", "load")

EPSILON = "--dataset-size 1000 --batch-size 10 --releases 10 --delta 1e-5"
PLAN = f"{EPSILON} --epsilon 2 --accountant rdp --json"
COMMANDS = {
    "epsilon": f"epsilon {EPSILON} --noise-multiplier 2 --gate-noise 1",
    "plan": f"plan {PLAN}",
    "methods": "methods",
    "help": "--help",
    "help-of-train": "train --help",
}


def test_no_module_is_long():
    long = {str(path): len(text.splitlines()) for path, text in MODULES.items()}
    assert {path: lines for path, lines in long.items() if lines > MOST_LINES} == {}


def test_no_function_has_many_parameters():
    many = {
        f"{path}: {function.name}": count
        for path, text in MODULES.items()
        if path.parts[1] != "cli"
        for function in ast.walk(ast.parse(text))
        if isinstance(function, ast.FunctionDef) and function.name not in WORDS_OF_OTHERS
        if (count := len(_parameters(function.args))) > MOST_PARAMETERS
    }
    assert many == {}


def test_nothing_imports_upward():
    upward = {
        (str(path), imported)
        for path, text in MODULES.items()
        if len(path.parts) > 2
        for imported in _imports(text)
        if ROOMS.index(imported) > ROOMS.index(path.parts[1])
    }
    assert upward == set()


def test_documents_list_the_rooms_in_this_order():
    rooms = [room for room in ROOMS if (ROOT / "sluice" / room).is_dir()]
    table = re.findall(r"^\| (`sluice/.*?) \|", (ROOT / "docs" / "architecture.md").read_text("utf-8"), re.MULTILINE)
    assert re.findall(r"`sluice/(\w+)/`", " ".join(table)) == rooms
    readme = (ROOT / "README.md").read_text("utf-8").partition("each sub-package imports only from those before it:")[2]
    assert re.findall(r"`(\w+)`", readme) == rooms


@pytest.mark.parametrize("module", ["sluice", "sluice.methods", "sluice.runs.verify", "sluice.runs.public_files"])
def test_modules_that_need_no_torch_do_not_load_it(module):
    assert _loads_torch(f"import {module}") == "False"


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_commands_that_need_no_torch_do_not_load_it(command):
    assert (
        _loads_torch(f"from sluice.cli import main\ntry:\n main({command.split()})\nexcept SystemExit: pass") == "False"
    )


def test_verifying_a_run_does_not_load_torch(tmp_path):
    train = "train --dataset digits --noise-multiplier 3 --batch-size 64 --releases 2 --seed 1 --threads 1 --run run"
    subprocess.run([sys.executable, "-m", "sluice", *train.split()], capture_output=True, check=True, cwd=tmp_path)
    command = f"main(['verify', {str(tmp_path / 'runs' / 'run')!r}])"
    assert (
        _loads_torch(f"from sluice.cli import main\ntry:\n {command}\nexcept SystemExit as end: assert not end.code")
        == "False"
    )


def _parameters(arguments: ast.arguments) -> list[str]:
    every = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return [name for name in every if name not in ("self", "cls", "ctx")]


def _imports(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module == "sluice":
            names = [f"sluice.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            if name.startswith("sluice.") and name.split(".")[1] in ROOMS:
                yield name.split(".")[1]


def _loads_torch(code: str) -> str:
    """What a fresh interpreter says of torch after running the code."""
    asked = f"{code}\nimport sys\nprint()\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout.splitlines()[-1]
