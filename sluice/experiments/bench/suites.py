"""Models by suite."""

from __future__ import annotations

from sluice.experiments.bench import paper, wide
from sluice.experiments.bench.scenarios import Scenario

SUITES: dict[str, dict[str, Scenario]] = {"paper": paper.SCENARIOS, "wide": wide.SCENARIOS}
SCENARIOS: dict[str, Scenario] = {name: scenario for suite in SUITES.values() for name, scenario in suite.items()}
