from __future__ import annotations

import json
from html.parser import HTMLParser

import jsonschema
import pytest

from sluice._base.rounding import rounded_up
from sluice.accounting.pld_accountant import SelectivePLDAccountant
from sluice.accounting.rdp_accountant import SelectiveRdpAccountant
from sluice.mechanism.selective_release import SelectiveRelease
from sluice.runs.certificate import build_certificate, disagreements, schema, write_certificate
from sluice.runs.ledger import Ledger, read_ledger
from sluice.runs.pages import headline, html_page, markdown_page
from sluice.runs.privacy_spent import joint_spending, mechanism_of, spending

KINDS = {
    "secure": {},
    "seeded": {"noise": "seeded", "target_epsilon": 1.0},
    "plain": {"gated": False, "prior_releases": (8.0, 9.0)},
    "hidden": {"hidden": True, "prior_releases": (8.0,)},
    "unfinished": {"made": 3},
    "untouched": {"made": 0},
    "no noise": {"noise_multiplier": 1e-9, "target_epsilon": 3.0},
}


@pytest.mark.parametrize("kind", KINDS)
def test_certificates_follow_the_published_schema(make_run, kind):
    folder = make_run(**KINDS[kind])
    written = write_certificate(folder)
    validator = jsonschema.Draft202012Validator(schema("certificate"))
    validator.check_schema(schema("certificate"))
    validator.validate(json.loads(folder.certificate_path.read_bytes()))
    assert json.loads(folder.certificate_path.read_bytes()) == written == build_certificate(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_ledger_lines_follow_the_published_schema(make_run, kind):
    folder = make_run(**KINDS[kind])
    folder.ledger_path.write_bytes(folder.ledger_path.read_bytes()[:-3])
    if kind != "untouched":
        Ledger.open(folder.ledger_path).close()
        validator = jsonschema.Draft202012Validator(schema("ledger-line"))
        for line in folder.ledger_path.read_text().splitlines():
            validator.validate(json.loads(line))


@pytest.mark.parametrize(
    ("key", "value"), [("epsilon", None), ("epsilon", -1), ("accountant", "paper"), ("seconds", 3.0)]
)
def test_the_schema_refuses_a_certificate_that_says_too_little_or_too_much(make_run, key, value):
    certificate = build_certificate(make_run())
    certificate["privacy"][key] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(certificate, schema("certificate"))


def test_the_schema_refuses_a_seeded_guarantee_and_an_unproved_epsilon(make_run):
    certificate = build_certificate(make_run()) | {"noise_source": "seeded"}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(certificate, schema("certificate"))
    claimed = build_certificate(make_run("hidden", hidden=True))
    claimed["privacy"]["epsilon"] = claimed["claimed"][0]["value"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(claimed, schema("certificate"))


@pytest.mark.parametrize(("name", "accountant"), [("rdp", SelectiveRdpAccountant), ("pld", SelectivePLDAccountant)])
def test_epsilon_is_that_of_a_fresh_accountant(make_run, name, accountant):
    """Composed here release by release from the mechanism, not through the ledger's own path."""
    folder = make_run(made=5, prior_releases=(6.0,), accountant=name)
    mechanism = SelectiveRelease.from_dict(read_ledger(folder.ledger_path).header.mechanism)
    expected = accountant().compose(mechanism.event_after(0)).compose(mechanism.release_event, 8).get_epsilon(1e-5)
    assert build_certificate(folder)["privacy"]["epsilon"] == pytest.approx(expected, rel=1e-9)


def test_a_torn_release_is_counted(make_run):
    whole, torn = make_run("whole", made=4), make_run("torn", made=4)
    torn.ledger_path.write_bytes(torn.ledger_path.read_bytes()[:-20])
    before, after = build_certificate(whole), build_certificate(torn)
    assert after["privacy"] == before["privacy"]
    assert after["released"]["counted_updates"] == 4
    assert after["released"]["counted_after_a_crash"] == 1
    assert "counted, never applied" in markdown_page(after)


def test_composition_of_runs_is_that_of_their_events(make_run):
    first = read_ledger(make_run("first", made=3).ledger_path)
    second = read_ledger(make_run("second", gated=False, prior_releases=(5.0,)).ledger_path)

    def event(contents):
        return mechanism_of(contents.header).dp_event

    accountant = SelectiveRdpAccountant().compose(event(first)).compose(event(second))
    joint = joint_spending([first, second])
    assert joint.epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-9)
    assert joint.epsilon > max(spending(first).epsilon, spending(second).epsilon)


@pytest.mark.parametrize("kind", ["secure", "hidden", "no noise"])
def test_an_audit_on_the_records_is_on_certificate_and_pages(make_run, spend_again, kind):
    folder = make_run(**KINDS[kind])
    spend_again(folder)
    certificate = write_certificate(folder)
    jsonschema.validate(json.loads(folder.certificate_path.read_bytes()), schema("certificate"))
    both = joint_spending([read_ledger(folder.ledger_path), read_ledger(folder.audit_ledger_path)]).epsilon
    assert certificate["spent_again"]["ledger_head"] == read_ledger(folder.audit_ledger_path).head
    assert certificate["spent_again"]["epsilon"] == {"secure": both, "hidden": None, "no noise": "inf"}[kind]
    for page in ("certificate.md", "certificate.html"):
        assert "used a second time, for an audit" in (folder.public / page).read_text()
    if kind == "secure":
        assert f"epsilon = {rounded_up(both)} at delta = 1e-05, the audit on its records" in headline(certificate)
        assert certificate["privacy"]["epsilon"] < both


@pytest.mark.parametrize(
    ("key", "value"), [("epsilon", 0.01), ("epsilon", None), ("ledger_head", "0" * 64), ("counted_updates", 3)]
)
def test_a_certificate_that_says_something_else_of_the_audit_is_noticed(make_run, spend_again, key, value):
    folder = make_run()
    spend_again(folder)
    recomputed = build_certificate(folder)
    changed = json.loads(json.dumps(recomputed))
    changed["spent_again"][key] = value
    assert [problem.split(":")[0] for problem in disagreements(changed, recomputed)] == [f"spent_again.{key}"]
    del changed["spent_again"]
    assert [problem.split(":")[0] for problem in disagreements(changed, recomputed)] == ["spent_again"]


def test_an_unproved_run_has_claims_and_no_epsilon_anywhere(make_run):
    folder = make_run(hidden=True)
    certificate = write_certificate(folder)
    assert certificate["status"] == "claimed only"
    assert certificate["privacy"]["epsilon"] is None
    assert certificate["privacy"]["theorem"] is None
    assert [claim["label"] for claim in certificate["claimed"]] == ["claimed (paper)"] * 2
    assert headline(certificate) == "Nothing is proved about the privacy of this run."
    proved = read_ledger(make_run("proved").ledger_path)
    assert joint_spending([read_ledger(folder.ledger_path), proved]).epsilon is None


def test_a_seeded_run_is_stamped(make_run):
    folder = make_run(noise="seeded")
    certificate = write_certificate(folder)
    assert certificate["status"] == "experiment only"
    for name in ("certificate.md", "certificate.html"):
        assert "For experiments only" in (folder.public / name).read_text()
    assert "It is not: this run was seeded" in headline(certificate)


def test_public_files_do_not_depend_on_rejected_attempts(make_run):
    """Two runs with the same releases and different traces publish the same bytes."""
    quick, slow = make_run("quick", attempts=1), make_run("slow", attempts=40)
    for folder in (quick, slow):
        write_certificate(folder)
    names = sorted(path.name for path in quick.public.iterdir())
    assert "epsilon.svg" in names
    assert names == sorted(path.name for path in slow.public.iterdir())
    for name in names:
        assert (quick.public / name).read_bytes() == (slow.public / name).read_bytes(), name
    assert quick.trace_path.read_bytes() != slow.trace_path.read_bytes()


class _Tags(HTMLParser):
    VOID = ("meta", "path", "use", "rect", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        assert not any(name in ("src", "onload", "onclick") for name, _ in attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_says_what_a_data_protection_officer_asks(make_run, kind):
    folder = make_run(**KINDS[kind])
    certificate = write_certificate(folder)
    page = _Tags()
    page.feed((folder.public / "certificate.html").read_text())
    page.close()
    assert page.open == []
    assert "script" not in page.seen
    assert ("svg" in page.seen) == (kind != "hidden")
    markdown = (folder.public / "certificate.md").read_text()
    for text in (page.text, markdown):
        for expected in (
            "one record of the training data",
            "add or remove one record",
            "Poisson",
            "The choice of settings",
            "Side channels",
            "What must not be published",
            "The folder private/",
            "sluice verify RUN",
            certificate["verification"]["ledger_head"],
        ):
            assert expected in text
    if kind != "hidden":
        assert f"epsilon = {rounded_up(certificate['privacy']['epsilon'])}" in page.text
        assert "docs/accounting.md" in page.text


def test_names_from_the_ledger_cannot_inject_markup(make_run):
    folder = make_run(made=2, versions={"sluice": "<script>"})
    with Ledger.open(folder.ledger_path) as ledger:
        ledger.append_published("<script>alert(1)</script>|x", sha256="ab" * 32)
    certificate = build_certificate(folder)
    assert "<script>" not in html_page(certificate, plot="<svg></svg>")
    assert "<script>" not in markdown_page(certificate).replace("\\<script\\>", "")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("privacy", "epsilon"), 0.01),
        (("privacy", "epsilon"), None),
        (("privacy", "epsilon"), "0.1"),
        (("privacy", "delta"), 1e-6),
        (("released", "counted_updates"), 7),
        (("released", "counted_updates"), 8.0),
        (("released", "files"), {}),
        (("mechanism", "noise_multiplier"), 20.0),
        (("verification", "ledger_head"), "0" * 64),
        (("noise_source",), "seeded"),
        (("status",), "claimed only"),
        (("privacy",), None),
        (("privacy", "note"), "trust me"),
        (("claimed",), [{}]),
    ],
)
def test_a_certificate_that_says_something_else_is_noticed(make_run, place, value):
    folder = make_run()
    recomputed = build_certificate(folder)
    changed = json.loads(json.dumps(recomputed))
    assert list(disagreements(changed, recomputed)) == []
    target = changed
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = value
    problems = list(disagreements(changed, recomputed))
    assert len(problems) >= 1
    assert problems[0].startswith(place[0])


def test_an_overstated_epsilon_and_other_words_hold(make_run):
    recomputed = build_certificate(make_run())
    changed = json.loads(json.dumps(recomputed))
    changed["privacy"]["epsilon"] *= 1.5
    changed["not_accounted"] = ["in other words"]
    assert list(disagreements(changed, recomputed)) == []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.16981, "1.17"),
        (0.12341, "0.1235"),
        (2.0, "2"),
        (0.1234, "0.1234"),
        (1e-7, "1e-07"),
        (0.0, "0.0"),
        ("inf", "inf"),
    ],
)
def test_printed_epsilons_are_rounded_up(value, text):
    assert rounded_up(value) == text
