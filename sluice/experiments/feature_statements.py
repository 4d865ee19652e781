"""What a certificate says about the features of a run."""

from __future__ import annotations

from sluice.experiments.settings import TrainSettings
from sluice.features.catalog import FEATURES, blocks_of


def feature_statements(settings: TrainSettings) -> list[str]:
    """Sentences on what the model sees, where that comes from, and which release about it is charged."""
    names = dict.fromkeys(block.name for block in blocks_of(settings.features))
    sentences = [f"{name}: {FEATURES[name].summary}. {FEATURES[name].origin}" for name in names]
    if settings.mean_noise is not None:
        sentences.append(
            f"Their mean over the training records was released once, with noise of multiplier {settings.mean_noise:g}, and "
            "subtracted. Epsilon includes this release."
        )
    return sentences
