from __future__ import annotations

import subprocess
import sys

import pytest

from sluice.cli import EXAMPLES, command_line, main


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def test_help_lists_the_commands(capsys):
    code, out, _ = run(["--help"], capsys)
    assert code == 0
    app = command_line()
    listed = {command.name or command.callback.__name__ for command in app.registered_commands}
    listed |= {group.name for group in app.registered_groups}
    assert {"train", "epsilon", "plan", "verify", "data", "reproduce", "bench"} <= listed
    shown = {example.split()[1] for example in EXAMPLES}
    assert shown == listed, "every command has an example, and every example a command"
    for command in listed:
        assert f"sluice {command} " in " ".join(out.split())


@pytest.mark.parametrize(
    "arguments", [["frobnicate"], ["--frobnicate"], ["epsilon", "--delta", "two"], ["data", "get", "no-such-set"]]
)
def test_bad_input_is_two_lines_at_most_and_exit_code_2(arguments, capsys):
    code, out, err = run(arguments, capsys)
    assert code == 2
    assert out == ""
    assert 1 <= len(err.strip().splitlines()) <= 2
    assert "Traceback" not in err


def test_no_command_shows_the_help(capsys):
    code, out, err = run([], capsys)
    assert code == 2
    assert "Usage" in out + err


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"]], ids=" ".join)
def test_help_does_not_import_torch(arguments):
    program = (
        "import sys\nfrom sluice.cli import main\n"
        f"try: main({arguments})\nexcept SystemExit: pass\n"
        "sys.exit('torch' in sys.modules or 'scipy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 0
