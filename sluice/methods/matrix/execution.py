"""What makes the steps of the matrix mechanism."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from sluice._base.errors import InputError
from sluice.mechanism.scaling import Clip
from sluice.methods.matrix import MatrixMechanism
from sluice.randomness.correlated import CorrelatedRelease
from sluice.randomness.grouped_sampling import BallsInBins, CyclicPoisson
from sluice.randomness.sampling import PoissonSampler
from sluice.training.context import Loss, TrainingContext
from sluice.training.executor import Draft, ReplayableExecutor


class CorrelatedSteps(ReplayableExecutor[dict[str, Tensor]]):
    """Makes one step after the other, with correlated noise.

    Guarantee:
        The whole sequence of updates is post-processing of `CorrelatedRelease` on the promised batches. The batch and the
        row of noise of a step are both those of its number, ``spent``. Lost steps are skipped, never made again: their
        turn and their noise are gone (docs/matrix.md, section 3). A run whose records take turns in groups continues with the
        groups that it began with, or not at all: in others a record would have its turn again.
    """

    takes_workers = True

    def __init__(self, mechanism: MatrixMechanism, context: TrainingContext) -> None:
        super().__init__(releases=mechanism.releases, context=context)
        self._mechanism = mechanism
        self._scaling = Clip(max_grad_norm=mechanism.max_grad_norm)
        self._sampler = _sampler(mechanism, context)
        self._groups_are_lost = self._sampler_is_restored = False
        self._release = CorrelatedRelease(
            mechanism.strategy,
            steps=mechanism.releases,
            noise_multiplier=mechanism.noise_multiplier,
            max_grad_norm=mechanism.max_grad_norm,
            source=context.noise,
        )

    def begin_after(self, lost: int) -> None:
        super().begin_after(lost)
        # Charged before this executor drew its groups, and no state of that time was loaded.
        self._groups_are_lost = self.lost > 0 and not self.released and not self._sampler_is_restored

    def prepare(self, loss: Loss) -> Draft[dict[str, Tensor]]:
        if self._groups_are_lost and self._mechanism.batches != "poisson":
            raise InputError(
                f"{self.lost} steps of this run were made elsewhere, by groups of records that are not known here. Load a state of "
                "it (engine.load), or start a new run with a ledger of its own."
            )
        indices = self._sampler.batch_of(self.spent)
        raw_sum = self.context.raw_sum()
        for chunk in self.context.chunks(indices, loss):
            raw_sum.add(chunk, self._scaling(chunk.norms))
        return Draft(content=raw_sum.tensors(), measured=len(indices))

    def publish(self, content: dict[str, Tensor]) -> dict[str, Any]:
        raw = [tensor.clone() for tensor in content.values()]
        self._release.add_noise(list(content.values()), sum_error=self.context.sum_error)
        return {"raw": raw, "noisy": self.context.as_public(content)}

    def update(self, published: Mapping[str, Any]) -> None:
        noisy = published["noisy"]
        self._release.remember(raw_sum=published["raw"], released=[row.clone() for row in noisy.values()])
        self.context.apply({name: row.div_(self._mechanism.expected_batch_size) for name, row in noisy.items()})

    def catch_up(self) -> None:
        for _ in range(self.spent - self._release.position):
            self._release.skip()

    def own_state(self) -> dict[str, Any]:
        return {"sampler": self._sampler.state_dict(), "correlated": self._release.state_dict()}

    @property
    def history(self) -> int:
        return self._release.rows_kept

    def own_state_without_history(self) -> dict[str, Any]:
        return {"sampler": self._sampler.state_dict(), "correlated": self._release.state_dict(rows=not self.history)}

    def recall(self, published: Mapping[int, Mapping[str, Any]]) -> None:
        self._release.recall(
            {
                number - 1: (values["raw"], [row.clone() for row in values["noisy"].values()])
                for number, values in published.items()
            }
        )

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        self._sampler.load_state_dict(state["sampler"])
        self._sampler_is_restored = True
        self._release.load_state_dict(state["correlated"])


def _sampler(mechanism: MatrixMechanism, context: TrainingContext) -> PoissonSampler | CyclicPoisson | BallsInBins:
    size, source = context.dataset_size, context.noise
    if mechanism.batches == "poisson":
        return PoissonSampler(dataset_size=size, sample_rate=mechanism.sample_rate, source=source)
    if mechanism.batches == "balls-in-bins":
        return BallsInBins(dataset_size=size, bins=mechanism.groups, source=source)
    return CyclicPoisson(dataset_size=size, groups=mechanism.groups, sample_rate=mechanism.sample_rate, source=source)
