from __future__ import annotations

import math
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from sluice.accounting.calibration import calibrate
from sluice.accounting.plan_curves import as_svg, in_characters, plan_curves
from sluice.accounting.privacy_report import MEANINGS, privacy_report
from sluice.mechanism.gates import ClippingBiasGate

MNIST = {"sample_rate": 1024 / 60000, "noise_multiplier": 2.0, "releases": 2000, "delta": 1e-5}


@pytest.mark.parametrize(("gate_noise", "claimed"), [(1.0, "2.368"), (0.6, "3.134")])
def test_the_claim_stands_beside_the_proof_and_is_labelled(gate_noise, claimed):
    report = privacy_report(gate=ClippingBiasGate(gate_noise=gate_noise, reference_noise=10.0), **MNIST)
    assert f"{report.paper_rdp:.3f}" == claimed
    assert report.plain_pld < report.pld < report.rdp < report.paper_rdp
    assert f"{report.plain_pld:.3f}" == "1.621"
    assert all("claimed" in MEANINGS[name] for name in MEANINGS if name.startswith("paper"))
    assert report.reasons == {}


def test_without_a_gate_there_is_no_claim():
    report = privacy_report(**MNIST)
    assert report.paper_rdp is None
    assert report.pld == report.plain_pld


@pytest.mark.parametrize("rate", [0.1, 1.0])
def test_an_infinite_figure_comes_with_its_reason(rate):
    report = privacy_report(sample_rate=rate, noise_multiplier=1e-170, releases=1, delta=1e-5)
    infinite = {name for name, value in report.figures().items() if value is not None and math.isinf(value)}
    assert infinite
    assert infinite == set(report.reasons)


@pytest.fixture(scope="module")
def curves():
    plan = calibrate(
        sample_rate=0.02, releases=400, target_epsilon=1.0, target_delta=1e-5, gate=ClippingBiasGate(), accountant="rdp"
    )
    return plan_curves(plan, points=5)


def test_curves_rise_to_the_planned_releases(curves):
    assert curves.releases[-1] == 400
    for curve in curves.curves:
        assert list(curve.epsilons) == sorted(curve.epsilons)
    plain, proved, claimed = (curve.epsilons[-1] for curve in curves.curves)
    assert plain <= proved <= claimed
    assert "claimed (paper)" in curves.curves[2].name


def test_the_plot_in_letters_shows_all_lines_within_its_frame(curves):
    text = in_characters(curves, width=40, height=10)
    assert all(letter in text for letter in "#?-")
    assert "claimed (paper)" in text
    assert all(len(line) <= 50 for line in text.splitlines()[:12])


def test_the_plot_is_repeatable_and_names_its_lines(curves):
    svg = as_svg(curves)
    assert ElementTree.fromstring(svg.encode()).tag.endswith("svg")
    assert all(curve.name in svg for curve in curves.curves)
    assert svg == as_svg(curves)


_MEASURE = """
import re
from pathlib import Path
from sluice.accounting.calibration import calibrate
from sluice.mechanism.gates import ClippingBiasGate
calibrate(sample_rate={q}, releases={releases}, target_epsilon={epsilon}, target_delta=1e-7, gate=ClippingBiasGate())
print(int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text()).group(1)) / 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.parametrize(("q", "releases", "epsilon"), [(0.02, 2000, 1.0), (1e-6, 10**6, 1.0), (1.0, 10**6, 0.01)])
def test_a_calibration_keeps_within_300_megabytes(q, releases, epsilon):
    code = _MEASURE.format(q=q, releases=releases, epsilon=epsilon)
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert float(output) < 300
