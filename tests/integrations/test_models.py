"""T5, peft's adapters and timm's vision models agree with the batch-of-one oracle, and train without being told how."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from sluice.gradients import PerSampleGradients
from sluice.gradients.eager import as_written

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NAMES = {
    "peft": ("BERT with LoRA", "BERT with DoRA", "BERT with IA3", "GPT-2 with prompt tuning"),
    "transformers": ("T5", "T5, nothing masked"),
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
    assert outcome.way == "native"
    assert outcome.error < 1e-5


def test_one_engine_takes_t5s_batches_with_and_without_padding():
    """transformers leaves out a mask that hides nothing, so that T5's bias would take another way for such a batch."""
    pytest.importorskip("transformers", reason="needs pip install 'sluice[integrations]'")
    catalog, models = loaded("models_catalog"), loaded("models")
    model, padded = catalog.t5(catalog.both_sides)(5)
    model.train()
    y, engine = torch.arange(5) % 2, PerSampleGradients(model)
    for x in (padded, catalog.both_sides_unmasked(5), padded):
        norms, _ = models.truth(model, x, y)
        torch.testing.assert_close(engine.norms(x, y, models.record_losses).double(), norms, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_of_transformers_changes_nothing(reentrant):
    pytest.importorskip("transformers", reason="needs pip install 'sluice[integrations]'")
    catalog, models = loaded("models_catalog"), loaded("models")
    model, x = catalog.text("Bert")(5)
    y = torch.arange(5) % 2
    expected, _ = models.truth(model.train(), x, y)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    norms = PerSampleGradients(model).norms(x, y, models.record_losses)
    torch.testing.assert_close(norms.double(), expected, rtol=1e-5, atol=1e-6)


def test_masks_are_made_as_ever_outside_recorded_passes():
    masks = pytest.importorskip("transformers.masking_utils", reason="needs pip install 'sluice[integrations]'")
    before = masks.is_tracing
    with as_written():
        assert masks.is_tracing(torch.ones(2))
    assert masks.is_tracing is before
    assert not masks.is_tracing(torch.ones(2))


def test_there_are_forty_models_and_one_of_them_twice():
    assert len(loaded("models_catalog").ENTRIES) == 41
