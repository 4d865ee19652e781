"""What the site adds to the pages of this folder: the README as its front page, the API reference, and formulas.

Formulas become MathML while the site is built, so that pages need neither scripts nor fonts from elsewhere.
"""

from __future__ import annotations

import html
import importlib
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]

#: Pages made from files outside of docs/.
FROM_THE_ROOT = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
PICTURES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "results").glob("*/*.png"))

_GROUPS = {
    "Training": ("PrivacyEngine", "TrainSettings", "train", "load_model", "fix"),
    "Gates": ("Gate", "ClippingBiasGate", "CoinGate"),
    "Scaling rules": ("ScalingRule", "Clip", "GlobalScaling", "Normalise"),
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page, source in FROM_THE_ROOT.items():
        files.append(File.generated(config, page, content=_from_the_root((ROOT / source).read_text("utf-8"))))
    for picture in PICTURES:
        files.append(File.generated(config, picture, abs_src_path=str(ROOT / picture)))
    files.append(File.generated(config, "api.md", content=_api_page()))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    return markdown.replace("](../results/", "](results/")  # they stand beside docs/, and are put into the site


def on_post_page(output: str, page: Any, config: MkDocsConfig) -> str:
    return re.sub(r'<(span|div) class="arithmatex">(.*?)</\1>', _as_mathml, output, flags=re.DOTALL)


def _from_the_root(text: str) -> str:
    text = re.sub(r"\]\(docs/", "](", text)
    for page, source in FROM_THE_ROOT.items():
        text = text.replace(f"]({source}", f"]({page}")
    return text


def _api_page() -> str:
    """Every public name, where it is defined, in groups; what is in no group comes last."""
    sluice = importlib.import_module("sluice")
    named = {name for group in _GROUPS.values() for name in group}
    rest = tuple(name for name in sorted(sluice.__all__) if name not in named and name != "__version__")
    lines = ["# API reference", "", "What `sluice` exports. Anything else may change without notice."]
    for title, names in {**_GROUPS, "More": rest}.items():
        lines += ["", f"## {title}"]
        for name in names:
            if name in sluice.__all__:
                inherited = str(name == "PrivacyEngine").lower()  # its questions about epsilon stand in a base class
                options = f"    options: {{heading_level: 3, inherited_members: {inherited}}}"
                lines += ["", f"::: {getattr(sluice, name).__module__}.{name}", options]
    return "\n".join(lines) + "\n"


def _as_mathml(found: re.Match[str]) -> str:
    text = html.unescape(found[2]).strip()
    return str(convert(text[2:-2].strip(), display="inline" if text.startswith(r"\(") else "block"))
