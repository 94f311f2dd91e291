"""Where the figures of a run go beside its own folder, and what is kept for people to read."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .section import Name, Section


class WandbConfig(Section):
    """Weights & Biases, by its own library. Needs the extra `wandb`."""

    project: Name = "rlhfspec"
    entity: Name | None = None
    mode: Literal["online", "offline", "disabled"] = "online"
    "offline: files under wandb/ in the run folder, for `wandb sync`"


class TrackingConfig(Section):
    """`metrics.jsonl` is always written."""

    tensorboard: bool = False
    "event files under tensorboard/ in the run folder; needs the extra `tensorboard`"
    wandb: WandbConfig | None = None
    "null: none"
    samples: int = Field(default=8, ge=0, le=1000)
    "samples an iteration that are kept for people to read, best, worst and random ones; 0: none"
