"""Attacks from end to end on digits: models are trained once, resumed, and results stay where they may be."""

from __future__ import annotations

import json
import stat
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from sluice._base.errors import InputError
from sluice.cli import main
from sluice.experiments.attacks import cells, table
from sluice.experiments.attacks.carry_out import lira_attacks, shadow_logits
from sluice.experiments.attacks.cells import ModelCell, for_records
from sluice.experiments.attacks.pool import PoolSource, load_pool
from sluice.experiments.attacks.recipes import shadow_settings, target_settings
from sluice.experiments.attacks.request import AttackRequest, attacked_targets
from sluice.experiments.attacks.targets import half_target, target_of_run
from sluice.experiments.jobs import JobOptions, Lost
from sluice.experiments.preparing import prepare
from sluice.experiments.run import Training
from sluice.experiments.settings import settings_from

QUICK = {"releases": 2}


def request(attack, work, **changed):
    return AttackRequest(**{"attack": attack, "dataset": "digits", "changes": QUICK, "work": work, **changed})


def test_members_are_exactly_the_records_that_a_target_was_trained_on(tmp_path, monkeypatch):
    seen = []
    original = cells.Training
    monkeypatch.setattr(
        cells, "Training", lambda *, splits, **others: (seen.append(splits), original(splits=splits, **others))[1]
    )
    ((target, attacks),) = attacked_targets(request("loss", tmp_path))
    assert len(seen) == 1
    pool = load_pool(target.source)
    np.testing.assert_array_equal(seen[0].train.inputs, pool.examples.subset(target.members).inputs)
    assert set(target.members.tolist()).isdisjoint(target.non_members.tolist())
    assert [attack.name for attack in attacks] == ["loss", "gap"]
    gap = attacks[1].evaluation.balanced_accuracy
    train, test = target.accuracy_on(target.members), target.accuracy_on(target.non_members)
    assert gap == pytest.approx(0.5 + (train - test) / 2)
    list(attacked_targets(request("loss", tmp_path)))
    assert len(seen) == 1  # the model was kept


def test_shadow_models_are_kept_and_an_interrupted_command_trains_only_the_rest(tmp_path, monkeypatch):
    settings = target_settings("digits", method="non-private", epsilon=None, seed=0, changes=QUICK)
    source = PoolSource(dataset="digits", records=300)
    target = half_target(source, settings, seed=0, number=0, work=tmp_path)
    trained = []
    original = cells._train

    def failing(cell, work):
        if len(trained) == 2:
            raise KeyboardInterrupt
        trained.append(cell.name)
        original(cell, work)

    monkeypatch.setattr(cells, "_train", failing)
    with pytest.raises(KeyboardInterrupt):
        shadow_logits(target, shadows=4, kind="same", seed=0, work=tmp_path)
    monkeypatch.setattr(cells, "_train", lambda cell, work: (trained.append(cell.name), original(cell, work)))
    found = shadow_logits(target, shadows=4, kind="same", seed=0, work=tmp_path)
    assert len(trained) == len(set(trained)) == 4
    assert found.logits.shape == (4, 300, 10)
    assert len({logits.tobytes() for logits in found.logits}) == 4
    assert [attack.name for attack in lira_attacks(target, found)] == [
        *("lira online, pooled", "lira online, per-record"),
        *("lira offline, pooled", "lira offline, per-record"),
    ]


def test_private_shadow_models_have_the_targets_settings_but_not_its_noise():
    target = target_settings("fashion-mnist", method="dpsgd", epsilon=1.0, seed=0)
    same, ordinary = (shadow_settings(target, kind=kind, seed=0) for kind in ("same", "ordinary"))
    assert (same.method, same.epsilon, same.lr) == ("dpsgd", 1.0, target.lr)
    assert same.seed != target.seed
    assert (ordinary.method, ordinary.model, ordinary.activation) == ("non-private", target.model, target.activation)
    assert for_records(target, records=30_000, made_for=60_000).batch_size == target.batch_size / 2
    assert for_records(ordinary, records=30_000, made_for=60_000) == ordinary


@pytest.mark.parametrize("method", ["non-private", "dpsgd", "dpsr-cg"])
@pytest.mark.parametrize("model", ["pixel-cnn", "mlp"])
def test_targets_see_pixels_whatever_their_net(method, model):
    target = target_settings("fashion-mnist", method=method, epsilon=3.0, seed=0, changes={"model": model})
    assert (target.model, target.features) == (model, "plain")
    asked = target_settings("fashion-mnist", method=method, epsilon=3.0, seed=0, changes={"features": "scattering"})
    assert asked.features == "scattering"


def test_a_run_on_own_data_is_attacked_with_its_own_labels(tmp_path):
    rows = [f"{3 * (i % 2) + i / 1000},{('no', 'yes')[i % 2]},{i}" for i in range(80)]
    (tmp_path / "own.csv").write_text("\n".join(["a,said,b", *rows]) + "\n")
    settings = settings_from(
        {
            "dataset": str(tmp_path / "own.csv"),
            "target": "said",
            "class_names": "yes,no",
            "method": "dpsgd",
            "releases": 2,
            "noise_multiplier": 2.0,
            "seed": 1,
            "batch_size": 20,
        }
    )
    splits = prepare(settings, show_progress=False)
    Training(settings=settings, splits=splits).start(tmp_path / "run")
    target = target_of_run(tmp_path / "run", data_dir=None)
    assert target.pool.classes == ("yes", "no")
    np.testing.assert_array_equal(target.pool.labels[target.members], splits.train.labels)


def test_only_public_data_sets_are_attacked_outside_a_run(tmp_path):
    with pytest.raises(InputError, match="Attack a run of it"):
        AttackRequest(attack="loss", dataset=str(tmp_path / "own.npz"))
    with pytest.raises(InputError, match="exactly one"):
        AttackRequest(attack="loss")
    with pytest.raises(InputError, match="shadow attack"):
        AttackRequest(attack="shadow", run=tmp_path)
    with pytest.raises(InputError, match="targets=2"):
        AttackRequest(attack="white-box", dataset="digits", targets=2)


@pytest.mark.parametrize(
    "command", ["shadow --shadow-method same --epochs 1", "white-box --epochs 1", "rmia --shadows 2"]
)
def test_commands_write_results_of_public_data(command, tmp_path, capsys):
    places = f"--results {tmp_path / 'results'} --work {tmp_path / 'work'}"
    arguments = f"attack --attacks {command} --dataset digits --set releases=2 --method dpsgd {places} --json"
    with pytest.raises(SystemExit) as end:
        main(arguments.split())
    assert not end.value.code
    (payload,) = json.loads(capsys.readouterr().out)["targets"]
    assert payload["proved_epsilon"] == pytest.approx(3.0, abs=0.01)
    assert payload["private"] is False
    assert {"loss", "gap"} < set(payload["attacks"])
    (stored,) = (tmp_path / "results").glob("*.json")
    assert json.loads(stored.read_text())["attacks"] == payload["attacks"]
    if command.startswith("white-box"):
        with pytest.raises(SystemExit):
            main(arguments.replace("releases=2", "releases=3").split())
        assert len(list((tmp_path / "results").glob("*.json"))) == 2  # other settings replace nothing


def test_results_on_a_run_stay_private(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train = "train --dataset digits --noise-multiplier 3 --batch-size 64 --releases 2 --seed 1 --run run"
    for command in (train, "attack runs/run"):
        with pytest.raises(SystemExit) as end:
            main(command.split())
        assert not end.value.code
    assert "PRIVATE" in capsys.readouterr().out
    written = tmp_path / "runs" / "run" / "private" / "attacks" / "loss.json"
    found = json.loads(written.read_text())
    assert (found["members"], found["non_members"]) == (1437, 360)
    assert stat.S_IMODE(written.stat().st_mode) == 0o600
    with pytest.raises(SystemExit):
        main(["attack", "runs/run", "--json"])
    (payload,) = json.loads(capsys.readouterr().out)["targets"]
    assert payload["private"] is True
    with pytest.raises(SystemExit):
        main(f"attack runs/run --results {tmp_path}".split())
    assert "private" in capsys.readouterr().err


def test_several_attacks_share_a_command(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main(
            f"attack --attacks loss,lira --shadows 2 --dataset digits --set releases=2 --work {tmp_path} --json".split()
        )
    assert not end.value.code
    found = json.loads(capsys.readouterr().out)["targets"]
    assert [payload["attack"] for payload in found] == ["loss", "lira"]
    assert ["shadows" in payload for payload in found] == [False, True]
    assert found[0]["attacks"]["loss"] == found[1]["attacks"]["loss"]  # the same target


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("--dataset digits --attacks guess", "attacks='guess'"),
        ("--dataset digits --shadows 4", "shadows=4 has no effect: only lira, rmia"),
        ("--dataset digits --attacks lira --epochs 4", "epochs=4 has no effect: only shadow, white-box"),
        ("runs/run --method dpsgd", "method='dpsgd' is not allowed with RUN"),
        ("", "exactly one"),
    ],
)
def test_what_an_attack_would_not_read_is_refused(wrong, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(f"attack {wrong}".split())
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_cells_of_other_workers_are_stored_here_and_lost_ones_say_so(tmp_path, monkeypatch):
    base = AttackRequest(attack="loss", dataset="digits")
    asked = {"datasets": ["digits"], "methods": ["non-private", "dpsgd"], "attacks": ["white-box"]}
    first, second = table.plan_attacks(base, epsilons=[1.0], seeds=[0], **asked)
    result = {"attacks": {}, "train_accuracy": 0.5}

    def elsewhere(function, cells, options):
        assert options == JobOptions(backend="dask")
        assert list(cells) == [first, second]
        yield first, (result, "")
        yield second, Lost(reason="its worker died 4 times")

    monkeypatch.setattr(table, "run_jobs", elsewhere)
    found = list(table.run_cells([first, second], tmp_path, JobOptions(backend="dask")))
    assert found == [(first, result, ""), (second, None, "failed: its worker died 4 times")]
    assert table.stored_cell(tmp_path, first) == result
    assert table.stored_cell(tmp_path, second) is None


def test_a_model_that_another_process_trains_is_waited_for(tmp_path, monkeypatch):
    """Two cells of a table may need the same shadow model; it is trained once."""
    settings = target_settings("digits", method="non-private", epsilon=None, seed=0, changes=QUICK)
    cell = ModelCell(source=PoolSource(dataset="digits", records=60), settings=settings, inside=np.arange(60) < 30)
    trained = []

    def train(cell, work, pool, run):
        trained.append(cell)
        time.sleep(0.1)
        np.save(run.parent / "logits.npy", np.zeros(1))

    monkeypatch.setattr(cells, "_train_alone", train)
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda _: cells._train(cell, tmp_path), range(3)))
    assert len(trained) == 1


def test_reproduce_attacks_writes_a_table_and_uses_stored_cells(tmp_path, capsys):
    places = f"--results {tmp_path / 'results'} --work {tmp_path / 'work'}"
    asked = f"reproduce attacks --datasets digits --methods non-private --attacks white-box --set releases=2 {places}"
    for extra in ("", " --no-run --methods dpsgd --epsilons 1"):
        with pytest.raises(SystemExit) as end:
            main((asked + extra).split())
        assert not end.value.code
    table = (tmp_path / "results" / "table.md").read_text()
    assert "| digits | non-private |  | white-box | 1 |" in table
    assert "| digits | dpsgd | 1 | white-box | not run |" in table
    assert "1 of 2 cells are stored, 0 to run" in capsys.readouterr().err
