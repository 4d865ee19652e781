"""Check a run against itself: does everything in ``public/`` follow from the ledger?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sluice._base.errors import DataError, InputError, SluiceError
from sluice._base.rounding import rounded_up
from sluice.runs.certificate import TOLERANCE, certificate_of_run, disagreements, read_certificate, rewordings
from sluice.runs.folder import RunFolder
from sluice.runs.ledger import LedgerContents, read_ledger
from sluice.runs.privacy_spent import PrivacySpent, joint_spending, mechanism_of, spending
from sluice.runs.spent_again import SpentAgain, spent_again
from sluice.runs.verify_files import REMEDY, Check, NotChecked, logged_file_checks, not_checked, page_checks

_TOGETHER = "epsilon with audit"


@dataclass(frozen=True, kw_only=True)
class Verification:
    """All checks of one run, and what it costs.

    Attributes:
        contents: what the ledger says; None where it cannot be read.
        spent: what the run costs, together with an audit on its records if there was one; None where a ledger cannot be
            read.
        audit: what the ledger of such an audit says; None where there was none or it cannot be read.
        not_checked: files in ``public/`` that may say anything.
    """

    run: str
    checks: tuple[Check, ...]
    contents: LedgerContents | None
    spent: PrivacySpent | None
    audit: LedgerContents | None = None
    not_checked: tuple[NotChecked, ...] = ()

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
        files, certificate and its pages are those that the ledger speaks of, but for the files that are listed as not
        checked. What it cannot notice is a forger who rewrites all
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
    checks.extend(logged_file_checks(folder, contents))
    certified = _guarded("certificate", lambda: _certificate_check(folder, contents, own))
    checks += [certified, *(page_checks(folder, contents) if certified.holds else [])]
    checked = {folder.certificate_path.name, *(check.name for check in checks)}
    return Verification(
        run=str(path),
        checks=tuple(checks),
        contents=contents,
        spent=spent,
        audit=None if again is None else again.audit,
        not_checked=tuple(not_checked(folder, checked=checked)),
    )


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


def _certificate_check(folder: RunFolder, contents: LedgerContents, own: PrivacySpent) -> Check:
    if not folder.certificate_path.exists():
        finished = contents.spent == mechanism_of(contents.header).releases
        detail = "none yet" + ("; make it with: sluice certificate RUN" if finished else ": the run is not finished")
        return Check(name="certificate", holds=True, detail=detail)
    certificate, recomputed = read_certificate(folder), certificate_of_run(folder, contents, spent=own)
    problems = [*disagreements(certificate, recomputed), *rewordings(certificate, recomputed)]
    if not problems:
        return Check(name="certificate", holds=True, detail="says what the ledger says")
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return Check(name="certificate", holds=False, detail=f"{problems[0]}{more}{REMEDY}")
