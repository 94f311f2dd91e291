"""Runs of `rlhfspec train` as a user makes them, in OUT/runs, each in a process of its own with its log in OUT."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...cluster.folder.layout import of_run
from ...core.metrics import read_metrics
from .processes import run_command, setting_words
from .result import ROOT

DEMO, SMOLLM2 = ROOT / "configs" / "demo.yaml", ROOT / "configs" / "smollm2_grpo.yaml"
PPO, GRPO = (ROOT / "configs" / "algorithms" / f"{kind}.yaml" for kind in ("ppo", "grpo"))
Metrics = Sequence[Mapping[str, float]]
"One row an iteration."


@dataclass(frozen=True, slots=True)
class MadeRun:
    """A run that ended well."""

    folder: Path
    seconds: float
    "of the whole command"

    @property
    def metrics(self) -> Metrics:
        """Of its iterations."""
        return read_metrics(self.folder / "metrics.jsonl")


def train(config: Path, out: Path, name: str, settings: Sequence[str]) -> MadeRun:
    """Make one run. Raises RlhfSpecError with the end of its output when it fails."""
    seconds = run_command(train_words(config, out, name, settings), folder=ROOT, log=out / f"{name}.log")
    return MadeRun(newest_run(out, name), seconds)


def train_words(config: Path, out: Path, name: str, settings: Sequence[str]) -> list[str]:
    """Arguments of `rlhfspec` for such a run."""
    fixed = [f"run.output_dir={out / 'runs'}", f"run.name={name}", "cluster.dashboard=false"]
    return ["train", "--config", str(config), *setting_words((*fixed, *settings))]


def newest_run(out: Path, name: str) -> Path:
    """The newest folder of a name: one that was broken off may lie beside it."""
    runs = out / "runs"
    return runs / of_run(os.listdir(runs), name)[0]
