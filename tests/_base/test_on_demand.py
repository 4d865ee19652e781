from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sluice._base.on_demand import import_on_demand


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package whose ``__init__`` counts how often it runs, with two modules, of which one imports the other."""
    folder = tmp_path / "slow_package"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "from slow_package import light\nVALUE = light.VALUE\nRUNS = [*globals().get('RUNS', []), 1]"
    )
    (folder / "light.py").write_text("VALUE = 3")
    (folder / "other.py").write_text("from slow_package import light\nVALUE = light.VALUE + 1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.modules", {**sys.modules})
    return "slow_package"


def test_a_module_costs_itself_alone(package):
    import_on_demand(package)
    from slow_package import other

    assert other.VALUE == 4
    assert "RUNS" not in vars(sys.modules[package])


def test_a_missed_name_runs_the_package_once_in_the_same_module(package):
    import_on_demand(package)
    import slow_package
    import slow_package.light

    module = slow_package
    assert (slow_package.VALUE, slow_package.RUNS) == (3, [1])
    assert sys.modules[package] is module
    assert slow_package.light.VALUE == 3
    with pytest.raises(AttributeError, match="'slow_package' has no attribute 'absent'"):
        slow_package.absent  # noqa: B018


def test_a_package_that_fails_fails_again(package, tmp_path):
    (tmp_path / package / "__init__.py").write_text("raise RuntimeError('broken')")
    import_on_demand(package)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken"):
            sys.modules[package].absent  # noqa: B018


def test_packages_that_are_loaded_or_missing_are_left_alone():
    loaded = sys.modules["pytest"]
    import_on_demand("pytest")
    import_on_demand("no_such_package_anywhere")
    assert sys.modules["pytest"] is loaded
    assert "no_such_package_anywhere" not in sys.modules


def test_dp_accounting_is_whole_to_whoever_asks_for_it():
    code = (
        "import sluice.accounting.dpa as ours, dp_accounting as dpa\n"
        "assert dpa.GaussianDpEvent is ours.GaussianDpEvent\n"
        "from dp_accounting import *\n"
        "dpa.pld.PLDAccountant().compose(GaussianDpEvent(3.0)); dpa.calibrate_dp_mechanism; dpa.rdp.RdpAccountant"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_a_package_in_a_package_is_there_by_its_name_and_runs_when_it_is_used() -> None:
    program = (
        "import sys, numpy; from sluice._base.on_demand import import_on_demand; import_on_demand('numpy.f2py');"
        "assert numpy.f2py is sys.modules['numpy.f2py']; import numpy.f2py as again; assert again is numpy.f2py;"
        "assert 'numpy.f2py.crackfortran' not in sys.modules; assert numpy.f2py.get_include();"
        "assert 'numpy.f2py.f2py2e' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
