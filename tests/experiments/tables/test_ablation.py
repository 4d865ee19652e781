from __future__ import annotations

from dataclasses import fields

import pytest

from sluice._base.errors import InputError
from sluice.experiments.settings import TrainSettings
from sluice.experiments.tables.ablation import printed_in_ablation
from sluice.experiments.tables.accuracy_cells import plan_cells
from sluice.experiments.tables.accuracy_table import table_lines
from sluice.experiments.tables.accuracy_tables import TABLES

TABLE = TABLES["ablation"]


def planned(dataset: str, epsilon: float = 3.0) -> dict[str, TrainSettings]:
    plan = plan_cells(datasets=[dataset], methods=TABLE.methods, epsilons=[epsilon], seeds=[0], recipe=TABLE.recipe)
    return {each.cell.row: each.settings for each in plan.cells}


@pytest.mark.parametrize("dataset", TABLE.datasets)
def test_the_row_without_selection_differs_by_the_gate_alone(dataset):
    rows = planned(dataset)
    gated, ungated = rows["dpsr-cg"], rows["dpsr-cg:ungated"]
    assert [
        each.name for each in fields(TrainSettings) if getattr(gated, each.name) != getattr(ungated, each.name)
    ] == ["gate"]
    assert ungated.gate == "none"


def test_dpsur_gets_the_scaling_of_the_others():
    for dataset, bound in (("cifar-10", 3.0), ("imdb", 1.0)):
        rows = planned(dataset, 1.0)
        dpsur, ours = rows["dpsur:same-scaling"], rows["dpsr-cg"]
        for name in ("scaling", "scaling_bound", "max_grad_norm", "lr", "model", "features", "optimizer", "epsilon"):
            assert getattr(dpsur, name) == getattr(ours, name), name
        assert dpsur.scaling_bound == bound
        assert dpsur.own_options.account == "provable"
    assert planned("imdb", 2.0)["dpsur:same-scaling"].releases == 327
    with pytest.raises(InputError, match="it is for cifar-10, imdb"):
        planned("mnist")


def test_printed_numbers_are_those_of_the_ablation_table():
    assert printed_in_ablation("cifar-10", "dpsr-cg", 1.0).percent == "70.15"
    assert printed_in_ablation("imdb", "dpsur:same-scaling", 3.0).percent == "69.16"
    assert printed_in_ablation("imdb", "dpsr-cg:ungated", 4.0) is None
    plan = plan_cells(datasets=["imdb"], methods=TABLE.methods, epsilons=[3.0], seeds=[0], recipe=TABLE.recipe)
    lines = table_lines(plan, {}, epsilons=[3.0], failures={}, printed=TABLE.printed)
    assert [line.printed.percent for line in lines] == ["73.03", "70.43", "69.16"]
