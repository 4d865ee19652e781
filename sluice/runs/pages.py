"""The certificate as a page for a data-protection officer, in Markdown and in self-contained HTML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from sluice._base.html_page import bullets, document, figure, named_values
from sluice._base.rounding import rounded_up
from sluice.runs.scores import score_titles

Row = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading with, in this order, paragraphs, a table of names and values, and a list."""

    title: str
    paragraphs: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()
    items: tuple[str, ...] = ()
    plot: bool = False


TITLE = "Privacy certificate"


def headline(certificate: Mapping[str, Any]) -> str:
    """The one sentence to remember."""
    privacy, again = certificate["privacy"], certificate.get("spent_again")
    if privacy["epsilon"] is None:
        return "Nothing is proved about the privacy of this run."
    if again and again["epsilon"] is None:
        return "Nothing is proved about the privacy of this run and the audit on its records together."
    epsilon = (again or privacy)["epsilon"]
    sentence = f"Differentially private with epsilon = {rounded_up(epsilon)} at delta = {privacy['delta']:g}"
    sentence += ", the audit on its records included" if again else ""
    if certificate["noise_source"] == "seeded":
        return f"{sentence}, if the noise were secret. It is not: this run was seeded."
    return f"{sentence}."


def sections(certificate: Mapping[str, Any], audit: Mapping[str, Any] | None = None) -> list[Section]:
    """The page, in the order in which it is read, with what an audit found, where there was one."""
    return [
        _meaning(certificate),
        _released(certificate),
        _guarantee(certificate),
        *_claims(certificate),
        _mechanism(certificate),
        *(
            [Section(title="What the model sees", items=tuple(certificate["features"]))]
            if certificate.get("features")
            else []
        ),
        *_audit(audit),
        Section(title="What is not counted", items=tuple(certificate["not_accounted"])),
        Section(title="What must not be published", items=tuple(certificate["must_not_be_published"])),
        _verification(certificate),
    ]


def markdown_page(certificate: Mapping[str, Any], *, audit: Mapping[str, Any] | None = None) -> str:
    """The page in Markdown, with the plot as ``epsilon.svg`` beside it."""
    parts = [f"# {TITLE}", f"**{_markdown(headline(certificate))}**"]
    parts += [f"> **{_markdown(warning)}**" for warning in certificate["warnings"]]
    for section in sections(certificate, audit):
        parts.append(f"## {section.title}")
        parts += [_markdown(paragraph) for paragraph in section.paragraphs]
        if section.rows:
            rows = [f"| {_markdown(name)} | {_markdown(value)} |" for name, value in section.rows]
            parts.append("\n".join(["| | |", "|---|---|", *rows]))
        if section.items:
            parts.append("\n".join(f"- {_markdown(item)}" for item in section.items))
        if section.plot:
            parts.append("![Epsilon over released updates](epsilon.svg)")
    return "\n\n".join(parts) + "\n"


def html_page(certificate: Mapping[str, Any], *, plot: str, audit: Mapping[str, Any] | None = None) -> str:
    """The page in HTML, the SVG plot inside. It loads nothing from anywhere and runs no script."""
    top = f'<h1>{TITLE}</h1>\n<p class="headline">{escape(headline(certificate))}</p>'
    return document(TITLE, f"{top}\n{html_sections(certificate, plot=plot, audit=audit)}")


def html_sections(
    certificate: Mapping[str, Any],
    *,
    plot: str,
    audit: Mapping[str, Any] | None = None,
    level: int = 2,
) -> str:
    """Warnings and sections of the page, under headings of this level."""
    body = [f'<p class="warning">{escape(warning)}</p>' for warning in certificate["warnings"]]
    for section in sections(certificate, audit):
        plots = {"Epsilon over released updates": plot} if section.plot else {}
        body.append(html_section(section, plots=plots, level=level))
    return "\n".join(body)


def html_section(section: Section, *, plots: Mapping[str, str], level: int = 2) -> str:
    """A section with SVG plots, by what they show, inside."""
    body = [f"<section><h{level}>{escape(section.title)}</h{level}>"]
    body += [f"<p>{escape(paragraph)}</p>" for paragraph in section.paragraphs]
    body += [named_values(section.rows)] if section.rows else []
    body += [bullets(section.items)] if section.items else []
    body += [figure(plot, label=shows) for shows, plot in plots.items()]
    return "\n".join([*body, "</section>"])


def _meaning(certificate: Mapping[str, Any]) -> Section:
    unit = certificate["privacy"]["unit"]
    if certificate["privacy"]["epsilon"] is None:
        return Section(
            title="What this means",
            paragraphs=("Treat the released files as if the training records themselves were published.",),
        )
    if certificate["noise_source"] == "seeded":
        return Section(
            title="What this means",
            paragraphs=(
                "The figures say what the same run would guarantee with noise from a secure source. This run guarantees "
                "nothing against anyone who may come to know the seed: use it to study the method, on records that "
                "need no protection.",
            ),
        )
    return Section(
        title="What this means",
        paragraphs=(
            f"Whoever sees the released files learns little about {unit}: whatever they conclude, they would have "
            "concluded almost as readily had that record not been used. Epsilon bounds how much more readily (by a "
            "factor of e to the epsilon at most), and delta bounds the probability with which that may fail. "
            "Smaller is better. A person who contributed several records is protected less than for one.",
        ),
    )


def _released(certificate: Mapping[str, Any]) -> Section:
    released = certificate["released"]
    rows: list[Row] = [
        ("Updates counted", f"{released['counted_updates']:,} of {released['planned_updates']:,} planned"),
    ]
    if released["counted_after_a_crash"]:
        rows.append(("of these after a crash", f"{released['counted_after_a_crash']:,} (counted, never applied)"))
    if released["metric_with_each_update"]:
        rows.append(("With each update", "one noisy number, the reference of the next decisions"))
    if released["preparation"]:
        rows.append(("Before training", f"{released['preparation']:,} noisy statistics of the records"))
    rows += [(f"sha256 of {name}", digest) for name, digest in released["files"].items()]
    if not released["files"]:
        rows.append(("Files", "none in the ledger yet"))
    scores = score_titles(certificate.get("scores", ()))
    beside = f"the settings, and test {scores}" if scores else "and the settings"
    return Section(
        title="What was released",
        paragraphs=(
            f"The updates of the model, and hence the model after each of them, {beside}. "
            "Attempts that were rejected are not released in any form.",
        ),
        rows=tuple(rows),
    )


def _guarantee(certificate: Mapping[str, Any]) -> Section:
    privacy = certificate["privacy"]
    epsilon, planned = privacy["epsilon"], certificate["released"]["planned_updates"]
    again = certificate.get("spent_again")
    rows: list[Row] = [
        ("Epsilon", _epsilon(epsilon)),
        *([("Epsilon with the audit on the same records", _epsilon(again["epsilon"]))] if again else []),
        ("Delta", f"{privacy['delta']:g}"),
        ("It covers", f"all {planned:,} planned updates, whether or not the run stopped before the last"),
        ("Budget", "none was set" if privacy["budget"] is None else f"epsilon = {rounded_up(privacy['budget'])}"),
        ("Unit of privacy", privacy["unit"]),
        ("Adjacency", privacy["adjacency"]),
        ("Accountant", {"pld": "privacy-loss distributions", "rdp": "Renyi divergence"}[privacy["accountant"]]),
        ("It rests on", privacy["theorem"] or "nothing: no theorem covers this run"),
    ]
    proved = epsilon is not None
    return Section(title="The guarantee" if proved else "No guarantee", rows=tuple(rows), plot=proved)


def _epsilon(value: float | str | None) -> str:
    return "none" if value is None else rounded_up(value)


def _claims(certificate: Mapping[str, Any]) -> list[Section]:
    if not certificate["claimed"]:
        return []
    rows = tuple(
        (f"{claim['label']}, {claim['reading']} reading", rounded_up(claim["value"]))
        for claim in certificate["claimed"]
    )
    return [Section(title="Claimed by others, not proved", rows=rows)]


def _mechanism(certificate: Mapping[str, Any]) -> Section:
    mechanism, sampling = certificate["mechanism"], certificate["sampling"]
    source = {
        "secure": "secure: a cryptographic generator keyed by the operating system, never repeated",
        "seeded": "seeded: for experiments only",
    }[certificate["noise_source"]]
    rows: list[Row] = [
        ("Sampling", f"{sampling['kind']}: each record on its own with probability {sampling['rate']:.6g}"),
        ("Noise source", source),
    ]
    if "kind" in mechanism:
        rows[0] = ("Sampling", f"{sampling['kind']}; a record is in a batch with probability {sampling['rate']:.6g}")
        rows += [row for name, value in mechanism.items() for row in _flat(_title(name), value)]
        return Section(title="How it was made", rows=tuple(rows))
    rows.insert(1, ("Noise multiplier", rounded_up(mechanism["noise_multiplier"])))
    rows += _flat("Scaling", mechanism.get("scaling"))
    rows += _flat("Gate", mechanism.get("gate")) if mechanism.get("gate") else [("Gate", "none: plain DP-SGD")]
    return Section(title="How it was made", rows=tuple(rows))


def _audit(audit: Mapping[str, Any] | None) -> list[Section]:
    if audit is None:
        return []
    where = "a rehearsal of this run" if audit["result"]["rehearsal"] else "this run itself"
    return [
        Section(
            title="How it was audited",
            paragraphs=(
                f"In {where}, made-up records were added, each by a coin, and guessed again from what was released. Guesses "
                "that are right too often refute the claim. Where they do not, nothing is proved by that: only the "
                "guarantee above is.",
            ),
            rows=tuple((str(name), str(value)) for name, value in audit["summary"]),
            items=tuple(str(note) for note in audit["result"]["notes"]),
        )
    ]


def _verification(certificate: Mapping[str, Any]) -> Section:
    verification = certificate["verification"]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(certificate["versions"].items()))
    return Section(
        title="How to verify this",
        paragraphs=(
            f"Run: {verification['command']}. It computes epsilon again from the ledger alone and checks the ledger's "
            "chain, the settings, the released files and this certificate. Keep the ledger head below (or have it "
            "signed) to be able to notice later changes; the chain by itself shows damage, not forgery.",
        ),
        rows=(
            ("Ledger head", verification["ledger_head"]),
            ("Settings (sha256)", verification["configuration"]),
            ("Made with", versions),
        ),
    )


def _flat(name: str, description: Any) -> list[Row]:
    """One row for a described part: its kind first, then its settings."""
    if not isinstance(description, Mapping):
        return [(name, _plain(description))]
    return [(name, _described(description))]


def _described(description: Mapping[str, Any]) -> str:
    """A part by its kind and its settings, parts of its own in brackets."""
    tag = next((key for key in ("rule", "gate") if isinstance(description.get(key), str)), "")
    listed = ", ".join(
        f"{key.replace('_', ' ')} {f'({_described(value)})' if isinstance(value, Mapping) else _plain(value)}"
        for key, value in description.items()
        if key != tag
    )
    kind = description.get(tag)
    return f"{kind}: {listed}" if listed else str(kind)


def _title(name: str) -> str:
    return name.replace("_", " ").capitalize()


def _plain(value: Any) -> str:
    if value is None:
        return "none"
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def _markdown(text: str) -> str:
    for character in "\\`*_<>|[]":
        text = text.replace(character, f"\\{character}")
    return text.replace("\n", " ")
