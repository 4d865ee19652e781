"""peft's adapters and timm's vision models agree with the batch-of-one oracle, and train without being told how."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NAMES = {
    "peft": ("BERT with LoRA", "BERT with DoRA", "BERT with IA3", "GPT-2 with prompt tuning"),
    "timm": ("ViT-Tiny", "ConvNeXt", "Swin-Tiny"),
}


def loaded(name: str):
    specification = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("source", "name"), [(source, name) for source, names in NAMES.items() for name in names])
def test_models_agree_with_batches_of_one(source, name):
    pytest.importorskip("transformers", reason="needs pip install 'sluice[integrations]'")
    try:
        __import__(source)
    except (ImportError, RuntimeError) as error:  # timm loads torchvision, which may not fit the torch that is there
        pytest.skip(f"{source} cannot be imported: {error}")
    catalog, models = loaded("models_catalog"), loaded("models")
    entry = next(entry for entry in catalog.ENTRIES if entry.name == name)
    outcome = models.tried(entry)
    assert not outcome.way.startswith("refused"), outcome.way
    assert outcome.error < 1e-5


def test_there_are_forty_models():
    assert len(loaded("models_catalog").ENTRIES) == 40
