"""From measured chunks of a batch to one release: the place where an attempt is released or forgotten.

Both ways of training end here. Only three things would have to cross workers, and all are in this file: the metric
(`Attempt.add_metric`), the weighted sum, and the decision that follows from the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from sluice._base.errors import SluiceError
from sluice.gradients import Chunk
from sluice.mechanism.attempt import Attempt, ReferenceState
from sluice.mechanism.selective_release import SelectiveRelease
from sluice.randomness.noise import noisy_sum
from sluice.randomness.sampling import PoissonSampler
from sluice.training.context import Loss, RawSum, TrainingContext
from sluice.training.executor import Draft, Executor


class GaveUpError(SluiceError):
    """A release, or a run, used up its attempts. The run stops; what that tells was charged beforehand."""


@dataclass(frozen=True, kw_only=True)
class AcceptedBatch:
    """What an accepted attempt left: sensitive until noise is added."""

    raw_sum: dict[str, Tensor]
    raw_metric: float


class SelectiveReleaseExecutor(Executor[AcceptedBatch]):
    """Makes the releases of selective release, or of plain DP-SGD, one attempt at a time.

    Use: ``indices = begin()``; ``absorb(chunk)`` for each chunk of that batch until it says no; ``finish()``. Or
    ``make_release``, which does it all.

    Guarantee:
        Each update applied is one release as `SelectiveReleaseDpEvent` (or the plain sampled Gaussian, without
        a gate) defines it: a Poisson sample at ``mechanism.sample_rate``, accepted by the gate, its scaled sum with
        noise of ``noise_multiplier`` times the rule's sensitivity, divided by a public constant. No more than
        ``mechanism.releases`` are made. A rejected attempt changes nothing but ``trace`` and the noise source; one that
        was interrupted is as if it had never begun, and does not count towards ``max_attempts``.
    """

    def __init__(self, mechanism: SelectiveRelease, context: TrainingContext) -> None:
        super().__init__(releases=mechanism.releases, context=context)
        self.mechanism = mechanism
        self.reference: ReferenceState | None = mechanism.gate.first_reference() if mechanism.gate else None
        self._sampler = PoissonSampler(
            dataset_size=context.dataset_size, sample_rate=mechanism.sample_rate, source=context.noise
        )
        self._attempt: Attempt | None = None
        self._raw_sum: RawSum | None = None
        self._rejected = False
        self._attempts_used = 0
        self._measured = 0

    @property
    def still_possible(self) -> bool:
        """Whether the attempt in progress may still be released: sensitive."""
        return not self._rejected

    def prepare(self, loss: Loss) -> Draft[AcceptedBatch]:
        while not self._attempt_passes(loss):
            pass
        return self._draft()

    def _attempt_passes(self, loss: Loss) -> bool:
        for chunk in self.context.chunks(self.begin(), loss):
            if not self.absorb(chunk):
                return False
        return self._is_accepted()

    def begin(self) -> Tensor:
        """Start an attempt: the indices of its batch, which may be empty."""
        self.require_more()
        self._forget()
        gate = self.mechanism.gate
        if gate is not None and self.reference is not None:
            left = None if gate.max_attempts is None else gate.max_attempts - self._attempts_used
            self._attempt = gate.begin(self.reference, self.noise, attempts_left=left)
            if self._attempt.cannot_be_accepted:
                raise GaveUpError(
                    f"release {self.released + 1} used up max_attempts={gate.max_attempts} and the run stops here. "
                    "What was released so far stands and is accounted for."
                )
        return self._sampler.sample()

    def absorb(self, chunk: Chunk) -> bool:
        """Measure a chunk of the batch and add it to the sum; false once the attempt is rejected."""
        norms = chunk.norms
        self._measured += len(chunk)
        if self._attempt is not None and not self._attempt.add(norms):
            return self._is_accepted()
        if self._raw_sum is None:
            self._raw_sum = self.context.raw_sum()
        self._raw_sum.add(chunk, self.mechanism.scaling(norms))
        return True

    def finish(self) -> bool:
        """Release the attempt, or forget it. Whether it was released is sensitive."""
        if not self._is_accepted():
            return False
        self.commit(self._draft())
        return True

    def apply(self, content: AcceptedBatch) -> None:
        mechanism, raw_sum = self.mechanism, content.raw_sum
        noisy_sum(
            list(raw_sum.values()),
            noise_multiplier=mechanism.noise_multiplier,
            sensitivity=mechanism.scaling.sensitivity,
            noise=self.noise,
            sum_error=self.context.sum_error * mechanism.scaling.sensitivity,
        )
        if mechanism.gate is not None and self.reference is not None:
            self.reference = mechanism.gate.next_reference(self.reference, content.raw_metric, self.noise)
        self._attempts_used = self._measured = 0
        self._forget()
        self.context.apply({name: noisy.div_(mechanism.expected_batch_size) for name, noisy in raw_sum.items()})

    def own_state(self) -> dict[str, Any]:
        return {"reference": None if self.reference is None else asdict(self.reference)}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        self._forget()
        self._attempts_used = self._measured = 0
        self.reference = None if state["reference"] is None else ReferenceState(**state["reference"])

    def _is_accepted(self) -> bool:
        """Whether the attempt passes, all of its batch being measured; a rejection is counted, once."""
        if self._rejected:
            return False
        if self._attempt is None or self._attempt.still_possible:
            return True
        self._rejected = True
        self._attempts_used += self._attempt.count
        self._raw_sum = None
        return False

    def _draft(self) -> Draft[AcceptedBatch]:
        attempt = self._attempt
        raw_metric = 0.0 if attempt is None else attempt.raw_metric
        raw_sum = self.context.raw_sum() if self._raw_sum is None else self._raw_sum
        return Draft(
            content=AcceptedBatch(raw_sum=raw_sum.tensors(), raw_metric=raw_metric),
            attempts=self._attempts_used + (1 if attempt is None else attempt.count),
            measured=self._measured,
            metric=raw_metric,
        )

    def _forget(self) -> None:
        self._attempt = None
        self._raw_sum = None
        self._rejected = False
