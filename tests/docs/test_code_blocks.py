"""Every block of Python in the README and the docs runs as printed.

The blocks of a page run in order and share names. A reader of a page has a model, an optimizer, data and a loss; these are
all that a block may use without making it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from sluice import PrivacyEngine

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
#: Its blocks need the libraries that it is about.
ELSEWHERE = ROOT / "docs" / "integrations.md"  # tests/integrations/test_documents.py
PAGES = {
    str(path.relative_to(ROOT)): BLOCK.findall(path.read_text("utf-8"))
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if path != ELSEWHERE
}


def given() -> dict[str, Any]:
    """What a reader has: a small model, and data that it can be trained on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 3))
    train = TensorDataset(torch.randn(200, 6), torch.arange(200) % 3)
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "train": train,
        "loader": DataLoader(train, batch_size=20),
        "criterion": nn.CrossEntropyLoss(),
        "loss": functional.cross_entropy,
    }


def finished_run(*names: str) -> None:
    """Runs of these names in the present folder."""
    from sluice.experiments.preparing import prepare
    from sluice.experiments.run import Training
    from sluice.experiments.settings import settings_from

    for name in names:
        overrides = {
            "dataset": "digits",
            "method": "dpsgd",
            "noise_multiplier": 2.0,
            "releases": 4,
            "accountant": "rdp",
        }
        settings = settings_from(overrides)
        Training(settings=settings, splits=prepare(settings)).start(Path("runs") / name)


def _runs() -> dict[str, Any]:
    from sluice import Clip, SelectiveRelease

    finished_run("first")
    mechanism = SelectiveRelease(
        sample_rate=0.1, expected_batch_size=20.0, scaling=Clip(max_grad_norm=1.0), noise_multiplier=1.0, releases=3
    )
    return {"mechanism": mechanism}


def _training() -> dict[str, Any]:
    finished_run("mnist-dpsgd-1")
    return {"images": torch.rand(5, 1, 8, 8)}


def _matrix() -> dict[str, Any]:
    return {"raw_sum": lambda indices: [torch.zeros(3)]}


def _words() -> dict[str, Any]:
    return {"lr": 1.0, "noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": 100.0}


def _digits_as_bytes() -> dict[str, Any]:
    return {"images_uint8": torch.randint(0, 256, (8, 1, 28, 28), dtype=torch.uint8)}


def _opacus() -> dict[str, Any]:
    generator = nn.Sequential(nn.Flatten(), nn.Linear(4, 6))
    loader = given()["loader"]
    return {
        "nz": 4,
        "netG": generator,
        "netD": nn.Sequential(nn.Linear(6, 1), nn.Flatten(0)),
        "optimizerG": torch.optim.SGD(generator.parameters(), lr=0.1),
        "dataloader": loader,
        "data_loader": loader,
    }


#: What pages use beside `given`; most of them nothing.
EXTRA: dict[str, Callable[[], dict[str, Any]]] = {
    "docs/runs.md": _runs,
    "docs/training.md": _training,
    "docs/matrix.md": _matrix,
    "docs/opacus.md": _opacus,
    "docs/features-words.md": _words,
    "docs/features.md": _digits_as_bytes,
    "docs/features-nets.md": lambda: {"images": torch.rand(4, 1, 28, 28)},
    "docs/features-patches.md": lambda: {"images": torch.rand(4, 3, 32, 32)},
}

MARKS = {
    "docs/data.md": [pytest.mark.bigdata],
    "docs/features-words.md": [pytest.mark.bigdata],
    "docs/audit.md": [pytest.mark.slow],
    "docs/matrix.md": [pytest.mark.slow],
    "docs/features-nets.md": [pytest.mark.slow],
    "docs/features-patches.md": [pytest.mark.slow],
}


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=MARKS.get(page, [])) for page, blocks in PAGES.items() if blocks]
)
@pytest.mark.filterwarnings("ignore::sluice.mechanism.delta.DeltaWarning")
@pytest.mark.usefixtures("own_kinds")
def test_the_code_of_a_page_runs_as_printed(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    names = {"__name__": page, **given(), **EXTRA.get(page, dict)()}
    for number, block in enumerate(PAGES[page]):
        code = compile(block, f"{page}, block {number}", "exec")
        exec(code, names)
        for name in ("engine", "privacy_engine"):
            engine = names.pop(name, None)
            if isinstance(engine, PrivacyEngine):
                engine.close()
                names.update({**given(), **(_opacus() if page == "docs/opacus.md" else {})})


def test_pages_with_code_are_found():
    assert {"README.md", "docs/training.md", "docs/gradients.md"} <= {page for page, blocks in PAGES.items() if blocks}
    assert set(EXTRA) | set(MARKS) <= set(PAGES)
