"""The page of an audit: everything on it, nothing from elsewhere."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from sluice.audit.curves import Claim
from sluice.audit.evidence import Evidence
from sluice.audit.guesses import Channel, plan_guesses
from sluice.audit.page import audit_page
from sluice.audit.trials import Trials

DELTA = 1e-5


def evidence(*, shift=1.0, claim=1.0, count=200):
    random = np.random.default_rng(0)
    members = random.random(count) < 0.5
    return Evidence(
        scores={"a < b": random.standard_normal(count) + shift * members},
        members=members,
        plan=plan_guesses(Channel.of_epsilon(1.0, delta=DELTA), canaries=count, scores=("a < b",), delta=DELTA),
        delta=DELTA,
        claim=None if claim is None else Claim.of_epsilon(claim, delta=DELTA),
        kind="loud",
    )


class Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], ""

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data


def page_of(found):
    page = Page()
    page.feed(audit_page(found))
    return page


@pytest.mark.parametrize(("shift", "claim", "verdict"), [(0.1, 1.0, "not refuted"), (9.0, 1.0, "refuted")])
def test_the_page_says_what_was_found(shift, claim, verdict):
    page = page_of(evidence(shift=shift, claim=claim))
    assert page.tags.count("svg") == 4
    assert f"is {verdict};" in page.text
    assert ("do not publish" in page.text) == (verdict == "refuted")
    assert "a < b" in page.text
    assert "Exploratory" in page.text


def test_nothing_is_loaded_and_nothing_runs():
    page = page_of(evidence())
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert not {"src", "href", "onload"} & {name for name, _ in page.attributes}
    assert "url(" not in audit_page(evidence())


def test_without_a_claim_and_with_equal_scores():
    assert "Nothing is claimed" in page_of(evidence(claim=None)).text
    found = evidence(claim=None)
    found.scores["a < b"][:] = found.members
    assert page_of(found).tags.count("svg") == 4


def test_coins_as_numbers_and_infinite_scores():
    found = evidence(shift=3.0)
    found.scores["a < b"][:2] = -np.inf, np.inf
    numbers = replace(found, members=found.members.astype(np.int64))
    assert audit_page(numbers) == audit_page(found)
    assert "nan" not in audit_page(found)
    found.scores["a < b"][:] = np.where(found.members, np.inf, -np.inf)
    assert page_of(found).tags.count("svg") == 4


def test_trials_have_no_number_of_guesses():
    found = Trials(
        scores=np.arange(80.0),
        members=np.arange(80) % 3 == 0,
        choosing=np.arange(80) < 40,
        score="a score",
        kind="trials",
        delta=DELTA,
    )
    page = page_of(found)
    assert page.tags.count("svg") == 3
    assert "Exploratory" not in page.text
