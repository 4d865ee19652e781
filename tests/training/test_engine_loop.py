"""The ordinary loop, and its misuse: each refused with a message that says what to do."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sluice._base.errors import InputError
from sluice.mechanism.gates import ClippingBiasGate, CoinGate
from sluice.training.engine import PrivacyEngine
from sluice.training.selective_release import GaveUpError
from small_runs import GATE, RECORDS, Run, blobs


def test_schedulers_advance_by_release():
    run = Run(gate=GATE, lr_scheduler=lambda inner: torch.optim.lr_scheduler.StepLR(inner, 4, 0.5)).loop()
    assert run.inner.param_groups[0]["lr"] == 0.5 * 0.5**3


def test_a_scheduler_that_moves_without_a_release_is_refused():
    run = Run(gate=GATE, max_physical_batch_size=8)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.9)

    def train() -> None:
        for batch in run.loader:
            run.step(batch)
            scheduler.step()

    with pytest.raises(InputError, match=r"make_private\(lr_scheduler=...\)"):
        train()


def test_without_a_gate_a_scheduler_of_ones_own_is_fine():
    run = Run()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.9)
    for batch in run.loader:
        run.step(batch)
        scheduler.step()
    assert run.inner.param_groups[0]["lr"] == pytest.approx(0.5 * 0.9**12)


def test_the_loop_ends_by_itself_and_nothing_goes_beyond_the_budget():
    run = Run(releases=5).loop()
    assert run.engine.released == 5
    assert list(run.loader) == []
    with pytest.raises(InputError, match="all releases=5 of this run are made"):
        run.engine._running().draw()


def test_epochs_end_the_loader_after_each_pass():
    run = Run(releases=None, epochs=3)
    per_epoch = math.ceil(1 / 0.3)
    for epoch in range(1, 4):
        run.loop()
        assert run.engine.released == epoch * per_epoch
    assert list(run.loader) == []


def test_the_loader_tells_its_public_numbers():
    run = Run(releases=None, epochs=3, sample_rate=None, data=DataLoader(blobs(), batch_size=30))
    assert (len(run.loader), run.loader.batch_size, run.loader.sample_rate) == (4, 30, 0.25)
    assert len(run.loader.dataset) == RECORDS


@pytest.mark.parametrize("options", [{}, {"gate": CoinGate(probability=0.4)}, {"max_physical_batch_size": 7}])
def test_step_hooks_are_called_once_for_each_release(options):
    run = Run(releases=5, **options)
    called = []
    run.optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: called.append("before"))
    handle = run.optimizer.register_step_post_hook(lambda optimizer, args, kwargs: called.append("after"))
    for batch in run.loader:
        run.step(batch)
        if called.count("after") == 4:
            handle.remove()
    assert called == ["before", "after"] * 4 + ["before"]


def test_state_dict_hooks_are_those_of_the_users_optimizer():
    run = Run()
    called = []
    run.optimizer.register_state_dict_pre_hook(lambda optimizer: called.append("saving"))
    run.optimizer.register_state_dict_post_hook(lambda optimizer, state: called.append("saved"))
    run.optimizer.register_load_state_dict_pre_hook(lambda optimizer, state: called.append("loading"))
    run.optimizer.register_load_state_dict_post_hook(lambda optimizer: called.append("loaded"))
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    assert called == ["saving", "saved", "loading", "loaded"]


def test_an_attempt_cap_stops_the_run():
    run = Run(gate=ClippingBiasGate(gate_noise=0.3, beta=3.0, reference_noise=4.0, small_norm=0.0, max_attempts=1))
    with pytest.raises(GaveUpError, match="max_attempts=1"):
        run.loop()
    assert run.engine.released < 12


def test_a_module_may_be_called_several_times_for_one_batch():
    """A discriminator, on records and on made-up samples; a generator is trained through it in evaluation mode."""
    run = Run(releases=3)
    generator = nn.Linear(2, 4)
    for x, _ in run.loader:
        made_up = generator(torch.randn(len(x), 2))
        loss = F.softplus(-run.model(x)[:, 0]).mean() + F.softplus(run.model(made_up.detach())[:, 0]).mean()
        loss.backward()
        run.optimizer.step()
        with pytest.raises(InputError, match="a generator by its discriminator"):
            run.model(made_up)
        run.model.eval()
        run.model(generator(torch.randn(run.loader.batch_size, 2)))[:, 0].mean().backward()
        run.model.train()
    assert run.engine.released == 3
    assert generator.weight.grad is not None


def test_stepping_twice_is_refused():
    run = Run()
    batch = next(iter(run.loader))
    run.step(batch)
    with pytest.raises(InputError, match="each batch of the loader allows one step"):
        run.optimizer.step()


def test_a_second_backward_is_refused():
    run = Run()
    x, y = next(iter(run.loader))
    loss = F.cross_entropy(run.model(x), y)
    loss.backward(retain_graph=True)
    with pytest.raises(InputError, match=r"backward\(\) ran twice"):
        loss.backward()


def test_a_step_before_backward_is_refused():
    run = Run()
    x, _ = next(iter(run.loader))
    run.model(x)
    with pytest.raises(InputError, match=r"before loss.backward\(\)"):
        run.optimizer.step()


def test_other_data_than_the_batch_is_refused():
    run = Run()
    x, _ = next(iter(run.loader))
    with pytest.raises(InputError, match="another number of samples"):
        run.model(x[:-1])


def test_an_unwatched_copy_is_refused():
    run = Run()
    x, y = next(iter(run.loader))
    F.cross_entropy(copy.deepcopy(run.model)(x), y).backward()
    with pytest.raises(InputError, match="saw no forward pass of the private module"):
        run.optimizer.step()


def test_a_skipped_batch_is_refused():
    run = Run()
    batches = iter(run.loader)
    next(batches)
    with pytest.raises(InputError, match="a batch of the loader was not used"):
        next(batches)


def test_evaluation_in_training_mode_is_refused_and_in_evaluation_mode_is_free():
    run = Run()
    batches = iter(run.loader)
    run.step(next(batches))
    with pytest.raises(InputError, match=r"call model.eval\(\)"):
        run.model(torch.zeros(2, 4))
    with torch.no_grad():
        run.model(torch.zeros(2, 4))
    run.model.eval()
    run.model(torch.zeros(2, 4))
    run.model.train()
    run.step(next(batches))


@pytest.mark.parametrize("how", ["in place", "data", "assignment"])
def test_a_parameter_changed_by_hand_is_refused(how):
    run = Run()
    batches = iter(run.loader)
    run.step(next(batches))
    weight = run.model[0].weight
    if how == "in place":
        with torch.no_grad():
            weight.add_(0.25)
    elif how == "data":
        weight.data.mul_(1.5)
    else:
        weight.data = weight.data * 1.5
    with pytest.raises(InputError, match=r"parameter '0.weight' was changed by hand"):
        run.step(next(batches))
    run.engine.accept_weights()


def test_a_closure_is_refused():
    with pytest.raises(InputError, match=r"step\(closure\) is not allowed"):
        Run().optimizer.step(lambda: None)


def partly_frozen() -> tuple[PrivacyEngine, nn.Sequential, torch.optim.Optimizer, Iterable[list[torch.Tensor]]]:
    """A run whose first layer is frozen, though the optimizer holds it, and whose releases are next to nothing but noise."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    x, y = torch.randn(64, 4), torch.arange(64) % 2
    F.cross_entropy(model(x), y).backward()  # gradients of private records, which nobody cleared
    model[0].requires_grad_(False)
    engine = PrivacyEngine()
    _, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=TensorDataset(x, y),
        sample_rate=1.0,
        noise_multiplier=1000.0,
        max_grad_norm=1e-6,
        releases=3,
    )
    return engine, model, optimizer, loader


@pytest.mark.parametrize("loop", ["own", "engine"])
def test_a_gradient_that_a_frozen_parameter_holds_is_not_applied(loop):
    engine, model, optimizer, loader = partly_frozen()
    before = model[0].weight.clone()
    if loop == "engine":
        list(engine.releases(F.cross_entropy))
    else:
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert torch.equal(model[0].weight, before)


def test_a_parameter_that_was_unfrozen_is_refused_and_never_moved():
    _, model, optimizer, loader = partly_frozen()
    x, y = next(iter(loader))
    before = model[0].weight.detach().clone()
    model[0].requires_grad_(True)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(InputError, match=r"parameter '0.weight' was frozen when training began"):
        optimizer.step()
    assert torch.equal(model[0].weight, before)


def test_a_frozen_parameter_changed_by_hand_is_refused():
    engine, model, _, _ = partly_frozen()
    with torch.no_grad():
        model[0].weight.add_(0.25)
    with pytest.raises(InputError, match=r"parameter '0.weight' was changed by hand"):
        next(engine.releases(F.cross_entropy))
    engine.accept_weights()
    next(engine.releases(F.cross_entropy))


def often_empty(**options: object) -> Run:
    """Batches of one record or two on average: every fourth or so is empty."""
    return Run(releases=40, sample_rate=1.5 / RECORDS, **options)


def test_a_schedule_that_goes_by_turns_of_the_loop_is_refused_where_batches_may_be_empty():
    """Empty batches are released without a turn, so that the learning rate would tell how many there were."""
    run = often_empty()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.9)
    turns = iter(run.loader)
    run.step(next(turns))
    scheduler.step()
    with pytest.raises(InputError, match="Batches of this run are so small that one may be empty"):
        for batch in turns:
            run.step(batch)


def test_schedules_by_epoch_and_of_the_engine_are_fine_where_batches_may_be_empty():
    run = often_empty(lr_scheduler=lambda inner: torch.optim.lr_scheduler.StepLR(inner, 10, 0.5)).loop()
    assert run.inner.param_groups[0]["lr"] == 0.5 * 0.5**4
    run = Run(releases=None, epochs=2, sample_rate=1.5 / RECORDS)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.9)
    for _ in range(2):
        run.loop()
        scheduler.step()
    assert run.loader.finished


def test_weights_changed_by_hand_are_refused_before_an_empty_batch_too():
    run = Run(releases=3, sample_rate=1e-9)
    with torch.no_grad():
        run.model[0].weight.add_(0.25)
    with pytest.raises(InputError, match="was changed by hand"):
        list(run.loader)


@pytest.mark.parametrize("when", ["before a step", "after a step"])
@pytest.mark.parametrize("gate", [GATE, None])
def test_the_rest_of_a_batch_is_not_released_where_a_state_is_loaded(gate, when):
    # It went on with neither the first part of the batch nor its gate.
    run = Run(gate=gate, max_physical_batch_size=8, sample_rate=0.5)
    state, executor = run.engine.state_dict(), run.engine._running()
    pieces = iter(run.loader)
    for piece in pieces:
        if when == "after a step":
            run.step(piece)
        if not run.loader.last_piece and executor.still_possible:
            break
    run.engine.load_state_dict(state)
    released, before = run.engine.released, run.weights()
    if when == "before a step":
        run.step(piece)
    given_up = run.loader.batch
    assert torch.equal(run.weights(), before)
    assert run.engine.released == released
    run.step(next(pieces))
    assert run.loader.batch > given_up  # a piece of a new batch
    for piece in pieces:
        run.step(piece)
    assert executor.done
