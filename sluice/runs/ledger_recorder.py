"""The ledger of a library user's run: every release logged before it is applied, across restarts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sluice._base.errors import DataError
from sluice.mechanism.base import Mechanism
from sluice.runs.ledger import Ledger, LedgerHeader


class LedgerRecorder:
    """Logs releases in a new ledger, or in one that exists.

    Args:
        repeats_noise: whether a restored state repeats the noise (a seeded source), so that releases made again after a
            restart are the logged ones and not new ones.

    Guarantee:
        Each release whose noise is fresh has an entry of its own, also where a crash or a restart lost it. All releases of
        a ledger have the kind of noise that its first line names.
    """

    def __init__(self, path: Path, *, header: LedgerHeader, repeats_noise: bool) -> None:
        self._repeats_noise = repeats_noise
        if path.exists():
            self._ledger = Ledger.open(path)
            try:
                _require_same(self._ledger.header, header, where=path)
            except BaseException:
                self._ledger.close()
                raise
        else:
            self._ledger = Ledger.create(path, header=header)
        self.continue_from(0)

    def continue_from(self, applied: int) -> int:
        """Resume from a state that contains this many releases; how many more are logged and lost."""
        self._log = self._ledger.resume(applied=applied, repeats_noise=self._repeats_noise)
        return 0 if self._repeats_noise else self._ledger.spent - applied

    def before_release(self, number: int) -> None:
        self._log(number)

    def close(self) -> None:
        self._ledger.close()


def _require_same(logged: LedgerHeader, given: LedgerHeader, *, where: Path) -> None:
    """Refuse to go on with a ledger that speaks of other releases than those that would follow."""
    if logged.mechanism != given.mechanism:
        raise DataError(
            f"{where} is the ledger of another mechanism: give the arguments it began with, or another path."
        )
    if logged.noise != given.noise:
        raise DataError(
            f"{where} is the ledger of a run with {logged.noise} noise, and this engine's is {given.noise}: the ledger would "
            "certify what it does not know of. Give the seed that the run began with, or none, or another path."
        )


def one_after_the_other(*steps: Callable[[int], None] | None) -> Callable[[int], None]:
    """Call each of the given steps with the number of a release."""

    def call(number: int) -> None:
        for step in steps:
            if step is not None:
                step(number)

    return call


def ledger_header(
    mechanism: Mechanism, *, delta: float, secure: bool, accountant: str, target_epsilon: float | None
) -> LedgerHeader:
    return LedgerHeader(
        mechanism=mechanism.to_dict(),
        delta=delta,
        noise="secure" if secure else "seeded",
        accountant=accountant,
        target_epsilon=target_epsilon,
    )
