"""Canaries in the real engine: what they do to a run, what is seen of them, and what must not change."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from sluice import Clip, ClippingBiasGate, GlobalScaling, PrivacyEngine, SelectiveRelease, TrainingOptions
from sluice._base.errors import InputError
from sluice.audit import Canaries
from sluice.audit.canaries import Attached, WithCanaries, blank, canary_norm, mislabelled
from sluice.audit.guesses import LIKELIHOOD
from sluice.experiments.settings import settings_from
from sluice.methods import planned_mechanism

DELTA = 1e-5
RECORDS = 60


def data():
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(RECORDS, 4, generator=generator), torch.arange(RECORDS) % 3)


def run(canaries, *, rate=0.5, releases=20, noise=2.0, source=None, **options):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    engine = PrivacyEngine(seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parts = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=source or data(),
        noise_multiplier=noise,
        max_grad_norm=1.0,
        releases=releases,
        sample_rate=rate,
        canaries=canaries,
        **options,
    )
    return engine, model, optimizer, parts


def test_the_divisor_is_fixed_by_the_number_of_canaries_not_by_their_coins():
    none, every = (Canaries(count=40, coins=bytes([byte] * 5)) for byte in (0, 255))
    sizes = {run(canaries)[0].mechanism.expected_batch_size for canaries in (none, every)}
    assert sizes == {0.5 * (RECORDS + 20)}


@pytest.mark.parametrize("kind", ["quiet", "loud"])
def test_a_canary_adds_its_full_length_to_its_own_coordinate_alone(kind):
    canaries = Canaries(count=40, kind=kind)
    engine, *_ = run(canaries, rate=1.0, releases=3, noise=1e-4)
    seen = []
    engine.auditing.observations.add = seen.append
    for _ in engine.releases(F.cross_entropy):
        pass
    np.testing.assert_allclose(seen, [canaries.members] * 3, atol=2e-3)


def test_weights_of_the_model_do_not_depend_on_white_box_canaries():
    """With every record in every batch, the noise is drawn alike and only the canaries' own coordinates differ."""
    weights = []
    for byte in (0, 255):
        engine, model, *_ = run(Canaries(count=16, kind="loud", coins=bytes([byte] * 2)), rate=1.0, noise=1e-9)
        for _ in engine.releases(F.cross_entropy):
            pass
        weights.append(model.weight.detach().clone())
    torch.testing.assert_close(*weights, rtol=0, atol=1e-6)


def test_quiet_canaries_are_not_noticed_by_the_gate():
    gate = ClippingBiasGate(gate_noise=1.0, reference_noise=1.0, small_norm=2.0, large_norm=4.0)
    mechanism = SelectiveRelease(
        sample_rate=0.5,
        expected_batch_size=10.0,
        scaling=GlobalScaling(bound=2.0),
        noise_multiplier=1.0,
        releases=1,
        gate=gate,
    )
    norms = torch.tensor([canary_norm(mechanism, kind) for kind in ("quiet", "loud")])
    assert gate.measure(norms).tolist() == [0.0, 1.0]
    lengths = norms * mechanism.scaling(norms)
    torch.testing.assert_close(lengths, torch.ones(2), rtol=0, atol=2e-4)


def test_an_ordinary_loop_sees_the_same_canaries():
    canaries = Canaries(count=40)
    engine, _, _, (model, optimizer, loader) = run(canaries, rate=1.0, releases=2, noise=1e-4)
    seen = []
    engine.auditing.observations.add = seen.append
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    np.testing.assert_allclose(seen, [canaries.members] * 2, atol=2e-3)
    engine.close()


class _OneByOne(Dataset):
    def __len__(self):
        return RECORDS

    def __getitem__(self, index):
        return data()[index]


def test_data_sets_that_are_read_record_by_record():
    canaries = Canaries(count=16)
    engine, *_ = run(canaries, rate=1.0, releases=1, noise=1e-4, source=DataLoader(_OneByOne(), batch_size=8))
    seen = []
    engine.auditing.observations.add = seen.append
    for _ in engine.releases(F.cross_entropy):
        pass
    np.testing.assert_allclose(seen, [canaries.members], atol=2e-3)


def test_reading_at_once_and_one_by_one_agree_and_ordinary_records_are_as_they_were():
    source, canaries = data(), Canaries(count=16, coins=b"\xf0\x0f")
    wrapped = WithCanaries(source, canaries)
    assert len(wrapped) == RECORDS + 8
    (x, numbers), y = wrapped.batch(torch.tensor([3, RECORDS, RECORDS + 7]))
    assert numbers.tolist() == [16, 0, 15]
    torch.testing.assert_close(x[0], source[3][0])
    assert not x[1:].any()
    for row, index in enumerate((3, RECORDS, RECORDS + 7)):
        (one, number), target = wrapped[index]
        torch.testing.assert_close(one, x[row])
        assert (int(number), int(target)) == (int(numbers[row]), int(y[row]))


@pytest.mark.parametrize("loss", [F.cross_entropy, F.mse_loss, nn.L1Loss()])
def test_the_length_of_a_canary_does_not_depend_on_the_loss(loss):
    attached = Attached(nn.Linear(4, 3), canaries=16)
    target = torch.zeros(1, dtype=torch.int64) if loss is F.cross_entropy else torch.zeros(1, 3)
    record = (torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64), target)
    attached.set_length(2.5, record, loss)
    loss(attached(*record[:-1]), target).backward()
    assert float(attached.canary.weight.grad[0]) == pytest.approx(2.5)
    assert not attached.base.weight.grad.any()


@pytest.mark.parametrize("every", [None, 3])
def test_a_resumed_run_has_seen_what_it_saw_before(tmp_path, every):
    """Whether releases are made again from the journal, or come with a checkpoint."""
    canaries = Canaries(count=40)
    first, *_ = run(canaries, releases=6)
    first.keep_in(tmp_path, every=every)
    releases = first.releases(F.cross_entropy)
    for _ in range(3):
        next(releases)
    first.close()
    second, *_ = run(canaries, releases=6)
    second.load(tmp_path)
    assert second.released == 3
    for name, expected in first.auditing.scores().items():
        np.testing.assert_allclose(second.auditing.scores()[name], expected, err_msg=name)


def test_the_optimizer_is_left_without_canary_weights():
    engine, model, optimizer, _ = run(Canaries(count=40), releases=1)
    for _ in engine.releases(F.cross_entropy):
        pass
    assert len(optimizer.param_groups[0]["params"]) == 3
    engine.close()
    assert len(optimizer.param_groups[0]["params"]) == 2
    assert set(optimizer.state) <= set(model.parameters())
    assert set(model.state_dict()) == {"weight", "bias"}


@pytest.mark.parametrize("method", ["dpsgd", "dpsr-cg", "dpsur", "dpis", "dpagd", "matrix"])
def test_every_method_that_releases_sums_can_be_audited(method):
    batches = {} if method == "dpagd" else {"batch_size": 20}
    settings = settings_from({"method": method, "releases": 3, "epsilon": 8.0, **batches})
    canaries = Canaries(count=32, kind="loud")
    mechanism = planned_mechanism(settings, dataset_size=RECORDS + canaries.expected)
    model = nn.Linear(4, 3)
    engine = PrivacyEngine(seed=0, accountant=mechanism.accountants[0])
    engine.make_private_by(
        mechanism,
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=data(),
        options=TrainingOptions(canaries=canaries),
    )
    for _ in engine.releases(F.cross_entropy):
        pass
    found = engine.audit(delta=DELTA)
    assert not found.refuted
    assert found.claimed == pytest.approx(engine.get_certified_epsilon(DELTA))
    assert (LIKELIHOOD in engine.auditing.scores()) == (method in ("dpsgd", "dpsr-cg", "dpsur"))


@pytest.mark.parametrize("kind", ["mislabelled", "blank"])
def test_canaries_that_are_inputs(kind):
    x, y = data().tensors
    records = mislabelled(x, y, classes=3) if kind == "mislabelled" else blank((4,), count=RECORDS, classes=3)
    if kind == "mislabelled":
        assert not (records[1] == y).any()
    engine, model, *_ = run(Canaries(count=RECORDS, kind=kind, records=records), releases=3)
    for _ in engine.releases(F.cross_entropy):
        pass
    found = engine.audit(delta=DELTA, claimed_epsilon=1.0)
    assert found.rehearsal
    assert found.bounds[0].score == "loss"
    assert set(model.state_dict()) == {"weight", "bias"}


def test_coins_are_fresh_and_not_shown():
    first, second = Canaries(count=64), Canaries(count=64)
    assert first.coins != second.coins
    assert "coins" not in repr(first)
    torch.manual_seed(0)
    again = Canaries(count=64)
    torch.manual_seed(0)
    assert again.coins != Canaries(count=64).coins


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"count": 15}, "canaries=15"),
        ({"count": 64, "kind": "shy"}, "kind='shy'"),
        ({"count": 64, "coins": b"x"}, "coins holds 1 bytes"),
        ({"count": 64, "kind": "blank"}, "records"),
        ({"count": 64, "records": (torch.zeros(64), torch.zeros(64))}, "records"),
    ],
)
def test_bad_canaries_are_refused(wrong, message):
    with pytest.raises(InputError, match=message):
        Canaries(**wrong)


def test_nothing_to_audit():
    engine, *_ = run(None, releases=1)
    with pytest.raises(InputError, match="nothing to audit"):
        engine.audit(delta=DELTA)


def test_records_that_cannot_be_blank_are_refused():
    class Words(Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return "word", 0

    with pytest.raises(InputError, match="holds a str"):
        WithCanaries(Words(), Canaries(count=16))


def test_clip_bound_is_the_length_of_a_quiet_canary():
    mechanism = SelectiveRelease(
        sample_rate=0.5, expected_batch_size=1.0, scaling=Clip(max_grad_norm=3.0), noise_multiplier=1.0, releases=1
    )
    assert canary_norm(mechanism, "quiet") == pytest.approx(3.0, rel=2e-4)
    assert canary_norm(mechanism, "loud") == 6.0
