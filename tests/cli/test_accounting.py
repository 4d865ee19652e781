from __future__ import annotations

import json
import math
import re

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from sluice import PrivacyEngine
from sluice.cli import main
from sluice.cli.attack import _proved
from sluice.experiments.settings import settings_from
from sluice.mechanism.thinning import ThinningGate
from sluice.methods import planned_mechanism

SETTING = [
    "--dataset-size",
    "60000",
    "--batch-size",
    "1024",
    "--noise-multiplier",
    "2",
    "--releases",
    "2000",
    "--delta",
    "1e-5",
]
GATE = ["--gate-noise", "1", "--reference-noise", "10"]
PLAN = [
    "--dataset-size",
    "60000",
    "--batch-size",
    "600",
    "--releases",
    "300",
    "--epsilon",
    "1",
    "--delta",
    "1e-5",
    "--accountant",
    "rdp",
]


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    captured = capsys.readouterr()
    return stop.value.code, captured.out, captured.err


def test_epsilon_as_json_gives_the_published_figures(capsys):
    """Those of docs/accounting.md, section 7, and what rounding is charged beside them."""
    code, out, _ = run(capsys, "epsilon", *SETTING, *GATE, "--small-norm", "1", "--json")
    figures = json.loads(out)
    assert code == 0
    shown = {name: f"{figures[name]:.3f}" for name in ("pld", "rdp", "plain_pld", "plain_rdp", "paper_rdp")}
    assert shown == {"pld": "1.665", "rdp": "1.820", "plain_pld": "1.621", "plain_rdp": "1.772", "paper_rdp": "2.368"}
    assert "claimed" in figures["meanings"]["paper_rdp"]


def test_epsilon_as_text_says_what_each_figure_means(capsys):
    code, out, _ = run(capsys, "epsilon", *SETTING, *GATE)
    assert code == 0
    assert "1.68" in out
    assert "claimed (paper)" in out
    assert "between gradient norms of 9.9 (--small-norm) and 11 (--large-norm)" in out


TRAINED = [
    (256, {"gate_noise": 1.0}, ["--gate-noise", "1", "--small-norm", "1"]),
    (1200, {"gate_noise": 6.0, "scaling_bound": 8.0}, ["--gate-noise", "6", "--small-norm", "8"]),
    (1200, {"gate_noise": 6.0, "scaling_bound": 20.0, "reference_noise": 30.0}, ["--gate-noise", "6", "--reference-noise", "30"]),
    (
        600,
        {"gate_noise": 1.0, "scaling": "clip", "max_grad_norm": 0.5, "large_norm": 2.0, "beta": 1.0},
        ["--gate-noise", "1", "--small-norm", "0.5", "--large-norm", "2", "--beta", "1"],
    ),
    (256, {"gate": "thinning", "strength": 4.0}, ["--strength", "4", "--small-norm", "1"]),
    (256, {"gate": "thinning", "strength": -1.0, "scaling_bound": 3.0}, ["--strength", "-1", "--small-norm", "3"]),
    (256, {"gate": "none"}, []),
]  # fmt: skip


@pytest.mark.parametrize(("batch", "settings", "options"), TRAINED)
def test_epsilon_and_plan_say_what_train_certifies(capsys, batch, settings, options):
    """To the last bit, what rounding may do to the gate included."""
    common = ["--dataset-size", "1437", "--batch-size", str(batch), "--releases", "40", "--delta", "1e-5", "--json"]
    asked = {"releases": 40, "batch_size": batch, **settings}
    trained = planned_mechanism(settings_from({**asked, "noise_multiplier": 1.5}), dataset_size=1437)
    told = json.loads(run(capsys, "epsilon", *common, "--noise-multiplier", "1.5", *options)[1])
    assert told["pld"] == trained.epsilon_after(40, delta=1e-5, accountant="pld")
    assert told["rdp"] == trained.epsilon_after(40, delta=1e-5, accountant="rdp")

    trained = planned_mechanism(settings_from({**asked, "epsilon": 6.0, "accountant": "rdp"}), dataset_size=1437)
    gate = options or ["--no-gate"]
    told = json.loads(run(capsys, "plan", *common, "--epsilon", "6", "--accountant", "rdp", *gate)[1])
    assert told["noise_multiplier"] == trained.noise_multiplier
    assert told["rdp"] == trained.epsilon_after(40, delta=1e-5, accountant="rdp")
    if trained.gate is not None and not trained.gate.thins:
        assert (told["gate_noise"], told["reference_noise"]) == (trained.gate.gate_noise, trained.gate.reference_noise)


def test_without_a_norm_no_gate_costs_more_than_epsilon_says(capsys):
    """A run whose norms nobody has told yet is charged for the steepest metric that any may have."""
    told = json.loads(run(capsys, "epsilon", *SETTING, *GATE, "--json")[1])["rdp"]
    trained = [
        json.loads(run(capsys, "epsilon", *SETTING, *GATE, "--json", "--small-norm", bound)[1])["rdp"]
        for bound in ("0", "1", "8", "9.9", "100")
    ]
    assert sorted(trained) == trained
    assert trained[0] < trained[2] < trained[-1] == told


@pytest.mark.parametrize("strength", [1.0, -0.5])
def test_epsilon_says_what_a_loop_of_ones_own_over_a_mean_costs(capsys, strength):
    model = torch.nn.Linear(3, 2)
    data = TensorDataset(torch.zeros(400, 3), torch.zeros(400, dtype=torch.long))
    engine = PrivacyEngine(seed=0)
    engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=40),
        noise_multiplier=1.5,
        max_grad_norm=0.7,
        releases=20,
        gate=ThinningGate(strength=strength, large_norm=2.0),
        max_physical_batch_size=16,
    )
    sizes = [
        "--dataset-size",
        "400",
        "--batch-size",
        "40",
        "--noise-multiplier",
        "1.5",
        "--releases",
        "20",
        "--delta",
        "1e-5",
    ]
    gate = ["--strength", str(strength), "--small-norm", "0.7", "--large-norm", "2"]
    told = json.loads(run(capsys, "epsilon", *sizes, *gate, "--moved-records", "16", "--json")[1])
    assert told["pld"] == engine.mechanism.epsilon_after(20, delta=1e-5, accountant="pld")
    assert json.loads(run(capsys, "epsilon", *sizes, *gate, "--json")[1])["pld"] < told["pld"]
    assert "It may move 1 of the other records" in run(capsys, "epsilon", *sizes, *gate)[1]


def test_epsilon_without_a_gate_is_plain(capsys):
    _, out, _ = run(capsys, "epsilon", *SETTING, "--json")
    figures = json.loads(out)
    assert figures["pld"] == figures["plain_pld"]
    assert figures["paper_rdp"] is None
    assert figures["gate"] is None


def test_a_reference_without_noise_of_its_own_is_inf_in_strict_json(capsys):
    _, out, _ = run(capsys, "epsilon", *SETTING, "--gate-noise", "1", "--reference-noise", "inf", "--json")
    figures = json.loads(out)
    assert figures["gate"]["reference_noise"] == "inf"
    assert 1.772 < figures["rdp"] < 1.8  # the reference is free; what rounding may do to the gate is not


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*SETTING[:2], "--batch-size", "70000", *SETTING[4:]], "batch_size=70000"),
        ([*SETTING[:-1], "2"], "delta=2.0"),
        ([*SETTING, "--reference-noise", "5"], "--gate-noise"),
        ([*SETTING, "--small-norm", "5"], "--small-norm describes a gate"),
        ([*SETTING, *GATE, "--small-norm", "-1"], "small_norm=-1"),
        ([*SETTING, *GATE, "--moved-records", "8"], "--moved-records is not allowed without --strength"),
        ([*SETTING, "--gate-noise", "0.001"], "Raise the gate's noise"),
        ([*SETTING, *GATE, "--max-attempts", "3"], "Raise max_attempts"),
    ],
)
def test_bad_numbers_end_in_one_message_and_code_2(capsys, arguments, message):
    code, out, err = run(capsys, "epsilon", *arguments)
    assert code == 2
    assert out == ""
    assert message in err
    assert len(err.strip().splitlines()) <= 2


def test_plan_as_json_keeps_its_target_and_writes_no_file(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(capsys, "plan", *PLAN, "--json")
    plan = json.loads(out)
    assert code == 0
    assert plan["epsilon"] <= 1.0
    assert plan["rdp"] == pytest.approx(plan["epsilon"])
    assert plan["noise_multiplier"] > plan["plain_noise_multiplier"]
    assert plan["gate_noise"] > 0
    assert list(tmp_path.iterdir()) == []


def test_plan_draws_on_the_terminal_and_into_a_file(capsys, tmp_path):
    code, out, _ = run(capsys, "plan", *PLAN, "--plot", str(tmp_path / "deep" / "picture.svg"))
    assert code == 0
    assert "300 releases" in out
    assert "claimed (paper)" in out
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["picture.svg"]
    assert b"<svg" in (tmp_path / "deep" / "picture.svg").read_bytes()


def test_thinning_costs_what_no_gate_costs_and_more_where_it_prefers_large_gradients(capsys):
    _, out, _ = run(capsys, "epsilon", *SETTING, "--strength", "1", "--json")
    figures = json.loads(out)
    gate = {"gate": "thinning", "strength": 1.0, "small_norm": 9.9, "large_norm": 11.0, "moved_records": 1}
    assert figures["gate"] == pytest.approx(gate)
    assert figures["plain_pld"] <= figures["pld"] <= 1.01 * figures["plain_pld"]
    _, out, _ = run(capsys, "plan", *PLAN, "--strength", "-1", "--json")
    plan = json.loads(out)
    assert plan["noise_multiplier"] > 1.5 * plan["plain_noise_multiplier"]
    code, _, err = run(capsys, "epsilon", *SETTING, "--strength", "1", "--gate-noise", "1")
    assert code != 0
    assert "--strength is not allowed together with --gate-noise" in err


def test_plan_without_a_gate_is_plain(capsys):
    _, out, _ = run(capsys, "plan", *PLAN, "--no-gate", "--json")
    plan = json.loads(out)
    assert plan["noise_multiplier"] == plan["plain_noise_multiplier"]
    assert plan["gate"] is None
    code, _, err = run(capsys, "plan", *PLAN, "--no-gate", "--gate-noise", "1")
    assert code == 2
    assert "--no-gate" in err


def test_all_commands_claim_the_same_figure(capsys, tmp_path, monkeypatch):
    """What `train` prints and certifies, what `epsilon` and `plan` print, and where the plan's curve ends."""
    from sluice.accounting import plan_curves
    from sluice.accounting.calibration import calibrate
    from sluice.mechanism.gates import ClippingBiasGate

    monkeypatch.chdir(tmp_path)
    trained = ["--batch-size", "256", "--noise-multiplier", "3", "--releases", "4", "--gate-noise", "2"]
    options = ["--dataset", "digits", "--method", "dpsr-cg-paper", "--seed", "1", "--threads", "1", *trained]
    _, out, _ = run(capsys, "train", *options, "--json")
    result = json.loads(out)
    certificate = json.loads((tmp_path / result["run"] / "public" / "certificate.json").read_text())
    claims = [claim["value"] for claim in certificate["claimed"]]
    records = round(256 / result["mechanism"]["sample_rate"])
    _, out, _ = run(capsys, "epsilon", "--dataset-size", str(records), *trained, "--delta", "1e-5", "--json")
    told = json.loads(out)
    assert [figure["value"] for figure in result["figures"]] == claims == [told["paper_rdp"], told["paper_rdp_table"]]

    _, out, _ = run(capsys, "plan", *PLAN, "--json")
    planned = json.loads(out)
    chosen = {
        "--dataset-size": 60000,
        "--batch-size": 600,
        "--noise-multiplier": planned["noise_multiplier"],
        "--releases": 300,
        "--delta": 1e-5,
        "--gate-noise": planned["gate_noise"],
        "--reference-noise": planned["reference_noise"],
    }
    _, out, _ = run(capsys, "epsilon", *(str(part) for pair in chosen.items() for part in pair), "--json")
    assert planned["paper_rdp"] == json.loads(out)["paper_rdp"]
    gate = ClippingBiasGate().for_batches_of(600.0, small_norm=math.inf)
    calibration = calibrate(
        sample_rate=0.01, releases=300, target_epsilon=1.0, target_delta=1e-5, gate=gate, accountant="rdp"
    )
    assert plan_curves.plan_curves(calibration, points=2).curves[-1].epsilons[-1] == planned["paper_rdp"]


def printed(out, row):
    return float(re.search(rf"^{row} +([0-9.e+-]+)", out, re.MULTILINE).group(1))


@pytest.mark.parametrize("noise", ["1.9", "2", "2.1", "2.2"])
def test_no_epsilon_is_printed_smaller_than_it_is(capsys, noise):
    setting = [noise if argument == "2" else argument for argument in SETTING]
    exact = json.loads(run(capsys, "epsilon", *setting, *GATE, "--json")[1])
    _, out, _ = run(capsys, "epsilon", *setting, *GATE)
    for name in ("pld", "rdp", "plain_pld", "plain_rdp", "paper_rdp"):
        assert exact[name] <= printed(out, name) <= 1.001 * exact[name]


@pytest.mark.parametrize("target", ["0.7", "1", "1.3"])
def test_the_noises_that_are_printed_keep_the_target(capsys, tmp_path, target):
    asked = [target if argument == "1" else argument for argument in PLAN]
    exact = json.loads(run(capsys, "plan", *asked, "--json")[1])
    _, out, _ = run(capsys, "plan", *asked, "--plot", str(tmp_path / "plan.svg"))
    noises = {
        "noise_multiplier": "gradient noise multiplier",
        "gate_noise": "gate noise",
        "reference_noise": "reference noise multiplier",
    }
    for name, row in noises.items():
        assert exact[name] <= printed(out, row) <= 1.001 * exact[name]
    plain = float(re.search(r"plain DP-SGD needs ([0-9.]+)", out).group(1))
    assert plain >= exact["plain_noise_multiplier"]
    assert exact["epsilon"] <= printed(out, "epsilon")
    typed = [f"--{name.replace('_', '-')}={printed(out, row)}" for name, row in noises.items()]
    sizes = ["--dataset-size", "60000", "--batch-size", "600", "--releases", "300", "--delta", "1e-5"]
    assert json.loads(run(capsys, "epsilon", *sizes, *typed, "--json")[1])["rdp"] <= float(target)


@pytest.mark.parametrize(("epsilon", "said"), [(None, "nothing is proved"), (3.0042, "epsilon 3.005 is proved")])
def test_an_attack_says_no_smaller_epsilon_than_was_proved(epsilon, said):
    assert _proved(epsilon) == said


@pytest.mark.parametrize("command", [["epsilon", *SETTING, *GATE], ["plan", *PLAN]])
def test_a_delta_that_promises_nothing_is_remarked_on(capsys, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    large = ["0.5" if argument == "1e-5" else argument for argument in command]
    _, out, err = run(capsys, *large)
    assert "delta=0.5 is not below 1/N" in err.replace("\n", " ")
    assert json.loads(run(capsys, *large, "--json")[1])["warnings"]
    _, out, err = run(capsys, *command)
    assert "1/N" not in out + err
    assert json.loads(run(capsys, *command, "--json")[1])["warnings"] == []
