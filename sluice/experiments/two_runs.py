"""The tight audit of one release: two runs, with and without one canary, in which every release is a trial.

Every record is in every batch, and weights stand still, so that what the other records add is the same in each release and all
that differs between the two runs is the canary. After Nasr et al., "Tight auditing of differentially private machine
learning", USENIX Security 2023.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F

from sluice._base.errors import InputError
from sluice.audit.canaries import Canaries
from sluice.audit.curves import Claim
from sluice.audit.trials import Trials
from sluice.experiments.rehearsal import Rehearsal, StandIns
from sluice.mechanism.attempt import ReferenceState
from sluice.mechanism.gates import ClippingBiasGate, Gate
from sluice.mechanism.selective_release import SelectiveRelease
from sluice.models import create_model
from sluice.training.engine import PrivacyEngine
from sluice.training.options import TrainingOptions
from sluice.training.selective_release import GaveUpError, SelectiveReleaseExecutor

FEWEST_RELEASES = 100
#: A threshold is found by few trials; the others are worth more where they are counted.
CHOOSING_SHARE = 1 / 8

_OTHERS = 16
_OF_ONE_RELEASE = "Claim and bounds are those of one release with every record in it, not of the run as a whole."
_INSIDE, _OUTSIDE = b"\x80", b"\x00"


def two_runs(rehearsal: Rehearsal, *, releases: int = 4000) -> Trials:
    """As many releases with a loud canary as without, of the run's own mechanism with every record in every batch.

    Scaling, gate, noise of the sum and noise of the published reference are put to the test, each release by the
    likelihood ratio of all that it publishes; sampling is not, since nothing is sampled.

    Guarantee:
        No training record is read. Releases are independent trials: noise is fresh each time, and neither weights nor what
        the others add to sum and metric change.
    """
    if not isinstance(releases, int) or isinstance(releases, bool) or releases < FEWEST_RELEASES:
        raise InputError(f"two_runs={releases!r} is not allowed: it must be an integer >= {FEWEST_RELEASES}.")
    if rehearsal.claimed_epsilon is not None:
        raise InputError(
            f"claimed_epsilon={rehearsal.claimed_epsilon} is not allowed with two runs: they test one release, of which the "
            "run's accountant says what is claimed. Leave it out."
        )
    mechanism = _with_every_record(rehearsal.mechanism, releases)
    delta = rehearsal.settings.delta
    with_canary, without = (_scores(rehearsal, mechanism, coins) for coins in (_INSIDE, _OUTSIDE))
    return Trials(
        scores=np.concatenate([with_canary, without]),
        members=np.repeat([True, False], [len(with_canary), len(without)]),
        choosing=np.concatenate([_first(len(with_canary)), _first(len(without))]),
        score="likelihood of a release",
        kind="releases of two runs, with and without one loud canary",
        delta=delta,
        confidence=rehearsal.confidence,
        claim=_claim_of_one_release(mechanism, delta=delta, accountant=rehearsal.settings.accountant),
        notes=(_OF_ONE_RELEASE,),
    )


def _first(count: int) -> np.ndarray:
    return np.arange(count) < max(2, round(CHOOSING_SHARE * count))


def _with_every_record(mechanism: object, releases: int) -> SelectiveRelease:
    if not isinstance(mechanism, SelectiveRelease):
        raise InputError(
            f"method {getattr(mechanism, 'kind', mechanism)!r} cannot be audited by two runs: only methods that release scaled "
            "sums with fresh noise can. Leave two_runs out."
        )
    return replace(mechanism, sample_rate=1.0, expected_batch_size=float(_OTHERS), releases=releases, prior_releases=())


def _claim_of_one_release(mechanism: SelectiveRelease, *, delta: float, accountant: str) -> Claim | None:
    claim = Claim.of_mechanism(replace(mechanism, releases=1), delta=delta, accountant=accountant)
    return claim if math.isfinite(claim.epsilon) else None


def _scores(rehearsal: Rehearsal, mechanism: SelectiveRelease, coins: bytes) -> np.ndarray:
    """The log likelihood ratio of each release, but for a constant."""
    settings, test = rehearsal.settings, rehearsal.splits.test
    model = create_model(settings.model, test.input_shape, len(rehearsal.splits.classes), settings.activation)
    engine = PrivacyEngine(accountant=settings.accountant)
    engine.make_private_by(
        mechanism,
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),  # what a release says must not change the next
        data_loader=StandIns(test, _OTHERS),
        options=TrainingOptions(canaries=Canaries(count=1, kind="loud", coins=coins)),
    )
    observations, executor = engine.auditing.observations, engine._running()
    assert observations is not None
    assert isinstance(executor, SelectiveReleaseExecutor)
    seen = []
    before = executor.reference
    try:
        for release in engine.releases(F.cross_entropy):
            assert observations.latest is not None
            of_sum = float(observations.latest[0]) / mechanism.sigma**2
            seen.append(of_sum + _of_reference(mechanism.gate, before, executor.reference))
            before = executor.reference
            rehearsal.report(release)
    except GaveUpError:
        pass  # what was released so far is counted
    engine.close()
    return np.array(seen)


def _of_reference(gate: Gate | None, before: ReferenceState | None, after: ReferenceState | None) -> float:
    """The same for what was published of the metric, taken out of the running average."""
    if not isinstance(gate, ClippingBiasGate) or before is None or after is None:
        return 0.0
    if gate.hidden_reference or gate.reference_noise is None or math.isinf(gate.reference_noise):
        return 0.0
    published = before.value + (after.value - before.value) * after.weight
    return published / gate.metric_bound / gate.reference_noise**2


__all__ = ["FEWEST_RELEASES", "two_runs"]
