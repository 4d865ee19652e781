from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
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


def test_names_of_the_core_cost_the_core_alone(package, tmp_path):
    (tmp_path / package / "light.py").write_text("__all__ = ['VALUE']\nVALUE = 3\nHIDDEN = 4")
    import_on_demand(package, core="light")
    import slow_package

    assert slow_package.VALUE == 3
    assert "slow_package.other" not in sys.modules
    assert "RUNS" not in vars(slow_package)
    with pytest.raises(AttributeError, match="HIDDEN"):
        slow_package.HIDDEN  # noqa: B018
    assert slow_package.RUNS == [1]


def test_a_core_that_is_missing_is_done_without(package):
    import_on_demand(package, core="absent")
    import slow_package

    assert (slow_package.VALUE, slow_package.RUNS) == (3, [1])


@pytest.mark.parametrize("question", ["from slow_package import *", "names = dir(sys.modules['slow_package'])"])
def test_asking_for_all_names_gives_all(package, question):
    import_on_demand(package, core="light")
    found: dict[str, object] = {"sys": sys}
    exec(question, found)
    assert {"VALUE", "RUNS"} <= {*found, *found.get("names", ())}  # type: ignore[misc]


def test_threads_wait_until_the_package_has_run(package, tmp_path):
    (tmp_path / package / "__init__.py").write_text("import time\nFIRST = 1\ntime.sleep(0.2)\nLAST = 2")
    import_on_demand(package)
    import slow_package

    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(lambda _: slow_package.LAST, range(4))) == {2}


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


def test_special_functions_are_the_same_with_and_without_the_rest_of_their_package():
    code = (
        "import sys, sluice.accounting, scipy\n"
        "few = scipy.special.ndtr, scipy.special.log_ndtr, scipy.special.gammaln\n"
        "assert 'scipy.special._basic' not in sys.modules\n"
        "assert scipy.special.logsumexp([0.0, 0.0]) > 0 and 'scipy.special._basic' in sys.modules\n"
        "assert few == (scipy.special.ndtr, scipy.special.log_ndtr, scipy.special.gammaln)\n"
        "from scipy.special import *\n"
        "assert ndtri(0.5) == 0 and comb(3, 2) == 3"
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
