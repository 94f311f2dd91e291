"""Samples that people read: a few best, worst and random ones of an iteration, as Markdown."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...core.outside import visible
from ...core.records import Rollout

_MOST_CHARS = 4000
"Of a prompt or a response that are shown; the Parquet file has all."


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """One sample of the table."""

    sample_index: int
    prompt: str
    response: str
    reference: str = ""
    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    advantage: float | None = None
    "mean over its tokens; None where no update has used it"
    finish_reason: str
    num_tokens: int

    @classmethod
    def of(cls, rollout: Rollout, advantage: float | None) -> SampleRow:
        """Of a scored sample."""
        return cls(
            sample_index=rollout.completion.key.sample_index,
            prompt=rollout.prompt.text,
            response=rollout.response_text,
            reference=rollout.prompt.reference,
            reward=rollout.reward.value,
            parts=rollout.reward.parts,
            advantage=advantage,
            finish_reason=str(rollout.completion.finish_reason),
            num_tokens=rollout.completion.num_sampled_tokens,
        )

    @property
    def columns(self) -> dict[str, Any]:
        """For a table of another tool."""
        return {
            "sample_index": self.sample_index,
            "prompt": self.prompt,
            "response": self.response,
            "reference": self.reference,
            "reward": self.reward,
            "parts": ", ".join(f"{name} {value:.4g}" for name, value in self.parts.items()),
            "advantage": self.advantage,
            "finish_reason": self.finish_reason,
            "tokens": self.num_tokens,
        }

    @property
    def facts(self) -> str:
        """Everything but the texts, in one line."""
        parts = "".join(f", {name} {value:.4g}" for name, value in self.parts.items())
        advantage = "" if self.advantage is None else f", advantage {self.advantage:+.3f}"
        return f"reward {self.reward:.4g}{parts}{advantage}, {self.num_tokens} tokens, ended by {self.finish_reason}"


def choose_samples(rows: Sequence[SampleRow], count: int, *, seed: int) -> list[tuple[str, SampleRow]]:
    """Up to `count` samples and why each was chosen, none twice: a third each of best, worst and random.

    All are random where all rewards are equal.
    """
    ordered = sorted(range(len(rows)), key=lambda i: (-rows[i].reward, rows[i].sample_index))
    count = min(count, len(rows))
    num_best, num_worst = -(-count // 3), -(-(count - 1) // 3) if count else 0
    if len({row.reward for row in rows}) == 1:
        num_best = num_worst = 0
    best = ordered[:num_best]
    worst = ordered[num_best:][::-1][:num_worst]
    left = ordered[num_best : len(ordered) - num_worst]
    drawn = np.random.default_rng([seed, 0x5A]).permutation(len(left))[: count - num_best - num_worst]
    random = sorted((left[i] for i in drawn), key=lambda i: rows[i].sample_index)
    return [
        (why, rows[i])
        for why, places in (("best", best), ("worst", worst), ("random", random))
        for i in places
    ]


def as_markdown(title: str, chosen: Sequence[tuple[str, SampleRow]]) -> str:
    """The table as Markdown: a heading a sample, its texts fenced so that nothing in them is taken for Markdown.

    What a terminal would obey is written out.
    """
    parts = [f"# {visible(title)}\n"]
    for why, row in chosen:
        parts.append(f"## Sample {row.sample_index} ({why})\n\n{visible(row.facts)}\n")
        parts.append(f"Prompt\n{_fenced(row.prompt)}\n\nResponse\n{_fenced(row.response)}\n")
        if row.reference:
            parts.append(f"Reference\n{_fenced(row.reference)}\n")
    return "\n".join(parts)


def _fenced(text: str) -> str:
    if len(text) > _MOST_CHARS:
        text = f"{text[:_MOST_CHARS]}\n... ({len(text) - _MOST_CHARS:,} more characters)"
    text = visible(text)
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"
