"""Speed and memory of per-sample gradients: ``python benchmarks/gradients.py --batches 1024``."""

from __future__ import annotations

import sys

from sluice.cli import main

if __name__ == "__main__":
    main(["bench", "gradients", *sys.argv[1:]])
