"""The planner page: what a run would cost, redrawn while its settings are moved (``sluice serve``)."""
