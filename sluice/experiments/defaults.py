"""What a run is trained with where nobody says otherwise: the best recipe that is known, or what a method was published with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.experiments.objective_settings import predicts_numbers
from sluice.features.catalog import blocks_of, has_rows

if TYPE_CHECKING:
    from sluice.methods import Method
    from sluice.methods.recipes import Recipe

RECIPE_KINDS = ("best", "paper")

# The features that a model is made for; any other model takes what its data set has.
_FEATURES_OF_MODEL = {
    "pixel-cnn": "plain",
    "scattering-cnn": "scattering",
    "bilstm": "plain",
    "embedding": "plain",
    "bag-of-words": "bag-of-words",
    "weighted-words": "weighted-words",
}
_MODEL_OF_FEATURES = {
    ("imdb", "bag-of-words"): "bag-of-words",
    ("imdb", "plain"): "embedding",
    ("mnist", "plain"): "pixel-cnn",
    ("fashion-mnist", "plain"): "pixel-cnn",
    ("cifar-10", "plain"): "pixel-cnn",
}
_SMALLEST, _LARGEST = 16, 64


def method_of(name: str) -> Method:
    """As in `sluice.methods`, which brings the accountants along: help is shown without them."""
    from sluice import methods

    return methods.method_of(name)


def default_values(chosen: Mapping[str, Any], *, recipe: str | None) -> dict[str, Any]:
    """All settings that are not left at the defaults of `TrainSettings`, for data set, method and epsilon as chosen.

    Args:
        chosen: what the user has set. A recipe is for its own kind of model: another one that is chosen gets what the method
            was published with.
        recipe: "best" insists on a recipe, "paper" on the published settings.
    """
    if recipe is not None:
        validate.one_of(RECIPE_KINDS, recipe=recipe)
    dataset, method, epsilon = (chosen[name] for name in ("dataset", "method", "epsilon"))
    found = None if recipe == "paper" else _best(chosen)
    if found is None:
        if recipe == "best":
            raise InputError(
                f"recipe='best' is not allowed for method={method!r} on dataset={dataset!r} with this model: none is known "
                "but what the method was published with."
            )
        options = chosen.get("options", {})
        account = options.get("account") if isinstance(options, Mapping) else None
        own = method_of(method)
        defaults = own.claimed_defaults if account == "claimed" and own.claimed_defaults else own.defaults
        found = defaults(dataset, epsilon)
    return {**found, "dataset": dataset, "method": method, "epsilon": epsilon}


def _best(chosen: Mapping[str, Any]) -> Mapping[str, Any] | None:
    best = None if predicts_numbers(chosen.get("loss")) else method_of(chosen["method"]).best
    recipe = None if best is None else known_recipe(chosen["dataset"])
    if recipe is None or best is None or chosen.get("model", recipe.model) != recipe.model:
        return None
    features = chosen.get("features")
    if features is not None:
        if _kind(features) != _kind(recipe.features[min(recipe.features)]):
            return None
        recipe = replace(recipe, features={0.0: features})
    return best(recipe, chosen["epsilon"])


def _kind(features: str) -> str:
    return "rows" if has_rows(features) else blocks_of(features)[0].name


def known_recipe(dataset: str) -> Recipe | None:
    """The best recipe for a data set; for the user's own images one that fits their shape and number, which are public."""
    from sluice.methods.recipes import RECIPES, recipe_for_rows

    if dataset in RECIPES or Path(dataset).suffix != ".npz":
        return RECIPES.get(dataset)
    from sluice.data.header import array_header

    found = array_header(Path(dataset))
    if found is None:
        return None
    features = features_for(found.image_shape)
    return None if features is None else recipe_for_rows(features, records=found.records)


def features_for(shape: tuple[int, int, int] | None) -> str | None:
    """The features for images of a shape that no recipe was searched for; None where plain records are as good."""
    if shape is None or not all(_SMALLEST <= length <= _LARGEST for length in shape[1:]):
        return None
    return {1: "whitened-scattering", 3: "patches"}.get(shape[0])


def matched(chosen: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What was chosen, with the features that a model is made for, or the model for features, where one was not given."""
    matched = dict(chosen)
    if "model" in chosen and "features" not in chosen and chosen["model"] in _FEATURES_OF_MODEL:
        matched["features"] = _FEATURES_OF_MODEL[chosen["model"]]
    if "features" in chosen and "model" not in chosen:
        matched["model"] = _model_for(chosen["dataset"], chosen["features"]) or defaults.get("model", "linear")
    return matched


def _model_for(dataset: str, features: str) -> str | None:
    """The model that features are made for, where there is one."""
    if has_rows(features):
        return "softmax"
    name = blocks_of(features)[0].name
    return name if name == "weighted-words" else _MODEL_OF_FEATURES.get((dataset, features))


__all__ = ["RECIPE_KINDS", "default_values", "features_for", "known_recipe", "matched", "method_of"]
