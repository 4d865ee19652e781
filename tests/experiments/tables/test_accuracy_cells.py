from __future__ import annotations

import pytest

from sluice._base.errors import InputError
from sluice.experiments.tables.accuracy_cells import Plan, parse_overrides, plan_cells, table_order
from sluice.methods import METHODS


def plan(
    datasets="digits", methods="dpsgd", epsilons=(3.0,), seeds=(0,), overrides=None, tag="", recipe="paper"
) -> Plan:
    return plan_cells(
        datasets=datasets.split(","),
        methods=methods.split(","),
        epsilons=epsilons,
        seeds=seeds,
        recipe=recipe,
        overrides=overrides,
        tag=tag,
    )


def test_a_cell_for_each_data_set_method_epsilon_and_seed():
    found = plan("digits,mnist", "dpsgd,dpsr-cg", (1.0, 3.0), (0, 1, 2))
    assert len(found.cells) == 24
    assert len({cell.cell.name for cell in found.cells}) == 24
    for planned in found.cells:
        assert planned.settings.dataset == planned.cell.dataset
        assert planned.settings.method == planned.cell.method
        assert planned.settings.epsilon == planned.cell.epsilon
        assert planned.settings.seed == planned.cell.seed
        assert planned.settings.evaluate_every == 0


def test_settings_are_the_methods_own_for_that_epsilon():
    by_epsilon = {planned.cell.epsilon: planned.settings for planned in plan("mnist", "dpsgd", (1.0, 3.0)).cells}
    assert (by_epsilon[1.0].releases, by_epsilon[3.0].releases) == (678, 1931)
    assert by_epsilon[3.0].model == "pixel-cnn"


def test_no_epsilon_shapes_a_run_without_privacy():
    found = plan("mnist", "non-private", (1.0, 2.0, 3.0), (0, 1))
    assert [planned.cell.epsilon for planned in found.cells] == [None, None]
    assert found.cells[0].cell.name == "mnist-non-private-seed0"


def test_all_methods_in_the_papers_order_less_what_the_paper_lacks():
    images = plan("mnist", "all")
    others = {"dpsgd-ac"}
    assert [planned.cell.method for planned in images.cells] == table_order(set(METHODS) - others)
    texts = plan("imdb", "all")
    assert "dpsgd-hf" not in {planned.cell.method for planned in texts.cells}
    assert texts.left_out == {("imdb", "dpsgd-hf"): "the paper prints none"}


def test_a_method_that_is_named_is_not_left_out():
    found = plan("imdb", "all,dpsgd-hf")
    assert "dpsgd-hf" in {planned.cell.method for planned in found.cells}
    assert found.left_out == {}


def test_a_recipe_chooses_between_the_papers_settings_and_the_best():
    (paper,) = plan("imdb", "dpsr-cg").cells
    (best,) = plan("imdb", "dpsr-cg", recipe="best").cells
    assert (paper.settings.model, paper.settings.features, paper.settings.optimizer) == ("bilstm", "plain", "adam")
    assert paper.settings.noise_multiplier is None
    assert best.settings.features.startswith("weighted-words")
    assert paper.cell == best.cell


def test_variants_have_names_of_their_own():
    names = [planned.cell.name for planned in plan("imdb", "dpsur,dpsur:claimed").cells]
    assert names == ["imdb-eps3-dpsur-seed0", "imdb-eps3-dpsur+claimed-seed0"]
    assert plan("imdb", "dpsur:claimed").cells[0].cell.row == "dpsur:claimed"


def test_a_tag_cannot_be_taken_for_a_method():
    tagged = plan("digits", "dpsr-cg", overrides={"lr": 0.2}, tag="paper").cells[0].cell.name
    assert tagged != plan("digits", "dpsr-cg-paper").cells[0].cell.name


def test_dpsur_with_its_authors_settings_stands_under_its_heading():
    (planned,) = plan("mnist", "dpsur:claimed", (2.0,)).cells
    settings = planned.settings
    assert planned.cell.epsilon == settings.epsilon == 2.0
    assert (settings.noise_multiplier, settings.releases) == (1.5, 862)
    assert settings.options["account"] == "claimed"
    assert METHODS["dpsur"].target(settings) is None


def test_noise_that_is_given_leaves_the_other_settings_of_the_heading():
    noisy = plan("mnist", "dpsgd", (1.0, 3.0), overrides={"noise_multiplier": 2.5}, tag="s2.5").cells
    assert [planned.settings.releases for planned in noisy] == [678, 1931]
    assert {planned.settings.noise_multiplier for planned in noisy} == {2.5}
    assert METHODS["dpsgd"].target(noisy[0].settings) is None
    hidden = plan(methods="dpsr-cg", overrides={"noise_multiplier": 2.5, "hidden_reference": True}, tag="h").cells
    assert hidden[0].settings.hidden_reference


def test_a_variant_is_for_its_own_data_sets():
    found = plan("digits,imdb", "dpsur:claimed")
    assert [planned.cell.dataset for planned in found.cells] == ["imdb"]
    assert ("digits", "dpsur:claimed") in found.left_out
    with pytest.raises(InputError, match="dpsur:claimed is not allowed for digits: it is for mnist"):
        plan("digits", "dpsur:claimed")


def test_changes_go_to_every_cell_under_their_tag():
    found = plan("digits", "dpsgd,dpsr-cg", overrides={"lr": 0.7, "releases": 5}, tag="quick")
    assert {planned.settings.lr for planned in found.cells} == {0.7}
    assert {planned.settings.releases for planned in found.cells} == {5}
    assert {planned.cell.variant for planned in found.cells} == {"quick"}


def test_changes_that_a_method_does_not_take_leave_it_out_or_are_refused():
    found = plan("digits", "all", overrides={"beta": 2.0}, tag="b2")
    assert {planned.cell.method for planned in found.cells} == {"dpsr-cg", "dpsr-cg-paper"}
    assert "no effect" in found.left_out["digits", "dpsgd"]
    with pytest.raises(InputError, match=r"beta=2\.0 has no effect"):
        plan("digits", "dpsgd", overrides={"beta": 2.0}, tag="b2")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"datasets": "fruits"}, "datasets='fruits' is not allowed: it must be one of .*mnist"),
        ({"methods": "magic"}, "methods='magic' is not allowed: it must be one of .*dpsgd"),
        ({"methods": "dpsgd:fast"}, "dpsgd has no variant 'fast'; it has none"),
        ({"methods": "dpsgd:fast"}, "it has none"),
        ({"epsilons": ()}, "epsilons is empty"),
        ({"epsilons": (-1.0,)}, "epsilons=-1.0 is not allowed"),
        ({"seeds": ()}, "seeds is empty"),
        ({"seeds": (-1,)}, "seed=-1 is not allowed"),
        ({"overrides": {"lr": 0.1}}, "set and tag belong together"),
        ({"tag": "x"}, "set and tag belong together"),
        ({"overrides": {"lr": 0.1}, "tag": "a/b"}, "tag='a/b' is not allowed"),
        ({"overrides": {"seed": 3}, "tag": "x"}, "set seed is not allowed"),
        ({"overrides": {"hold_out": 0.2}, "tag": "x"}, "set hold_out is not allowed"),
        ({"overrides": {"frobs": 3}, "tag": "x"}, "unknown settings frobs"),
    ],
)
def test_bad_requests(changes, message):
    with pytest.raises(InputError, match=message):
        plan(**changes)


def test_values_are_json_or_plain_text():
    found = parse_overrides(["lr=0.2", "model=bilstm", "seed=null", "options.account=claimed", "options.loss_clip=2"])
    assert found == {"lr": 0.2, "model": "bilstm", "seed": None, "options": {"account": "claimed", "loss_clip": 2}}
    with pytest.raises(InputError, match="must be NAME=VALUE"):
        parse_overrides(["lr"])
