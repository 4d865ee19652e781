"""The certificate: what a run released and what that costs, for people and for programs.

Everything in it is derived from ``public/``; it can be made again at any time and comes out the same. Its published
form is ``sluice/runs/schemas/certificate.schema.json``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

from sluice._base.errors import DataError
from sluice._base.files import parse_json, read_bytes, write_atomically
from sluice.mechanism.base import Mechanism
from sluice.mechanism.delta import delta_problem, records_of
from sluice.runs.evaluations import read_evaluations
from sluice.runs.folder import RunFolder
from sluice.runs.ledger import LedgerContents, library_versions, read_ledger
from sluice.runs.privacy_spent import PrivacySpent, mechanism_of, spending
from sluice.runs.scores import score_titles
from sluice.runs.spent_again import SpentAgain, spent_again

FORMAT = 1

FEATURE_STATEMENTS = "features.json"
"""Where a run says what its model sees: a list of sentences."""

#: How far a recomputed epsilon may lie above the certified one: rounding of another machine, nothing more.
TOLERANCE = 1e-6

MUST_NOT_BE_PUBLISHED = (
    "The folder private/, as a whole: it is not covered by the guarantee.",
    "The number of attempts or of rejected updates, and acceptance rates.",
    "Training losses, gradient norms, the metric of any batch, and the sizes of batches.",
    "Timings: how long the run or any release took.",
    "Checkpoints, the state of the sampler or of the noise, and the fingerprint of the data.",
)

SEEDED_WARNING = (
    "For experiments only: the noise came from a seed, and whoever knows or guesses the seed can remove it. "
    "No figure below protects anybody."
)


def not_accounted(scores: Sequence[str]) -> list[str]:
    """What a run's epsilon does not cover, in sentences; ``scores`` are the names of those that it has published."""
    computed = (
        f"Test {score_titles(scores)} {'is' if len(scores) == 1 else 'are'}" if scores else "Scores of any kind are"
    )
    return [
        "The choice of settings. If several runs were tried on the same records and one was chosen, the others count too: "
        "verify them together (sluice verify RUN1 RUN2 ...).",
        "Side channels: how long training took, memory, power, or access to the machine while it ran.",
        f"Test records. {computed} computed on them without noise; they get no protection unless they are public.",
        "The number of training records and which features and classes they have, which are taken to be public.",
        "Anything computed from the training records outside this run, such as hand-made vocabularies or normalisation.",
    ]


def schema(name: str) -> dict[str, Any]:
    """A published JSON Schema: ``certificate``, ``ledger-line`` or ``audit``."""
    text = resources.files("sluice.runs").joinpath("schemas", f"{name}.schema.json").read_text("utf-8")
    result: dict[str, Any] = json.loads(text)
    return result


def build_certificate(folder: RunFolder) -> dict[str, Any]:
    """The certificate of a run, from its configuration and its ledger.

    Guarantee:
        Built from public values only. ``privacy.epsilon`` is a bound by a sound accountant or null, never a claim.
    """
    contents = read_ledger(folder.ledger_path)
    return certificate_of_run(folder, contents, spent=spending(contents))


def certificate_of_run(folder: RunFolder, contents: LedgerContents, *, spent: PrivacySpent) -> dict[str, Any]:
    """The certificate of the run whose ledger says this, and which costs this."""
    evaluations = read_evaluations(folder)
    return certificate_of(
        contents,
        configuration=folder.config_hash,
        spent=spent,
        features=statements_about_features(folder, contents),
        scores=list(evaluations[-1].scores) if evaluations else [],
        again=spent_again(folder, contents),
    )


def statements_about_features(folder: RunFolder, contents: LedgerContents) -> list[str]:
    """What the run has published about where its features come from; nothing for runs of earlier versions."""
    path = folder.public / FEATURE_STATEMENTS
    if path.name not in contents.published:
        return []
    statements = parse_json(read_bytes(path), what=str(path))
    if not isinstance(statements, list) or not all(isinstance(each, str) for each in statements):
        raise DataError(f"{path} must be a list of sentences.")
    return statements


def certificate_of(
    contents: LedgerContents,
    *,
    configuration: str,
    spent: PrivacySpent,
    features: Sequence[str] = (),
    scores: Sequence[str] = (),
    again: SpentAgain | None = None,
) -> dict[str, Any]:
    """What the ledger says, and what the run has published beside.

    Args:
        features: sentences about what the model sees.
        scores: the names of what is known of the model on test records.
        again: the audit on the run's own records, if there was one.
    """
    header, mechanism = contents.header, mechanism_of(contents.header)
    proved = spent.epsilon is not None
    warnings = [SEEDED_WARNING] * (header.noise == "seeded") + ([] if proved else [unproved_warning(mechanism)])
    failure = delta_problem(header.delta, records=records_of(mechanism)) if proved else None
    warnings += [failure] if failure else []
    warnings += [again.sentence] if again else []
    return {
        "format": FORMAT,
        "status": "claimed only" if not proved else "experiment only" if header.noise == "seeded" else "guarantee",
        "warnings": warnings,
        "released": {
            "counted_updates": contents.spent,
            "counted_after_a_crash": contents.recovered + contents.torn_release,
            "planned_updates": mechanism.covered_releases(contents.spent),
            "metric_with_each_update": mechanism.releases_metric,
            "preparation": len(mechanism.prior_releases),
            "files": dict(sorted(contents.published.items())),
        },
        "privacy": {
            "adjacency": "add or remove one record",
            "unit": "one record of the training data",
            "epsilon": None if spent.epsilon is None else _json_number(spent.epsilon),
            "delta": spent.delta,
            "budget": header.target_epsilon,
            "accountant": header.accountant,
            "theorem": mechanism.theorem(header.accountant) if proved else None,
        },
        "spent_again": again.as_json() if again else None,
        "claimed": [
            {"label": claim.label, "reading": claim.reading, "value": _json_number(claim.value)}
            for claim in spent.claims
        ],
        "sampling": dict(mechanism.sampling),
        "noise_source": header.noise,
        "mechanism": dict(header.mechanism),
        "features": list(features),
        "scores": list(scores),
        "not_accounted": not_accounted(scores),
        "must_not_be_published": list(MUST_NOT_BE_PUBLISHED),
        "verification": {
            "command": "sluice verify RUN",
            "ledger_head": contents.head,
            "configuration": configuration,
        },
        "versions": dict(header.versions),
        "written_with": library_versions(),
    }


def unproved_warning(mechanism: Mechanism) -> str:
    """What a run without a proof is published with."""
    return (
        f"No epsilon: {mechanism.unproved_because} Figures listed as claimed are what others would report. They are "
        "not guarantees."
    )


def write_certificate(folder: RunFolder) -> dict[str, Any]:
    """Write ``certificate.json`` with its pages and plots into ``public/``; returns the certificate."""
    from sluice.runs.derived import derived_files

    contents = read_ledger(folder.ledger_path)
    certificate = certificate_of_run(folder, contents, spent=spending(contents))
    text = json.dumps(certificate, indent=2, allow_nan=False) + "\n"
    # The JSON comes last: where it is in place and names the ledger's head, all the others are.
    outputs = {
        **derived_files(folder, contents, certificate),
        folder.certificate_path.name: text.encode("ascii"),
    }
    for name, content in outputs.items():
        write_atomically(folder.public / name, content, public=True)
    folder.hide_times()
    return certificate


def read_certificate(folder: RunFolder) -> dict[str, Any]:
    certificate = parse_json(read_bytes(folder.certificate_path), what=str(folder.certificate_path))
    if not isinstance(certificate, dict) or certificate.get("format") != FORMAT:
        raise DataError(f"{folder.certificate_path} is not a certificate of format {FORMAT}.")
    return certificate


def certified_head(folder: RunFolder) -> str | None:
    """The head of the ledger when the certificate was written; None if the certificate does not tell."""
    verification = read_certificate(folder).get("verification")
    head = verification.get("ledger_head") if isinstance(verification, dict) else None
    return head if isinstance(head, str) else None


def disagreements(certificate: Mapping[str, Any], recomputed: Mapping[str, Any]) -> Iterator[str]:
    """Where a certificate says something else than the ledger; its explanations may be worded in any way.

    A certified epsilon above the recomputed one holds (accountants get tighter); one below it does not.
    """
    facts = (
        *("status", "released", "privacy", "spent_again", "sampling", "noise_source", "mechanism"),
        *("verification", "versions"),
    )
    for fact in facts:
        yield from _differences(certificate.get(fact), recomputed[fact], fact)
    claimed = certificate.get("claimed")
    listed = recomputed["claimed"]
    if not isinstance(claimed, list) or len(claimed) != len(listed):
        yield "claimed: not the figures that follow from the ledger"
        return
    for index, (found, expected) in enumerate(zip(claimed, listed, strict=True)):
        yield from _differences(found, expected, f"claimed[{index}]")


def rewordings(certificate: Mapping[str, Any], recomputed: Mapping[str, Any]) -> Iterator[str]:
    """Where a certificate that these very versions wrote explains its figures in other words than they do."""
    if certificate.get("written_with") != recomputed["written_with"]:
        return
    for text in ("warnings", "features", "scores", "not_accounted", "must_not_be_published"):
        if certificate.get(text) != recomputed[text]:
            yield f"{text}: not in the words of the version that wrote it"


def _differences(found: Any, expected: Any, place: str) -> Iterator[str]:
    if isinstance(expected, dict):
        if not isinstance(found, dict):
            yield f"{place}: it is {_short(found)} and should be an object"
            return
        for key in sorted({*expected, *(str(key) for key in found)}):
            if key not in expected or key not in found:
                yield f"{place}.{key}: {'missing' if key in expected else 'unknown'}"
            else:
                yield from _differences(found[key], expected[key], f"{place}.{key}")
    elif place in ("privacy.epsilon", "spent_again.epsilon") and _is_number(found) and _is_number(expected):
        if expected > found * (1 + TOLERANCE):
            yield f"{place}: it says {found} and the ledger gives {expected}"
    elif place.startswith("claimed") and _is_number(found) and _is_number(expected):
        if not math.isclose(found, expected, rel_tol=TOLERANCE):
            yield f"{place}: it says {found} and the ledger gives {expected}"
    elif type(found) is not type(expected) or found != expected:
        yield f"{place}: it says {_short(found)} and the ledger gives {_short(expected)}"


def _json_number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
