"""One run over several processes of ``torch.distributed`` (docs/distributed.md)."""

from __future__ import annotations

from sluice.training.distributed.joining import join
from sluice.training.distributed.workers import WorkerLostError, Workers

__all__ = ["WorkerLostError", "Workers", "join"]
