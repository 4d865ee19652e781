"""Check a run against itself: does everything in ``public/`` follow from the ledger?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sluice._base.errors import DataError, InputError, SluiceError
from sluice._base.files import sha256_of_file
from sluice._base.rounding import rounded_up
from sluice.runs.certificate import TOLERANCE, certificate_of, disagreements, read_certificate
from sluice.runs.folder import RunFolder
from sluice.runs.ledger import LedgerContents, read_ledger
from sluice.runs.privacy_spent import PrivacySpent, joint_spending, mechanism_of, spending
from sluice.runs.spent_again import SpentAgain, spent_again

_TOGETHER = "epsilon with audit"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that holds or does not, in one line."""

    name: str
    holds: bool
    detail: str


@dataclass(frozen=True, kw_only=True)
class Verification:
    """All checks of one run, and what it costs.

    Attributes:
        contents: what the ledger says; None where it cannot be read.
        spent: what the run costs, together with an audit on its records if there was one; None where a ledger cannot be
            read.
        audit: what the ledger of such an audit says; None where there was none or it cannot be read.
    """

    run: str
    checks: tuple[Check, ...]
    contents: LedgerContents | None
    spent: PrivacySpent | None
    audit: LedgerContents | None = None

    @property
    def ledgers(self) -> tuple[LedgerContents, ...]:
        """All that was released of the run's records, as far as it can be read."""
        return tuple(each for each in (self.contents, self.audit) if each is not None)

    @property
    def holds(self) -> bool:
        return all(check.holds for check in self.checks)


def verify_run(path: Path, *, delta: float | None = None) -> Verification:
    """Check one run, reading only ``public/`` and changing nothing.

    Guarantee:
        Epsilon is recomputed from the ledger by a fresh accountant, and for an audit on the run's own records together with
        it from the ledger of that. If every check holds, configuration, released
        files and certificate are those that the ledger speaks of. What it cannot notice is a forger who rewrites all
        of them consistently; compare the ledger's head with a copy of it for that.
    """
    folder = RunFolder.look(path)
    checks: list[Check] = []
    contents: LedgerContents | None = None
    spent: PrivacySpent | None = None
    try:
        contents = read_ledger(folder.ledger_path)
        checks.append(Check(name="ledger", holds=True, detail=_ledger_summary(contents)))
    except SluiceError as error:
        checks.append(Check(name="ledger", holds=False, detail=str(error)))
        return Verification(run=str(path), checks=tuple(checks), contents=None, spent=None)
    try:
        own, spent = spending(contents), spending(contents, delta=delta)
    except DataError as error:
        checks.append(Check(name="epsilon", holds=False, detail=str(error)))
        return Verification(run=str(path), checks=tuple(checks), contents=contents, spent=None)
    checks.append(_budget_check(contents, own, spent))
    again: SpentAgain | None = None
    try:
        again = _spent_again(folder, contents)
    except DataError as error:
        spent = None
        checks.append(Check(name=folder.audit_ledger_path.name, holds=False, detail=str(error)))
    if again is not None:
        spent = again.at(delta)
        checks += [
            Check(name=again.file, holds=True, detail=_ledger_summary(again.audit)),
            _joint_budget_check(again, spent),
        ]
    checks.append(_configuration_check(folder, contents))
    checks.extend(_file_checks(folder, contents))
    checks.append(_guarded("certificate", lambda: _certificate_check(folder, contents, own)))
    audit = None if again is None else again.audit
    return Verification(run=str(path), checks=tuple(checks), contents=contents, spent=spent, audit=audit)


def verify_together(
    paths: Sequence[Path], *, delta: float | None = None
) -> tuple[list[Verification], PrivacySpent | None]:
    """Check each run, and what all of them together cost: None if one of them cannot be read, or for one run.

    An audit on the records of a run is counted with it.
    """
    resolved = [path.resolve() for path in paths]
    if len(set(resolved)) < len(resolved):
        raise InputError("RUN is not allowed twice: each run is counted once for each time that it was made.")
    verifications = [verify_run(path, delta=delta) for path in paths]
    if len(paths) < 2 or any(each.spent is None for each in verifications):
        return verifications, None
    ledgers = [ledger for each in verifications for ledger in each.ledgers]
    return verifications, joint_spending(ledgers, delta=delta)


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except DataError as error:
        return Check(name=name, holds=False, detail=str(error))


def _ledger_summary(contents: LedgerContents) -> str:
    header = contents.header
    planned = " and no planned end" if header.mechanism.get("stages") else f" of {header.planned_releases:,}"
    summary = f"{contents.spent:,}{planned} releases, chain whole, head {contents.head[:16]}"
    if contents.recovered:
        summary += f"; {contents.recovered} of them counted after a crash"
    if contents.torn:
        summary += "; the last line is torn" + (" and counted as spent" if contents.torn_release else "")
    return summary


def _spent_again(folder: RunFolder, contents: LedgerContents) -> SpentAgain | None:
    """`spent_again`, which must be there if the certificate speaks of it."""
    again = spent_again(folder, contents)
    if again is None and _certifies_an_audit(folder):
        raise DataError(
            f"{folder.audit_ledger_path} is missing, and the certificate speaks of it: what the audit spent is unknown. "
            "Restore it from a copy."
        )
    return again


def _certifies_an_audit(folder: RunFolder) -> bool:
    try:
        return read_certificate(folder).get("spent_again") is not None
    except DataError:  # none yet, or damaged, of which another check tells
        return False


def _budget_check(contents: LedgerContents, own: PrivacySpent, spent: PrivacySpent) -> Check:
    header = contents.header
    if spent.epsilon is None or own.epsilon is None:
        claims = "; ".join(
            f"{claim.label}, {claim.reading} reading: {rounded_up(claim.value)}" for claim in spent.claims
        )
        return Check(name="epsilon", holds=True, detail=f"none is proved. {claims}".strip())
    covered = f"for all {_covered(contents):,} planned releases, recomputed from the ledger"
    detail = f"{rounded_up(spent.epsilon)} at delta {spent.delta:g} by {header.accountant}, {covered}"
    if header.noise == "seeded":
        detail += "; seeded noise: for experiments only"
    if header.target_epsilon is None:
        return Check(name="epsilon", holds=True, detail=detail)
    holds, relation = _compared(own.epsilon, header.target_epsilon, header.delta)
    return Check(name="epsilon", holds=holds, detail=f"{detail}; {relation}")


def _joint_budget_check(again: SpentAgain, spent: PrivacySpent) -> Check:
    """What run and audit cost together, held to the budget of the run's records."""
    header, both = again.run.header, again.together.epsilon
    if spent.epsilon is None or both is None:
        return Check(name=_TOGETHER, holds=True, detail="none is proved for the run and the audit on its records")
    detail = f"{rounded_up(spent.epsilon)} at delta {spent.delta:g} for the run and the audit on its records together"
    if header.target_epsilon is None:
        return Check(name=_TOGETHER, holds=True, detail=detail)
    holds, relation = _compared(both, header.target_epsilon, header.delta)
    return Check(name=_TOGETHER, holds=holds, detail=f"{detail}; {relation}")


def _compared(epsilon: float, budget: float, delta: float) -> tuple[bool, str]:
    holds = epsilon <= budget * (1 + TOLERANCE)
    return holds, f"{'within' if holds else 'ABOVE'} the budget of {budget:g} at delta {delta:g}"


def _covered(contents: LedgerContents) -> int:
    return mechanism_of(contents.header).covered_releases(contents.spent)


def _configuration_check(folder: RunFolder, contents: LedgerContents) -> Check:
    if contents.header.configuration == folder.config_hash:
        return Check(
            name="configuration", holds=True, detail=f"config.json is the one in the ledger ({folder.config_hash[:16]})"
        )
    return Check(name="configuration", holds=False, detail="config.json is not the one that the ledger was begun with")


def _file_checks(folder: RunFolder, contents: LedgerContents) -> list[Check]:
    checks = []
    for name, expected in sorted(contents.published.items()):
        path = folder.public / name
        if path.parent != folder.public or not path.is_file():
            checks.append(Check(name=name, holds=False, detail="published according to the ledger, and missing"))
        elif sha256_of_file(path) != expected:
            checks.append(Check(name=name, holds=False, detail="its sha256 is not the one in the ledger"))
        else:
            checks.append(Check(name=name, holds=True, detail=f"sha256 as in the ledger ({expected[:16]})"))
    if folder.weights_path.name not in contents.published and folder.weights_path.exists():
        detail = "present, but not in the ledger: nothing ties these weights to this ledger"
        checks.append(Check(name=folder.weights_path.name, holds=False, detail=detail))
    return checks


def _certificate_check(folder: RunFolder, contents: LedgerContents, own: PrivacySpent) -> Check:
    if not folder.certificate_path.exists():
        finished = contents.spent == mechanism_of(contents.header).releases
        detail = "none yet" + ("; make it with: sluice certificate RUN" if finished else ": the run is not finished")
        return Check(name="certificate", holds=True, detail=detail)
    again = spent_again(folder, contents)
    recomputed = certificate_of(contents, configuration=folder.config_hash, spent=own, again=again)
    problems = list(disagreements(read_certificate(folder), recomputed))
    if not problems:
        return Check(name="certificate", holds=True, detail="says what the ledger says")
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    remedy = "; if nobody changed it, an earlier version wrote it: sluice certificate RUN writes it again"
    return Check(name="certificate", holds=False, detail=f"{problems[0]}{more}{remedy}")
