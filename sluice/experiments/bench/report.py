"""The benchmark's results as a JSON file and a bar chart."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from sluice._base.files import replaced_atomically
from sluice.experiments.bench.measure import Measurement, ratios
from sluice.experiments.bench.steps import FLOORS
from sluice.gradients.native.loading import library


def payload(results: Sequence[Measurement]) -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "processor": platform.machine(),
        "kernels_in_c": library() is not None,
        "ratios": ratios(results),
        "measurements": [asdict(result) for result in results],
    }


def write_json(results: Sequence[Measurement], target: Path) -> None:
    with replaced_atomically(target) as temporary:
        temporary.write_text(json.dumps(payload(results), indent=2) + "\n")


def write_plot(results: Sequence[Measurement], target: Path) -> None:
    """One panel for each combination, one bar for each method: time of a step, relative to the fastest ordinary one."""
    from sluice._base.figures import blank_figure  # matplotlib is an extra, which measuring does without

    keys = list(dict.fromkeys((r.model, r.batch, r.threads) for r in results))
    columns = min(3, len(keys))
    rows = -(-len(keys) // columns)
    with blank_figure() as figure:
        figure.set_size_inches(5 * columns, 2.8 * rows)
        axes = figure.subplots(rows, columns, squeeze=False)
        for axis in axes.flat[len(keys) :]:
            axis.set_visible(False)
        for axis, key in zip(axes.flat, keys, strict=False):
            group = [r for r in results if (r.model, r.batch, r.threads) == key and r.seconds is not None]
            floor = min(r.seconds for r in group if r.seconds is not None and r.method in FLOORS)
            names = [r.method if r.repeats != 1 else f"{r.method} (once)" for r in group]
            values = [(r.seconds or 0.0) / floor for r in group]
            kinds = {"sluice": "tab:blue", "opacus": "tab:orange", "fastdp": "tab:red", "vmap": "tab:olive"}
            colours = [kinds.get(name.split(",")[0].split()[0], "tab:grey") for name in names]
            axis.barh(names, values, color=colours)
            for i, value in enumerate(values):
                axis.text(value, i, f" {value:.2f}", va="center", fontsize=7)
            axis.axvline(1.0, color="black", linewidth=0.8)
            axis.invert_yaxis()
            axis.tick_params(labelsize=7)
            axis.set_title(f"{key[0]}, batch {key[1]}, {key[2]} thread{'s' if key[2] > 1 else ''}", fontsize=8)
            axis.set_xlim(0, max(values) * 1.15)
        figure.supxlabel("time of one step, fastest ordinary step = 1", fontsize=8)
        suffix = target.suffix.removeprefix(".") or "png"
        with replaced_atomically(target) as temporary:
            figure.savefig(temporary, format=suffix, dpi=130)
