"""From measured chunks of a batch to one release: the place where an attempt is released or forgotten.

Both ways of training end here, and so does the work of several workers: they add up the metric, chunk by chunk, take the same
decision, and add up the weighted sum where it is a release.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from sluice._base.errors import SluiceError
from sluice.gradients import Chunk
from sluice.mechanism.attempt import Attempt, ReferenceState
from sluice.mechanism.selective_release import SelectiveRelease
from sluice.randomness.sampling import PoissonSampler
from sluice.training.context import Loss, RawSum, TrainingContext
from sluice.training.executor import Draft, PiecewiseExecutor


class GaveUpError(SluiceError):
    """A release, or a run, used up its attempts. The run stops; what that tells was charged beforehand."""


@dataclass(frozen=True, kw_only=True)
class AcceptedBatch:
    """What an accepted attempt left: sensitive until noise is added."""

    raw_sum: RawSum
    raw_metric: float


class SelectiveReleaseExecutor(PiecewiseExecutor[AcceptedBatch]):
    """Makes the releases of selective release, or of plain DP-SGD, one attempt at a time.

    A step, from top to bottom:

    | stage | where |
    |---|---|
    | draw the gate's noise, then a batch | `draw` |
    | measure a chunk, decide whether it still may pass, add it to the sum | `absorb` |
    | log the release | `Executor.commit` |
    | add noise | `publish` |
    | update the weights, keep the next reference | `update` |

    `prepare` draws and absorbs until an attempt passes; a loop of the user's own does it by hand and calls `finish`.

    Guarantee:
        Each update applied is one release as `SelectiveReleaseDpEvent` (or the plain sampled Gaussian, without
        a gate) defines it: a Poisson sample at ``mechanism.sample_rate``, accepted by the gate, its scaled sum with
        noise of ``noise_multiplier`` times the rule's sensitivity, divided by a public constant. No more than
        ``mechanism.releases`` are made. A rejected attempt changes nothing but ``trace`` and the noise source; one that
        was interrupted is as if it had never begun, and does not count towards ``max_attempts``.
    """

    takes_workers = True
    takes_shards = True

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
    def expected_batch_size(self) -> float:
        return self.mechanism.expected_batch_size

    @property
    def still_possible(self) -> bool:
        return not self._rejected

    def prepare(self, loss: Loss) -> Draft[AcceptedBatch]:
        while not self._attempt_passes(loss):
            pass
        return self._draft()

    def _attempt_passes(self, loss: Loss) -> bool:
        # `map` holds no chunk while the next one is made.
        return all(map(self.absorb, self.context.rounds(self.draw(), loss))) and self._is_accepted()

    def draw(self) -> Tensor:
        self.require_more()
        self._forget()
        self._draw_gate_noise()
        sample = self._sampler.sample()
        if self._attempt is None:
            self._measured += len(sample)
        return sample

    def absorb(self, chunk: Chunk | None) -> bool:
        if not self._measure(chunk):
            return self._is_accepted()
        if chunk is not None:
            self._add_to_sum(chunk, self.mechanism.scaling(chunk.norms))
        return True

    def finish(self) -> bool:
        if not self._is_accepted():
            return False
        self.commit(self._draft())
        return True

    def publish(self, content: AcceptedBatch) -> dict[str, Any]:
        mechanism = self.mechanism
        noisy = self.context.noisy(
            content.raw_sum, noise_multiplier=mechanism.sigma, sensitivity=mechanism.scaling.sensitivity
        )
        gradient = self.context.as_update(
            {name: each.div_(mechanism.expected_batch_size) for name, each in noisy.items()}
        )
        reference = self._next_reference(content.raw_metric)
        return {"gradient": gradient, "reference": None if reference is None else asdict(reference)}

    def update(self, published: Mapping[str, Any]) -> None:
        self.load_own_state(published)
        self.context.apply(published["gradient"])

    def _draw_gate_noise(self) -> None:
        gate = self.mechanism.gate
        if gate is None or self.reference is None:
            return
        left = None if gate.max_attempts is None else gate.max_attempts - self._attempts_used
        self._attempt = gate.begin(self.reference, self.noise, attempts_left=left)
        if self._attempt.cannot_be_accepted:
            raise GaveUpError(
                f"release {self.released + 1} used up max_attempts={gate.max_attempts} and the run stops here. "
                "What was released so far stands and is accounted for."
            )

    def _measure(self, chunk: Chunk | None) -> bool:
        """Add what the workers have measured, each a chunk of its own, to the metric; false once acceptance is ruled out."""
        attempt = self._attempt
        if attempt is None:
            return True
        raw = (0.0, 0) if chunk is None else (attempt.raw_metric_of(chunk.norms), len(chunk))
        # Both are exact in float64, the metric because it lies on a grid: the same for all workers, in whatever order.
        raw_metric, measured = self.context.workers.total(torch.tensor(raw, dtype=torch.float64)).tolist()
        self._measured += int(measured)
        return attempt.add_metric(raw_metric)

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

    def _add_to_sum(self, chunk: Chunk, weights: Tensor) -> None:
        if self._raw_sum is None:
            self._raw_sum = self.context.raw_sum()
        self._raw_sum.add(chunk, weights)

    def _next_reference(self, raw_metric: float) -> ReferenceState | None:
        gate = self.mechanism.gate
        if gate is None or self.reference is None:
            return None
        return gate.next_reference(self.reference, raw_metric, self.noise)

    def own_state(self) -> dict[str, Any]:
        return {"reference": None if self.reference is None else asdict(self.reference)}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        self._forget()
        self._attempts_used = self._measured = 0
        self.reference = None if state["reference"] is None else ReferenceState(**state["reference"])

    def _draft(self) -> Draft[AcceptedBatch]:
        attempt = self._attempt
        raw_metric = 0.0 if attempt is None else attempt.raw_metric
        raw_sum = self.context.raw_sum() if self._raw_sum is None else self._raw_sum
        return Draft(
            content=AcceptedBatch(raw_sum=raw_sum, raw_metric=raw_metric),
            attempts=self._attempts_used + (1 if attempt is None else attempt.count),
            measured=self._measured,
            metric=raw_metric,
        )

    def _forget(self) -> None:
        self._attempt = None
        self._raw_sum = None
        self._rejected = False
