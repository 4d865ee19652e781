"""From measured chunks of a batch to one release: the place where an attempt is released or forgotten.

Both ways of training end here. Only three things would have to cross workers, and all are in this file: the metric
(`Attempt.add_metric`), the weighted sum, and the decision that follows from the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from sluice.attempt import Attempt, ReferenceState
from sluice.errors import InputError, SluiceError
from sluice.gradients import Chunk
from sluice.mechanism import Mechanism
from sluice.noise import NoiseSource, noisy_sum
from sluice.sampling import PoissonSampler


class GaveUpError(SluiceError):
    """A release used up its attempts. The run stops; its probability was charged to delta beforehand."""


@dataclass
class PrivateTrace:
    """What must never be published: one row for each release that was made. Kept for the developer's own eyes."""

    attempts: list[int] = field(default_factory=list)
    measured: list[int] = field(default_factory=list)
    metrics: list[float] = field(default_factory=list)

    def record(self, *, attempts: int, measured: int, metric: float) -> None:
        self.attempts.append(attempts)
        self.measured.append(measured)
        self.metrics.append(metric)


class Releaser:
    """Makes the releases of one mechanism, one attempt at a time.

    Use: ``indices = begin()``; ``absorb(chunk)`` for each chunk of that batch until it says no; ``finish()``.

    Args:
        mechanism: what is promised; read-only.
        zeros: gives fresh accumulators, parameter name to tensor.
        apply: takes the released mean gradient by parameter name and updates the weights with it.
        before_release: called with the number of the release before anything of it is applied (a ledger's place).

    Attributes:
        released: updates that the weights contain.
        lost: releases that were put on record and then lost in a crash; they count as spent.

    Guarantee:
        Each call of ``apply`` gets one release as `SelectiveReleaseDpEvent` (or the plain sampled Gaussian, without
        a gate) defines it: a Poisson sample at ``mechanism.sample_rate``, accepted by the gate, its scaled sum with
        noise of ``noise_multiplier`` times the rule's sensitivity, divided by a public constant. No more than
        ``mechanism.releases`` are made. A rejected attempt changes nothing but ``trace`` and the noise source.
    """

    def __init__(
        self,
        *,
        mechanism: Mechanism,
        zeros: Callable[[], dict[str, Tensor]],
        apply: Callable[[Mapping[str, Tensor]], None],
        noise: NoiseSource,
        dataset_size: int,
        before_release: Callable[[int], None] | None = None,
    ) -> None:
        self.mechanism = mechanism
        self.noise = noise
        self.trace = PrivateTrace()
        self.released = 0
        self.lost = 0
        self.reference: ReferenceState | None = mechanism.gate.first_reference() if mechanism.gate else None
        self._zeros = zeros
        self._apply = apply
        self._before_release = before_release
        self._sampler = PoissonSampler(dataset_size=dataset_size, sample_rate=mechanism.sample_rate, source=noise)
        self._attempt: Attempt | None = None
        self._raw_sum: dict[str, Tensor] | None = None
        self._attempts_used = 0
        self._measured = 0
        self._forget()

    @property
    def spent(self) -> int:
        """Releases that have to be paid for: those made, and those that a crash took after they were on record."""
        return self.released + self.lost

    @property
    def done(self) -> bool:
        """Whether the last release has been made."""
        return self.spent >= self.mechanism.releases

    @property
    def still_possible(self) -> bool:
        return self._attempt is None or self._attempt.still_possible

    def begin(self) -> Tensor:
        """Start an attempt: the indices of its batch, which may be empty."""
        if self.done:
            raise InputError(
                f"all releases={self.mechanism.releases} of this run are made: more would exceed the budget. "
                "Start a run with more releases, calibrated for them."
            )
        self._forget()
        gate = self.mechanism.gate
        if gate is not None and self.reference is not None:
            left = None if gate.max_attempts is None else gate.max_attempts - self._attempts_used
            self._attempt = gate.begin(self.reference, self.noise, attempts_left=left)
            self._attempts_used += self._attempt.count
            if self._attempt.hopeless:
                raise GaveUpError(
                    f"release {self.released + 1} used up max_attempts={gate.max_attempts} and the run stops here. "
                    "What was released so far stands and is accounted for."
                )
        else:
            self._attempts_used += 1
        return self._sampler.sample()

    def absorb(self, chunk: Chunk) -> bool:
        """Measure a chunk of the batch and add it to the sum; false once the attempt is lost."""
        norms = chunk.norms
        self._measured += len(chunk)
        if self._attempt is not None and not self._attempt.add(norms):
            return False
        if self._raw_sum is None:
            self._raw_sum = self._zeros()
        chunk.add_weighted_sum(self.mechanism.scaling(norms), into=self._raw_sum)
        return True

    def finish(self) -> bool:
        """Release the attempt, or forget it. Whether it was released is sensitive."""
        if not self.still_possible:
            self._forget()
            return False
        raw_sum = self._zeros() if self._raw_sum is None else self._raw_sum
        mechanism = self.mechanism
        if self._before_release is not None:
            self._before_release(self.released + 1)
        noisy_sum(
            list(raw_sum.values()),
            noise_multiplier=mechanism.noise_multiplier,
            sensitivity=mechanism.scaling.sensitivity,
            noise=self.noise,
        )
        metric = 0.0
        if mechanism.gate is not None and self._attempt is not None and self.reference is not None:
            metric = self._attempt.raw_metric
            self.reference = mechanism.gate.next_reference(self.reference, metric, self.noise)
        released = {name: noisy.div_(mechanism.expected_batch_size) for name, noisy in raw_sum.items()}
        self.released += 1
        self.trace.record(attempts=self._attempts_used, measured=self._measured, metric=metric)
        self._attempts_used = 0
        self._measured = 0
        self._forget()
        self._apply(released)
        return True

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has to keep between two releases; sensitive where the reference is hidden."""
        return {
            "released": self.released,
            "noise": self.noise.state_dict(),
            "reference": None if self.reference is None else asdict(self.reference),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, lost: int = 0) -> None:
        """Continue from a checkpoint; ``lost`` releases after it are on record and gone."""
        self._forget()
        self._attempts_used = self._measured = 0
        self.released = state["released"]
        self.lost = lost
        self.noise.load_state_dict(state["noise"])
        self.reference = None if state["reference"] is None else ReferenceState(**state["reference"])

    def _forget(self) -> None:
        self._attempt = None
        self._raw_sum = None
