"""From measured chunks of a batch to one release: the place where an attempt is released or forgotten.

Both ways of training end here, and so does the work of several workers: they add up the metric, chunk by chunk, take the same
decision, and add up the weighted sum where it is a release.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sluice._base.errors import InputError, SluiceError
from sluice.gradients import Chunk
from sluice.mechanism.attempt import Attempt, ReferenceState
from sluice.mechanism.gates import ClippingBiasGate
from sluice.mechanism.selective_release import SelectiveRelease
from sluice.mechanism.thinning import ThinningGate
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


@dataclass(frozen=True, kw_only=True)
class ObservedAttempt:
    """An attempt that has just been decided, for a study of what a gate does. All of it is sensitive.

    Attributes:
        release: the number of the release that it is an attempt at.
        indices: of its batch.
        skipped: so many attempts before it were rejected without a look at any batch.
        context: of the run, where studies find records, weights and losses.
    """

    release: int
    indices: Tensor
    skipped: int
    accepted: bool
    mechanism: SelectiveRelease
    context: TrainingContext
    loss: Loss


class SelectiveReleaseExecutor(PiecewiseExecutor[AcceptedBatch]):
    """Makes the releases of selective release, or of plain DP-SGD, one attempt at a time.

    A step, from top to bottom:

    | stage | where |
    |---|---|
    | draw the gate's noise, then a batch, and coins for its records where the gate thins it | `draw` |
    | measure a chunk, decide whether it still may pass, add it, or those of it that are kept, to the sum | `absorb` |
    | log the release | `Executor.commit` |
    | add noise | `publish` |
    | update the weights, keep the next reference | `update` |

    `prepare` draws and absorbs until an attempt passes; a loop of the user's own does it by hand and calls `finish`.

    Guarantee:
        Each update applied is one release as `SelectiveReleaseDpEvent` (or the plain sampled Gaussian, without
        a gate) defines it: a Poisson sample at ``mechanism.sample_rate``, accepted by the gate, its scaled sum with
        noise of ``noise_multiplier`` times the rule's sensitivity, divided by a public constant. No more than
        ``mechanism.releases`` are made. Where the gate thins batches, a record is kept by a coin of its own, drawn before it is
        measured; coins belong to places in the batch, so they do not depend on how it is cut into chunks. A rejected attempt
        changes nothing but ``trace`` and the noise source; one that was interrupted is as if it had never begun, and does not
        count towards ``max_attempts``.
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
        self._coins: Tensor | None = None
        self._rejected = False
        self._attempts_used = 0
        self._measured = 0

    @property
    def expected_batch_size(self) -> float:
        return self.mechanism.expected_candidates

    @property
    def still_possible(self) -> bool:
        return not self._rejected

    def serve_loop(self) -> None:
        super().serve_loop()
        gate, context = self.mechanism.gate, self.context
        rows = 1 if context.gradients.sums_losses else context.loop_rows
        if isinstance(gate, ThinningGate) and gate.moved_records < rows:
            raise InputError(
                f"gate.moved_records={gate.moved_records} is not allowed in a loop of your own over a mean loss, where rounding "
                f"may move the norms of {rows} records: make_private fills it in; or set it, use a sum, or engine.releases."
            )
        if isinstance(gate, ClippingBiasGate) and gate.provable and not context.gradients.sums_losses:
            self._require_metric_error(gate)

    def _require_metric_error(self, gate: ClippingBiasGate) -> None:
        small_norm = self.mechanism.scaling.unclipped_norm
        needed = gate.for_batches_of(self.expected_batch_size, small_norm=small_norm).metric_error
        if gate.metric_error < needed:
            raise InputError(
                f"gate.metric_error={gate.metric_error:g} is not allowed in a loop of your own over a mean loss, where rounding may "
                f"move the metric by {needed:g} (docs/noise.md, section 6): make_private fills it in, and so does "
                "gate.for_batches_of(expected_batch_size, small_norm=...); or use a sum, or engine.releases."
            )

    def prepare(self, loss: Loss) -> Draft[AcceptedBatch]:
        while not self._attempt_passes(loss):
            pass
        return self._draft()

    def _attempt_passes(self, loss: Loss) -> bool:
        indices = self.draw()
        # `map` holds no chunk while the next one is made.
        passes = all(map(self.absorb, self.context.rounds(indices, loss))) and self._is_accepted()
        if self.context.observe_attempt is not None:
            self.context.observe_attempt(self._observed(indices, loss, accepted=passes))
        return passes

    def _observed(self, indices: Tensor, loss: Loss, *, accepted: bool) -> ObservedAttempt:
        return ObservedAttempt(
            release=self.spent + 1,
            indices=indices,
            skipped=0 if self._attempt is None else self._attempt.count - 1,
            accepted=accepted,
            mechanism=self.mechanism,
            context=replace(self.context, observe_attempt=None),
            loss=loss,
        )

    def draw(self) -> Tensor:
        self.require_more()
        self._forget()
        self._draw_gate_noise()
        sample = self._sampler.sample()
        if self._attempt is None:
            self._measured += len(sample)
        elif self.mechanism.gate is not None and self.mechanism.gate.thins:
            # All workers draw the coins of all places, and use those of their own.
            self._coins = self.context.workers.own(self.noise.uniform((len(sample),)))
        return sample

    def absorb(self, chunk: Chunk | None) -> bool:
        if not self._measure(chunk):
            return self._is_accepted()
        if chunk is not None:
            self._add_to_sum(chunk, self._weights(chunk.norms))
        return True

    def finish(self) -> bool:
        if not self._is_accepted():
            return False
        self.commit(self._draft())
        return True

    def candidate(self, indices: Tensor, loss: Loss) -> dict[str, Tensor]:
        """The gradient that a release of this batch would publish, whatever a gate says of it.

        Guarantee:
            Sensitive: nothing is charged for it. For studies of what a gate does, with a noise source of their own.
        """
        raw_sum = self.context.raw_sum()
        for chunk in self.context.chunks(indices, loss):
            raw_sum.add(chunk, self.mechanism.scaling(chunk.norms))
        return self._with_noise(raw_sum)

    def publish(self, content: AcceptedBatch) -> dict[str, Any]:
        gradient = self._with_noise(content.raw_sum)
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

    def _weights(self, norms: Tensor) -> Tensor:
        """With which weight each record of a chunk counts: 0 for those that a thinning gate leaves out."""
        weights, gate = self.mechanism.scaling(norms), self.mechanism.gate
        if self._coins is None or gate is None:
            return weights
        coins, self._coins = self._coins[: len(norms)], self._coins[len(norms) :]
        kept = coins < gate.keep_probability(norms, sample_rate=self.mechanism.sample_rate)
        return weights.masked_fill(~kept.to(weights.device), 0.0)

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

    def _with_noise(self, raw_sum: RawSum) -> dict[str, Tensor]:
        mechanism = self.mechanism
        noisy = self.context.noisy(raw_sum, noise_multiplier=mechanism.sigma, sensitivity=mechanism.scaling.sensitivity)
        return self.context.as_update({name: each.div_(mechanism.expected_batch_size) for name, each in noisy.items()})

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
        self.batch += 1
        self._attempt = self._raw_sum = self._coins = None
        self._rejected = False
