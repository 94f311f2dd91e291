"""TensorBoard event files, by `torch.utils.tensorboard`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from rlhfspec.cluster.folder.sample_table import as_markdown
from rlhfspec.cluster.folder.trackers import Chosen


class TensorBoardTracker:
    """Scalars, histograms, and samples as text."""

    name = "TensorBoard"

    def __init__(self, folder: Path, *, num_done: int = 0) -> None:
        """Steps after `num_done` are taken again. Raises ImportError without the package `tensorboard`."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=num_done + 1 if num_done else None)

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        """Take scalars."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def histograms(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        """Take raw values by name."""
        for name, those in values.items():
            self._writer.add_histogram(f"histogram/{name}", np.asarray(those), step)

    def samples(self, step: int, chosen: Chosen) -> None:
        """Take samples that people read."""
        self._writer.add_text("samples", as_markdown(f"After iteration {step}", chosen), step)

    def close(self) -> None:
        """Write out what is held."""
        self._writer.close()
