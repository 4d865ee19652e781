"""A run with canaries: what is trained, what is seen of it, and what follows."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from sluice._base.errors import InputError
from sluice.audit.canaries import Attached, Canaries, WithCanaries, canary_norm, with_canaries
from sluice.audit.curves import Claim
from sluice.audit.evidence import Evidence
from sluice.audit.guesses import LOSS, Channel, plan_guesses
from sluice.audit.scores import Observations
from sluice.gradients.sharding import is_sharded
from sluice.mechanism.base import Mechanism
from sluice.training.context import Loss, evaluating

_ROWS_AT_ONCE = 256


class Auditing:
    """Canaries in a run, or none.

    Attributes:
        module: what is trained: the user's module, with a weight for each white-box canary.
        data: the records, and behind them the canaries that are in.
        observations: what the releases say of each white-box canary so far.

    Guarantee:
        White-box canaries change no weight of the user's module: no gradient of theirs reaches it, and none of the records'
        reaches their weights.
    """

    def __init__(
        self,
        canaries: Canaries | None,
        mechanism: Mechanism,
        module: nn.Module,
        optimizer: Optimizer,
        data: DataLoader[Any] | Dataset[Any],
    ) -> None:
        self._canaries = canaries
        self._mechanism = mechanism
        self._optimizer = optimizer
        self._base = module
        self._attached: Attached | None = None
        self._before: nn.Module | None = None
        self.data = data if canaries is None else with_canaries(data, canaries)
        self.observations: Observations | None = None
        if canaries is None:
            return
        if any(map(is_sharded, module.parameters())):
            raise InputError(
                "canaries are not allowed in a sharded model: audit a module that is whole on every worker."
            )
        if not canaries.is_white_box:
            self._before = copy.deepcopy(module)
            return
        self.observations = Observations(canaries=canaries.count, channel=Channel.of(mechanism))
        self._attached = Attached(module, canaries=canaries.count)
        # Trained as the other weights are; the optimizer's first group decides how.
        optimizer.param_groups[0]["params"].append(self._attached.canary.weight)
        self.set_length(canaries.loss)

    @property
    def module(self) -> nn.Module:
        return self._base if self._attached is None else self._attached

    @property
    def canaries(self) -> Canaries:
        if self._canaries is None:
            raise InputError("there is nothing to audit: pass canaries=Canaries(count=1000) to make_private.")
        return self._canaries

    def set_length(self, loss: Loss) -> None:
        """Give white-box canaries the length that their kind has, under the loss that is trained with."""
        if self._attached is None:
            return
        data = self.data.dataset if isinstance(self.data, DataLoader) else self.data
        assert isinstance(data, WithCanaries)
        norm = canary_norm(self._mechanism, self.canaries.kind)
        self._attached.set_length(norm, data.blank_record(), loss)

    def observe(self, released: Mapping[str, Tensor]) -> None:
        """Look at a release on the canaries' own coordinates."""
        if self.observations is None or self.observations.channel is None:
            return
        mechanism: Any = self._mechanism
        unit = mechanism.scaling.sensitivity / mechanism.expected_batch_size
        own = released["canary.weight"].detach().double().cpu().numpy()[:-1, 0]
        self.observations.add(own / unit)

    def evidence(
        self, *, delta: float, accountant: str, confidence: float = 0.95, claimed_epsilon: float | None = None
    ) -> Evidence:
        """What the canaries show so far, and what was fixed before."""
        canaries = self.canaries
        claim = self._claim(delta, claimed_epsilon, accountant)
        scores = self.scores()
        channel = None if self.observations is None else self.observations.channel
        if channel is None:
            channel = Channel.of_epsilon(1.0 if claim is None else claim.epsilon, delta=delta)
        return Evidence(
            scores=scores,
            members=canaries.members,
            plan=plan_guesses(
                channel, canaries=canaries.count, scores=tuple(scores), delta=delta, confidence=confidence
            ),
            delta=delta,
            claim=claim,
            kind=canaries.kind,
            rehearsal=canaries.is_rehearsal,
        )

    def _claim(self, delta: float, claimed_epsilon: float | None, accountant: str) -> Claim | None:
        if claimed_epsilon is not None:
            return Claim.of_epsilon(claimed_epsilon, delta=delta)
        if self._mechanism.stages is not None:
            raise InputError(
                "claimed_epsilon=None is not allowed for a run without a planned end: say what is put to the test, such as "
                "claimed_epsilon=engine.get_certified_epsilon(delta)."
            )
        claim = Claim.of_mechanism(self._mechanism, delta=delta, accountant=accountant)
        return claim if math.isfinite(claim.epsilon) else None

    def scores(self) -> dict[str, Any]:
        """What the releases so far say of each canary, by each score; higher for those that seem to be in the data."""
        if self._attached is not None and self.observations is not None:
            return self.observations.scores(self._attached.displacement)
        if self._before is None:
            raise InputError("there is nothing to audit: pass canaries=Canaries(count=1000) to make_private.")
        return {LOSS: (self._losses(self._before) - self._losses(self._base)).numpy()}

    def _losses(self, module: nn.Module) -> Tensor:
        """The loss of each canary, in or out."""
        assert self.canaries.records is not None
        x, y = self.canaries.records
        parts = []
        with torch.no_grad(), evaluating(module):
            for rows in torch.arange(len(y)).split(_ROWS_AT_ONCE):
                output = module(x[rows])
                parts += [
                    self.canaries.loss(out[None], target[None]) for out, target in zip(output, y[rows], strict=True)
                ]
        return torch.stack(parts).double()

    def strip(self) -> None:
        """Take the canaries' weights out of the optimizer; the user's module never had them."""
        if self._attached is not None:
            weight = self._attached.canary.weight
            group = self._optimizer.param_groups[0]
            group["params"] = [each for each in group["params"] if each is not weight]
            self._optimizer.state.pop(weight, None)


__all__ = ["Auditing"]
