"""What a verification found."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from rlhfspec.cluster.proof.difference import Difference


@dataclass(slots=True, kw_only=True)
class Proof:
    """What was verified, and what came of it."""

    seed: int
    "that drew the samples"
    num_recorded: int = 0
    "samples in the rollout files"
    num_regenerated: int = 0
    num_tokens: int = 0
    num_rewards: int = 0
    num_checkpoints: int = 0
    differences: list[Difference] = field(default_factory=list)
    unverified: Counter[str] = field(default_factory=Counter)
    "samples by the reason why they cannot be generated again"
    notes: list[str] = field(default_factory=list)
    "what else was not verified"
    start_s: float = 0.0
    "until engines, tokenizer and prompts were there"
    seconds: float = 0.0
    "of verifying, without the start"
    generated_s: float = 0.0
    "that the run took to generate as many of its samples as were verified"

    @property
    def holds(self) -> bool:
        """Whether something was verified, and nothing differs."""
        return self.num_regenerated > 0 and not self.differences
