"""A run costs its whole plan, wherever it stopped: why it stopped may depend on what was released."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.signal import fftconvolve
from scipy.special import ndtr
from scipy.stats import norm

from sluice._base.line_plot import BLUE
from sluice.accounting.rdp_accountant import SelectiveRdpAccountant
from sluice.runs.certificate import build_certificate, read_certificate, schema, write_certificate
from sluice.runs.epsilon_plot import epsilon_plot
from sluice.runs.evaluations import Evaluation, read_evaluations
from sluice.runs.folder import RunFolder
from sluice.runs.ledger import read_ledger
from sluice.runs.pages import html_page, markdown_page
from sluice.runs.privacy_spent import epsilon_over_releases, mechanism_of, spending
from sluice.runs.verify import verify_run, verify_together

EARLIER = Path(__file__).parent / "earlier"


@pytest.mark.parametrize("made", [0, 1, 3, 7])
def test_a_run_that_stopped_early_costs_its_whole_plan(make_run, made):
    """None made is no exception: it may have given up on the first."""
    whole, stopped = make_run("whole", target_epsilon=1.0), make_run("stopped", made=made, target_epsilon=1.0)
    expected = build_certificate(whole)["privacy"]
    assert build_certificate(stopped)["privacy"] == expected
    assert verify_run(stopped.path).spent == verify_run(whole.path).spent
    page = markdown_page(build_certificate(stopped))
    assert f"{made:,} of 8 planned" in page
    assert "all 8 planned updates" in page


def test_a_torn_record_changes_nothing_about_the_cost(make_run):
    stopped = make_run(made=3)
    before = spending(read_ledger(stopped.ledger_path))
    stopped.ledger_path.write_bytes(stopped.ledger_path.read_bytes()[:-9])
    assert spending(read_ledger(stopped.ledger_path)) == before


def test_runs_together_cost_their_whole_plans(make_run):
    first, second = make_run("first", made=3), make_run("second", made=0, gated=False)
    _, joint = verify_together([first.path, second.path])
    accountant = SelectiveRdpAccountant()
    for folder in (first, second):
        accountant.compose(mechanism_of(read_ledger(folder.ledger_path).header).dp_event)
    assert joint is not None
    assert joint.epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-9)


def test_what_is_claimed_for_a_stopped_run_is_claimed_for_its_plan(make_run):
    whole, stopped = make_run("whole", hidden=True), make_run("stopped", hidden=True, made=2)
    assert build_certificate(stopped)["claimed"] == build_certificate(whole)["claimed"]


def test_the_curve_over_releases_ends_with_what_the_run_costs(make_run):
    contents = read_ledger(make_run(made=3).ledger_path)
    curve = epsilon_over_releases(contents, counts=range(1, 9))
    assert curve == sorted(curve)
    assert curve[-1] == spending(contents).epsilon > curve[2]


def test_the_plot_quotes_the_whole_plan(make_run):
    contents = read_ledger(make_run(made=3).ledger_path)
    written = re.findall(f'<text [^>]*fill="{BLUE}"[^>]*>([^<]*)<', epsilon_plot(contents))
    assert written == [f"{math.ceil(spending(contents).epsilon * 1e4) / 1e4:.4g}"]


def earlier(name: str, tmp_path: Path) -> RunFolder:
    """A run folder that the first version of the program wrote."""
    shutil.copytree(EARLIER / name, tmp_path / name)
    return RunFolder.look(tmp_path / name)


def test_a_finished_run_of_an_earlier_version_still_holds(tmp_path):
    folder = earlier("finished", tmp_path)
    verification = verify_run(folder.path)
    assert verification.holds, verification.checks
    assert verification.spent.epsilon == pytest.approx(read_certificate(folder)["privacy"]["epsilon"], rel=1e-9)


def test_a_certificate_of_an_earlier_version_that_says_too_little_fails_and_is_written_again(tmp_path):
    folder = earlier("stopped", tmp_path)
    verification = verify_run(folder.path)
    failed = [check for check in verification.checks if not check.holds]
    assert [check.name for check in failed] == ["certificate"]
    assert failed[0].detail.startswith("privacy.epsilon")
    assert "sluice certificate RUN" in failed[0].detail
    whole = verify_run(earlier("finished", tmp_path).path).spent
    assert verification.spent == whole
    write_certificate(folder)
    assert verify_run(folder.path).holds
    assert read_certificate(folder)["privacy"]["epsilon"] == whole.epsilon


def test_evaluations_of_an_earlier_version_are_read(tmp_path):
    found = read_evaluations(earlier("stopped", tmp_path))
    assert found == [Evaluation(release=3, epsilon_if_planned_to_stop_here=0.2446569875498116, test_accuracy=0.5)]


def test_schema_and_pages_say_what_epsilon_covers(make_run):
    described = schema("certificate")["properties"]["privacy"]["properties"]["epsilon"]["description"]
    assert "all planned updates" in described
    certificate = build_certificate(make_run(made=3))
    assert "It covers" in html_page(certificate, plot="<svg></svg>")
    assert json.loads(json.dumps(certificate)) == certificate


def gaussian_epsilon(mu: float, delta: float) -> float:
    def excess(epsilon: float) -> float:
        return float(ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon) * ndtr(-mu / 2 - epsilon / mu)) - delta

    return float(brentq(excess, 0.0, 60.0))


def test_a_stopping_time_chosen_from_outputs_breaks_the_epsilon_of_the_releases_made():
    """The example of docs/accounting.md, section 3.5: stop at the first loss above the epsilon that is then reported.

    The total loss of plain Gaussian releases is followed on a grid, under the law with the record.
    """
    sigma, releases, delta, step = 10.0, 100, 1e-5, 0.02
    mu = 1 / sigma
    score = np.arange(-80.0, 90.0, step)
    noise = norm.pdf(np.arange(-8.0, 8.0 + step / 2, step)) * step
    going = norm.pdf(score)
    beyond_reported = beyond_certified = 0.0
    certified = gaussian_epsilon(mu * math.sqrt(releases), delta)
    for t in range(1, releases + 1):
        if t > 1:
            going = np.maximum(fftconvolve(going, noise, mode="same"), 0.0)
        reported = gaussian_epsilon(mu * math.sqrt(t), delta)
        loss = mu * score + t * mu * mu / 2
        stopped = np.where(loss > reported, going, 0.0) * step
        beyond_reported += float(np.sum(stopped * np.maximum(-np.expm1(reported - loss), 0.0)))
        beyond_certified += float(np.sum(stopped * np.maximum(-np.expm1(certified - loss), 0.0)))
        going = np.where(loss > reported, 0.0, going)
    assert beyond_reported == pytest.approx(8.85e-5, rel=0.02)
    assert beyond_certified <= delta
