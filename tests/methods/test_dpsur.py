from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from sluice._base.errors import InputError
from sluice.accounting.dpsur import give_up_probability, most_attempts_at_once
from sluice.accounting.dpsur_comparison import compare_dpsur, epsilon_by_attempts, epsilon_by_releases
from sluice.experiments.settings import settings_from
from sluice.mechanism.scaling import Clip, GlobalScaling
from sluice.methods import planned_mechanism
from sluice.methods.dpsur import DpsurMechanism
from sluice.methods.dpsur.execution import SelectiveUpdates
from sluice.training.engine import PrivacyEngine
from sluice.training.selective_release import GaveUpError

RECORDS = 200


def make_mechanism(**changes: Any) -> DpsurMechanism:
    exact = DpsurMechanism(
        sample_rate=0.5,
        expected_batch_size=100.0,
        scaling=Clip(max_grad_norm=1.0),
        noise_multiplier=1e-3,
        validation_rate=0.5,
        expected_validation_size=100.0,
        validation_noise=1e-3,
        loss_clip=0.01,
        threshold=-0.5,
        releases=3,
    )
    return replace(exact, **changes)


def run(
    mechanism: DpsurMechanism, *, optimizer: str = "sgd", seed: int | None = 5
) -> tuple[PrivacyEngine, nn.Module, torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(RECORDS, 4, generator=generator)
    data = TensorDataset(inputs, (inputs[:, 0] > 0).long())
    torch.manual_seed(1)
    model = nn.Linear(4, 2)
    chosen: torch.optim.Optimizer = (
        torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        if optimizer == "sgd"
        else torch.optim.Adam(model.parameters(), lr=0.1)
    )
    engine = PrivacyEngine(seed=seed, accountant="rdp")
    engine.make_private_by(mechanism, module=model, optimizer=chosen, data_loader=data)
    return engine, model, chosen


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_planted_bad_step_is_rejected_and_leaves_no_trace(optimizer, monkeypatch):
    engine, model, chosen = run(make_mechanism(), optimizer=optimizer)
    releases = engine.releases(F.cross_entropy)
    next(releases)
    before = copy.deepcopy((model.state_dict(), chosen.state_dict()))
    honest, seen = SelectiveUpdates._noisy_gradient, []

    def planted(self: SelectiveUpdates, indices: Tensor, loss: Any) -> dict[str, Tensor]:
        if seen:  # everything the rejected candidate touched is back
            now = (model.state_dict(), chosen.state_dict())
            assert all(torch.equal(now[0][name], value) for name, value in before[0].items())
            assert str(now[1]) == str(before[1])
        gradient = honest(self, indices, loss)
        seen.append(1)
        return {name: -50 * value for name, value in gradient.items()} if len(seen) <= 3 else gradient

    monkeypatch.setattr(SelectiveUpdates, "_noisy_gradient", planted)
    next(releases)
    assert engine.last_private_trace()[0] == 4
    assert not torch.equal(model.weight, before[0]["weight"])


def test_both_losses_are_taken_on_the_same_fresh_batch(monkeypatch):
    from sluice.training.context import TrainingContext

    engine, _, _ = run(make_mechanism())
    seen: list[Tensor] = []
    honest = TrainingContext.raw_losses

    def watched(self: TrainingContext, indices: Tensor, loss: Any, **options: Any) -> Tensor:
        seen.append(indices)
        return honest(self, indices, loss, **options)

    monkeypatch.setattr(TrainingContext, "raw_losses", watched)
    for _ in engine.releases(F.cross_entropy):
        pass
    pairs = list(zip(seen[::2], seen[1::2], strict=True))
    assert all(torch.equal(first, second) for first, second in pairs)
    assert not torch.equal(pairs[0][0], pairs[1][0])


def test_the_test_has_the_noise_that_is_accounted():
    engine, _, _ = run(make_mechanism(validation_noise=1.3, loss_clip=0.01, threshold=-1.0))
    executor = engine._executor
    assert isinstance(executor, SelectiveUpdates)
    for raw_change in (-0.01, 0.0, 0.01):
        share = sum(executor._passes(raw_change) for _ in range(4000)) / 4000
        expected = torch.distributions.Normal(0, 2 * 0.01 * 1.3).cdf(torch.tensor(-0.01 - raw_change)).item()
        assert share == pytest.approx(expected, abs=0.03)


def test_a_change_that_is_not_a_number_counts_as_the_worst():
    engine, _, _ = run(make_mechanism())
    executor = engine._executor
    assert isinstance(executor, SelectiveUpdates)
    nothing = torch.zeros(0, dtype=torch.float64)
    assert executor._raw_change(nothing, nothing) == 0.0
    assert executor._raw_change(torch.tensor([1.0]), torch.tensor([float("nan")])) == 0.01
    assert executor._raw_change(torch.tensor([float("inf")]), torch.tensor([1.0])) == 0.01
    assert executor._raw_change(torch.tensor([1.0]), torch.tensor([100.0])) == 0.01
    assert executor._raw_change(torch.tensor([100.0]), torch.tensor([1.0])) == -0.01


def test_the_three_figures_are_those_of_the_accountants():
    settings = settings_from({"dataset": "mnist", "method": "dpsur", "options": {"account": "claimed"}})
    mechanism = planned_mechanism(settings, dataset_size=60000)
    assert isinstance(mechanism, DpsurMechanism)
    known = compare_dpsur(mechanism.release, releases=1475, delta=1e-5)
    authors, paper = mechanism.claims_after(1475, delta=1e-5)
    assert authors.value == pytest.approx(known.claimed_authors)
    assert paper.value == pytest.approx(known.claimed_paper_table)
    proved = mechanism.epsilon_after(1475, delta=1e-5, accountant="pld")
    assert proved == pytest.approx(known.proved_by_attempts, rel=1e-6)
    assert authors.value < 3 < proved < mechanism.epsilon_after(1475, delta=1e-5, accountant="rdp")
    by_releases = replace(mechanism, max_attempts=None).epsilon_after(1475, delta=1e-5, accountant="rdp")
    assert by_releases == pytest.approx(known.proved_by_releases, rel=0.02)


def test_authors_settings_come_with_their_account():
    for epsilon, noise, validation_noise, releases in ((1.0, 2.0, 1.3, 281), (3.0, 1.35, 0.9, 1475)):
        given = {"method": "dpsur", "dataset": "mnist", "epsilon": epsilon, "options": {"account": "claimed"}}
        settings = settings_from(given)
        assert (settings.noise_multiplier, settings.releases) == (noise, releases)
        assert settings.options["validation_noise"] == validation_noise
        own = settings_from({**given, "releases": 7, "options": {"account": "claimed", "validation_noise": 1.1}})
        assert (own.noise_multiplier, own.releases, own.options["validation_noise"]) == (noise, 7, 1.1)


def test_noise_is_calibrated_to_the_account_that_is_asked_for():
    given = {"method": "dpsur", "dataset": "mnist", "epsilon": 3.0}
    for accountant in ("pld", "rdp"):
        proved = planned_mechanism(settings_from({**given, "accountant": accountant}), dataset_size=60000)
        assert 2.9 < proved.epsilon_after(proved.releases, delta=1e-5, accountant=accountant) <= 3.0
    settings = settings_from({"method": "dpsur", "dataset": "digits", "options": {"account": "claimed"}})
    claimed = planned_mechanism(settings, dataset_size=1437)
    assert 2.9 < claimed.claims_after(claimed.releases, delta=1e-5)[0].value <= 3.0
    assert claimed.epsilon_after(claimed.releases, delta=1e-5, accountant="pld") > 3.2


def test_every_attempt_is_charged_from_the_start():
    mechanism = make_mechanism(noise_multiplier=5.0, validation_noise=3.0, max_attempts=30)
    expected = epsilon_by_attempts(mechanism.release, max_attempts=30, delta=1e-5)
    for releases in (0, 1, 3):
        assert mechanism.epsilon_after(releases, delta=1e-5, accountant="pld") == pytest.approx(expected)


def test_a_cap_that_is_never_reached_may_be_charged_by_releases():
    few = make_mechanism(
        sample_rate=0.1, noise_multiplier=4.0, validation_rate=1e-6, validation_noise=30.0, threshold=0.0
    )
    mechanism = replace(few, releases=100, max_attempts=1000)
    given_up = give_up_probability(mechanism.release, releases=100, max_attempts=1000)
    assert 0 < given_up < 1e-9
    by_attempts = epsilon_by_attempts(mechanism.release, max_attempts=1000, delta=1e-5)
    by_releases = epsilon_by_releases(mechanism.release, releases=100, delta=1e-5, max_attempts=1000)
    assert by_releases < by_attempts
    assert mechanism.epsilon_after(100, delta=1e-5, accountant="pld") == pytest.approx(by_releases, rel=0.02)
    # A cap that some data would reach says something, and the selection's bound does not cover that.
    tight = replace(mechanism, max_attempts=200)
    assert tight.epsilon_after(1, delta=1e-5, accountant="pld") == pytest.approx(
        epsilon_by_attempts(mechanism.release, max_attempts=200, delta=1e-5), rel=1e-6
    )


def rejecting(monkeypatch: pytest.MonkeyPatch, *passes: bool) -> None:
    """Let the tests end as told, and then be passed."""
    verdicts = list(passes)
    monkeypatch.setattr(SelectiveUpdates, "_passes", lambda self, raw_change: verdicts.pop(0) if verdicts else True)


def test_the_run_ends_when_its_attempts_are_used_up(monkeypatch):
    engine, model, _ = run(make_mechanism(validation_noise=1.0, max_attempts=6))
    rejecting(monkeypatch, False, True, *[False] * 20)
    releases = engine.releases(F.cross_entropy)
    assert next(releases) == 1
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(GaveUpError, match=r"max_attempts=6\) at release 2"):
        next(releases)
    assert engine.released == 1
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


@pytest.mark.parametrize("resumed", [False, True])
def test_a_run_that_gave_up_makes_no_more_attempts(resumed, monkeypatch):
    """The cap is charged once: whoever catches the error and asks again, or loads a later checkpoint, gets none."""
    made = []
    monkeypatch.setattr(SelectiveUpdates, "_passes", lambda self, raw_change: made.append(raw_change))
    mechanism = make_mechanism(max_attempts=4)
    engine, _, _ = run(mechanism)
    for _ in range(3):
        with pytest.raises(GaveUpError):
            next(engine.releases(F.cross_entropy))
        if resumed:
            state = engine.state_dict()
            engine, _, _ = run(mechanism)
            engine.load_state_dict(state)
    assert len(made) == 4


def test_hooks_of_the_optimizer_see_releases_alone(monkeypatch):
    passes = iter([False, False, True, False, True, True])
    monkeypatch.setattr(SelectiveUpdates, "_passes", lambda self, raw_change: next(passes))
    engine, model, optimizer = run(make_mechanism())
    seen: list[Tensor] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(model.weight.detach().clone()))
    released = [model.weight.detach().clone() for _ in engine.releases(F.cross_entropy)]
    assert len(seen) == len(released) == 3
    assert all(map(torch.equal, seen, released))


def test_one_release_may_not_use_more_attempts_than_a_lost_one_is_charged(monkeypatch):
    mechanism = make_mechanism(validation_noise=1.0, max_attempts=10_000)
    engine, _, _ = run(mechanism)
    tries: list[float] = []
    monkeypatch.setattr(SelectiveUpdates, "_passes", lambda self, raw_change: tries.append(raw_change))
    with pytest.raises(GaveUpError):
        next(engine.releases(F.cross_entropy))
    assert len(tries) == most_attempts_at_once(mechanism.release) < 200


def test_a_resumed_run_gets_no_fresh_attempts(monkeypatch):
    mechanism = make_mechanism(validation_noise=1.0, max_attempts=6)
    engine, _, _ = run(mechanism)
    rejecting(monkeypatch, False, False, False, True)
    next(engine.releases(F.cross_entropy))
    state = engine.state_dict()
    resumed, _, _ = run(mechanism)
    resumed.load_state_dict(state)
    rejecting(monkeypatch, False, False)
    with pytest.raises(GaveUpError):
        next(resumed.releases(F.cross_entropy))


def test_a_run_that_gave_up_stays_so_in_another_program_and_with_an_earlier_state(monkeypatch, tmp_path):
    mechanism = make_mechanism(validation_noise=1.0, max_attempts=6)
    engine = run(mechanism, seed=None)[0]
    engine.keep_in(tmp_path)
    before = engine.state_dict()
    rejecting(monkeypatch, *[False] * 6)
    with pytest.raises(GaveUpError):
        next(engine.releases(F.cross_entropy))
    engine.load_state_dict(before)
    with pytest.raises(GaveUpError):
        next(engine.releases(F.cross_entropy))  # no attempt: the list of decisions is used up
    engine.close()
    resumed = run(mechanism, seed=None)[0]
    resumed.load(tmp_path)
    with pytest.raises(GaveUpError):
        next(resumed.releases(F.cross_entropy))


def test_a_lost_release_is_charged_with_the_most_that_it_can_have_tried(monkeypatch):
    mechanism = make_mechanism(validation_noise=1.0, max_attempts=200)
    most = most_attempts_at_once(mechanism.release)
    assert 100 < most < 200
    engine, _, _ = run(mechanism)
    state = engine.state_dict()
    engine.load_state_dict(state, lost=1)
    executor = engine._executor
    assert isinstance(executor, SelectiveUpdates)
    assert executor._attempts_left == 200 - most
    engine.load_state_dict(state, lost=2)
    with pytest.raises(GaveUpError):
        next(engine.releases(F.cross_entropy))


def test_attempts_of_an_interrupted_release_are_forgotten(monkeypatch):
    """Nothing of them is shown, so they are not among the attempts that what is shown depends on."""
    engine, _, _ = run(make_mechanism(validation_noise=1.0, max_attempts=3))

    def interrupted(self: SelectiveUpdates, raw_change: float) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(SelectiveUpdates, "_passes", interrupted)
    for _ in range(5):
        with pytest.raises(KeyboardInterrupt):
            next(engine.releases(F.cross_entropy))
    rejecting(monkeypatch)
    assert list(engine.releases(F.cross_entropy)) == [1, 2, 3]


def test_a_ledger_without_a_cap_is_read_as_before():
    old = {name: value for name, value in make_mechanism().to_dict().items() if name != "max_attempts"}
    mechanism = DpsurMechanism.from_dict(old)
    assert mechanism.max_attempts is None
    assert mechanism.to_dict() == old, "a run that was begun with it could not be resumed"
    assert mechanism.accountants == ("rdp",)
    assert mechanism.epsilon_after(0, delta=1e-5, accountant="rdp") == 0
    capped = replace(mechanism, max_attempts=9)
    assert DpsurMechanism.from_dict(capped.to_dict()) == capped
    assert capped.accountants == ("pld", "rdp")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"options": {"threshold": -50.0}}, r"threshold=-50\.0 and validation_noise=1\.3 are not allowed together"),
        ({"options": {"threshold": -50.0}, "max_attempts": 10**6}, r"max_attempts=1000000 is not allowed"),
        ({"max_attempts": 30}, r"max_attempts=30 is not allowed: dpsur counts the attempts of the whole run"),
        ({"options": {"validation_noise": 0.01}}, r"threshold=-1\.0 and validation_noise=0\.01 are not allowed"),
        (
            {"options": {"validation_noise": 0.01, "threshold": 0.0}},
            r"validation_noise=0\.01 is not allowed: it is so small",
        ),
        ({"options": {"validation_noise": 0.01}, "noise_multiplier": 2.0, "max_attempts": 99}, "it is so small"),
        ({"options": {"validation_noise": 0.01, "threshold": 0.0, "account": "claimed"}}, "it is so small"),
    ],
)
def test_settings_that_cannot_end_or_prove_nothing_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        planned_mechanism(settings_from({"method": "dpsur", **settings}), dataset_size=1437)


def test_a_promise_without_a_cap_refuses_a_threshold_that_nothing_passes():
    with pytest.raises(InputError, match=r"threshold=-50\.0 is not allowed without max_attempts"):
        run(make_mechanism(validation_noise=1.0, threshold=-50.0))


def test_the_cap_on_attempts_is_a_setting():
    settings = settings_from({"method": "dpsur", "max_attempts": 500})
    mechanism = planned_mechanism(settings, dataset_size=1437)
    assert isinstance(mechanism, DpsurMechanism)
    assert mechanism.max_attempts == 500
    default = planned_mechanism(settings_from({"method": "dpsur"}), dataset_size=1437)
    assert isinstance(default, DpsurMechanism)
    assert default.max_attempts is not None
    assert default.max_attempts < 500
    assert default.noise_multiplier < mechanism.noise_multiplier


def test_a_budget_below_the_cost_of_selection_is_refused():
    settings = settings_from({"method": "dpsur", "epsilon": 0.05, "releases": 500})
    with pytest.raises(InputError, match=r"epsilon=0\.05 cannot be reached"):
        planned_mechanism(settings, dataset_size=1437)


def test_the_ablation_scales_globally():
    settings = settings_from({"method": "dpsur", "scaling": "global", "scaling_bound": 3.0, "noise_multiplier": 2.0})
    mechanism = planned_mechanism(settings, dataset_size=1437)
    assert isinstance(mechanism, DpsurMechanism)
    assert mechanism.scaling == GlobalScaling(max_grad_norm=1.0, bound=3.0)
    assert mechanism == DpsurMechanism.from_dict(mechanism.to_dict())
