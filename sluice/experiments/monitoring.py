"""TensorBoard, as an extra: it gets public values only, each with the number of its release.

An event file tells when each value was written, and how long releases take is sensitive. So every event carries the
number of its release instead of the time, and the files live in ``private/`` nevertheless: their names and first lines
name the machine and the hour.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from sluice._base.closing import Closing
from sluice._base.errors import InputError
from sluice.experiments.run import Progress

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FOLDER = "tensorboard"


class TensorBoard(Closing):
    """Writes epsilon and test accuracy, or test scores, of each evaluation.

    Args:
        private: the run's private folder. It is filled with the first evaluation, not before.
    """

    def __init__(self, private: Path) -> None:
        self.folder = private / FOLDER
        self._writer: SummaryWriter | None = None
        self._open = _writer_class()

    def report(self, progress: Progress) -> None:
        """Take what `Training` reports."""
        if progress.evaluation is None:
            return
        if self._writer is None:
            self._writer = self._open(str(self.folder))
        values = asdict(progress.evaluation)
        shown = {name: values[name] for name in ("test_accuracy", "epsilon_if_planned_to_stop_here")}
        for tag, value in {**shown, **(values["test_scores"] or {})}.items():
            if value is not None:
                self._writer.add_scalar(tag, value, progress.release, walltime=float(progress.release))
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _writer_class() -> type[SummaryWriter]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise InputError(
            "tensorboard is not installed: install it with pip install 'sluice[tensorboard]', or leave --tensorboard out."
        ) from error
    return SummaryWriter
