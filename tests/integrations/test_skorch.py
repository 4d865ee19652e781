from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

skorch = pytest.importorskip("skorch", reason="needs pip install 'sluice[skorch]'")

from sklearn.base import clone  # noqa: E402
from skorch.helper import predefined_split  # noqa: E402
from torch import nn  # noqa: E402

from sluice._base.errors import InputError  # noqa: E402
from sluice.integrations import Privacy  # noqa: E402
from sluice.integrations.privacy import Plan  # noqa: E402
from sluice.integrations.skorch import (  # noqa: E402
    PrivateBinaryClassifier,
    PrivateClassifier,
    PrivateNet,
    PrivateRegressor,
)
from sluice.runs.ledger import read_ledger  # noqa: E402

Y = np.arange(60) % 3
X = (np.random.default_rng(5).normal(size=(60, 4)) + Y[:, None]).astype(np.float32)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def budget(**fields) -> Privacy:
    return Privacy(
        **{"noise_multiplier": 1.0, "delta": 1e-3, "max_grad_norm": 1.0, "accountant": "rdp", "seed": 3, **fields}
    )


def net(kind=PrivateClassifier, **settings):
    defaults = {
        "criterion": nn.CrossEntropyLoss,
        "lr": 0.5,
        "batch_size": 20,
        "max_epochs": 4,
        "verbose": 0,
        "privacy": budget(),
    }
    return kind(settings.pop("module", None) or model(), **{**defaults, **settings})


def weights(found) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in found.module_.parameters()])


def test_fit_makes_the_releases_of_its_epochs():
    found = net().fit(X, Y)
    engine = found.privacy_engine_
    assert engine.released == 12
    assert engine.get_certified_epsilon(1e-3) == engine.get_epsilon(1e-3)
    assert found.predict(X).shape == (60,)
    assert "train_loss" not in found.history[-1]

    plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    data = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    other = budget().engine(data, Plan(module=plain, optimizer=optimizer, batch_size=20, releases=12))
    for _ in other.releases(nn.functional.cross_entropy):
        pass
    assert torch.allclose(weights(found), torch.cat([p.detach().flatten() for p in plain.parameters()]), atol=1e-6)


@pytest.mark.parametrize("seed", [3, None])
def test_a_run_resumes_from_its_folder(tmp_path, seed):
    class Stop(skorch.callbacks.Callback):
        def on_batch_end(self, net, training, **_):
            if training and net.privacy_engine_.released == 5:
                raise KeyboardInterrupt

    settings = {"privacy": budget(seed=seed), "private_folder": tmp_path}
    first = net(callbacks=[Stop()], **settings).fit(X, Y)
    assert first.privacy_engine_.released == 5
    first.privacy_engine_.close()
    second = net(**settings).fit(X, Y)
    second.privacy_engine_.close()
    assert second.privacy_engine_.released == 12
    assert read_ledger(tmp_path / "ledger.jsonl").spent == 12
    if seed is not None:
        assert torch.equal(weights(second), weights(net().fit(X, Y)))


def test_schedulers_and_validation_of_skorch_work():
    schedule = skorch.callbacks.LRScheduler(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5, step_every="batch")
    split = predefined_split(skorch.dataset.Dataset(X[48:], Y[48:]))
    found = net(callbacks=[schedule], train_split=split, batch_size=24).fit(X[:48], Y[:48])
    assert found.privacy_engine_.released == 8
    assert found.optimizer_.param_groups[0]["lr"] == pytest.approx(0.5 * 0.5**8)
    assert "valid_loss" in found.history[-1]


@pytest.mark.parametrize("kind", [PrivateNet, PrivateClassifier, PrivateBinaryClassifier, PrivateRegressor])
def test_all_records_are_trained_on_unless_others_are_set_apart(kind):
    """Folds of one's own data move many records when one is added."""
    assert kind(model(), criterion=nn.MSELoss).train_split is None
    with pytest.raises(InputError, match="adding one record moves others"):
        net(train_split=skorch.dataset.ValidSplit(5)).fit(X, Y)


def test_how_long_epochs_took_is_not_kept(capsys):
    found = net(verbose=1).fit(X, Y)
    assert "dur" not in found.history[-1]
    assert "dur" not in capsys.readouterr().out


def test_dict_inputs_and_regression():
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(4, 1), nn.Linear(2, 1)

        def forward(self, first, second):
            return self.one(first) + self.other(second)

    inputs = {"first": X, "second": X[:, :2].copy()}
    target = Y[:, None].astype(np.float32)
    found = net(PrivateRegressor, module=Sum(), criterion=nn.MSELoss).fit(inputs, target)
    assert found.privacy_engine_.released == 12
    assert found.predict(inputs).shape == (60, 1)


def test_a_copy_predicts_and_does_not_train():
    found = net().fit(X, Y)
    copy = pickle.loads(pickle.dumps(found))
    assert (copy.predict(X) == found.predict(X)).all()
    with pytest.raises(InputError, match="privacy=None"):
        copy.partial_fit(X, Y)


def test_parameters_are_known_to_searches():
    assert clone(net()).privacy == budget()
    assert net().get_params()["private_folder"] is None


def test_more_epochs_than_promised_are_refused():
    found = net(max_epochs=1).fit(X, Y)
    with pytest.raises(InputError, match="all releases of max_epochs=1 are made"):
        found.partial_fit(X, Y)


def test_a_net_without_a_budget_is_refused():
    with pytest.raises(InputError, match="privacy=None"):
        net(PrivateNet, privacy=None).fit(X, Y)
