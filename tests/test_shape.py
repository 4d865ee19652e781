"""The shape of the package: how large its parts are, what may import what, and where torch is not needed."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import sluice

ROOT = Path(__file__).parent.parent
MODULES = {file.relative_to(ROOT): file.read_text("utf-8") for file in sorted(ROOT.glob("sluice/**/*.py"))}

#: Each may import what stands before it, and nothing else: neither lazily nor for types.
ROOMS = (
    *("_base", "accounting", "mechanism", "planner", "randomness", "gradients", "runs", "audit", "training", "methods"),
    *("compat", "integrations", "data", "features", "models", "attacks", "experiments", "cli"),
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
    "plan-with-plot": f"plan {EPSILON} --epsilon 2",
    "methods": "methods",
    "planner": "serve --help",
    "help": "--help",
    "help-of-train": "train --help",
}
#: What takes longer to load than these commands to answer. (All of dp-accounting would load the three of scipy, and all of
#: scipy.special or scipy.fft the adapters to other libraries' arrays.)
SLOW = (
    *("torch", "matplotlib", "scipy.optimize", "scipy.signal", "scipy.stats", "scipy._lib._array_api"),
    *("sklearn", "pooch", "requests"),
)
TRAIN = "train --dataset digits --noise-multiplier 3 --batch-size 64 --releases 2 --seed 1 --threads 1 --run run"


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


def test_the_package_itself_loads_nothing(tmp_path):
    assert _loaded("import sluice; dir(sluice)", ("torch", "scipy", "numpy", "dp_accounting"), tmp_path) == []


def test_the_package_lists_and_finds_its_names():
    assert set(sluice.__all__) <= set(dir(sluice))
    assert all(getattr(sluice, name) is not None for name in sluice.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        sluice.Nothing  # noqa: B018


@pytest.mark.parametrize("module", ["sluice.methods", "sluice.runs.verify", "sluice.runs.public_files"])
def test_modules_that_need_no_torch_do_not_load_it(module, tmp_path):
    assert _loaded(f"import {module}", (*SLOW, "scipy.special._ufuncs"), tmp_path) == []


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_commands_load_nothing_slow(command, tmp_path):
    assert _loaded(_running(command), SLOW, tmp_path) == []


def test_a_command_loads_no_other(tmp_path):
    others = [f"sluice.cli.{name}" for name in ("train", "reproduce", "runs", "audit")]
    assert _loaded(_running(f"epsilon {EPSILON} --noise-multiplier 2"), others, tmp_path) == []


def test_training_loads_torch_without_its_compiler_and_verifying_loads_nothing_slow(tmp_path):
    others = [name for name in SLOW if name != "torch"]
    assert _loaded(_running(TRAIN), ("torch._dynamo", "torch.onnx", "mpmath", *others), tmp_path) == []
    assert _loaded(_running("verify runs/run"), SLOW, tmp_path) == []


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


def _running(command: str) -> str:
    return f"from sluice.cli import main\ntry:\n main({command.split()})\nexcept SystemExit as end: assert not end.code"


def _loaded(code: str, modules: Sequence[str], folder: Path) -> list[str]:
    """Which of the modules a fresh interpreter has loaded after running the code in this folder."""
    asked = f"{code}\nimport sys\nprint()\nprint(*(name for name in {list(modules)} if name in sys.modules))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", asked]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder, env=environment)
    return done.stdout.splitlines()[-1].split()
