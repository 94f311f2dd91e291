"""What speculation and moves gave a run: its last batch beside the same one, decoded plainly and bound statically."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...core.files import write_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Of one iteration, counted from 0; all tokens were equal, or there would be none."""

    iteration: int
    num_samples: int
    num_tokens: int
    rollout_s: float
    "of the run"
    step_s: float
    "of the run: its whole iteration, evaluation left out"
    plain_rollout_s: float
    plain_step_s: float
    "the run's iteration with the plain rollout in the place of its own, and no refit of a draft"

    @property
    def rollout_gain(self) -> float:
        """How many times as fast the rollout was."""
        return self.plain_rollout_s / max(self.rollout_s, 1e-9)

    @property
    def step_gain(self) -> float:
        """How many times as fast the step was."""
        return self.plain_step_s / max(self.step_s, 1e-9)

    @property
    def text(self) -> str:
        """One line."""
        return (
            f"iteration {self.iteration + 1} plain and static: rollout {self.plain_rollout_s:.1f} s, here "
            f"{self.rollout_s:.1f} ({self.rollout_gain:.2f} times as fast); step {self.plain_step_s:.1f} s, here "
            f"{self.step_s:.1f} ({self.step_gain:.2f}); all {self.num_tokens:,} tokens equal"
        )

    def write(self, file: Path) -> None:
        """Write it as JSON. Raises StorageError."""
        write_whole(file, json.dumps(asdict(self)) + "\n")

    @classmethod
    def read(cls, file: Path) -> Comparison | None:
        """What `write` wrote; None where there is none, or another thing."""
        try:
            tree = json.loads(file.read_bytes())
            numbers: dict[str, Any] = {
                name: (int if kind == "int" else float)(tree[name])
                for name, kind in cls.__annotations__.items()
            }
            return cls(**numbers)
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return None
