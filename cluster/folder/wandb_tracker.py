"""Weights & Biases, by its own library."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhfspec.cluster.folder.trackers import Chosen
from rlhfspec.core.files import write_whole
from rlhfspec.core.settings.tracking import WandbConfig

_ID_FILE = "rlhfspec-run-id.txt"
_COLUMNS = (
    "why",
    "sample_index",
    "prompt",
    "response",
    "reference",
    "reward",
    "parts",
    "advantage",
    "finish_reason",
    "tokens",
)


class WandbTracker:
    """Scalars, histograms and sample tables of one run, which is called like its folder."""

    name = "Weights & Biases"

    def __init__(self, settings: WandbConfig, folder: Path, config: Mapping[str, Any]) -> None:
        """Raises ImportError without the package, and what the library raises where it cannot begin."""
        # by name: type checkers need not have it
        self._wandb: Any = importlib.import_module("wandb")
        # a run that goes on is the same run there; steps that it has are not taken twice
        kept = folder / "wandb" / _ID_FILE
        self._run = self._wandb.init(
            id=kept.read_text() if kept.is_file() else None,
            resume="allow",
            project=settings.project,
            entity=settings.entity,
            mode=settings.mode,
            name=folder.name,
            dir=str(folder),
            config=dict(config),
            settings=self._wandb.Settings(console="off", silent=True),
        )
        kept.parent.mkdir(exist_ok=True)
        write_whole(kept, self._run.id)

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        """Take scalars."""
        self._run.log(dict(figures), step=step)

    def histograms(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        """Take raw values by name."""
        self._run.log(
            {f"histogram/{name}": self._wandb.Histogram(list(those)) for name, those in values.items()},
            step=step,
        )

    def samples(self, step: int, chosen: Chosen) -> None:
        """Take samples that people read."""
        table = self._wandb.Table(columns=list(_COLUMNS))
        for why, row in chosen:
            parts = ", ".join(f"{name} {value:.4g}" for name, value in row.parts.items())
            table.add_data(
                why,
                row.sample_index,
                row.prompt,
                row.response,
                row.reference,
                row.reward,
                parts,
                row.advantage,
                row.finish_reason,
                row.num_tokens,
            )
        self._run.log({"samples": table}, step=step)

    def close(self) -> None:
        """Hand over what is held; `wandb sync` does the rest of an offline run."""
        self._run.finish()
