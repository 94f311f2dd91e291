"""What a verification found: what differs between the record of a run and what came again, and what is unproven."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np

from ...core.records import Completion, Reward


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that is not what it was."""

    file: str
    "relative to the run folder, or a path"
    what: str
    expected: str
    "as it comes out again, or as a manifest says"
    got: str
    "as it stands in the file"
    sample: int | None = None
    "its index"

    def __str__(self) -> str:
        who = "" if self.sample is None else f"sample {self.sample}: "
        return f"{self.file}: {who}{self.what}: expected {self.expected}, got {self.got}"


def completion_differences(
    file: str, recorded: Completion, again: Completion, *, ends: bool = True
) -> Iterator[Difference]:
    """Compare what a file says of a sample with its regeneration; the first position of each array that differs.

    `ends`: whether the regeneration had to find the response's end by itself.
    """
    index = recorded.key.sample_index
    for what, got, expected in (
        ("token id", recorded.token_ids, again.token_ids),
        ("policy log-probability", recorded.policy_logprobs, again.policy_logprobs),
        ("sampling log-probability", recorded.sampling_logprobs, again.sampling_logprobs),
    ):
        yield from _array_differences(file, index, what, got, expected)
    if ends and recorded.finish_reason != again.finish_reason:
        yield Difference(
            file=file,
            sample=index,
            what="finish reason",
            expected=str(again.finish_reason),
            got=str(recorded.finish_reason),
        )


def reward_differences(file: str, sample: int, recorded: Reward, again: Reward) -> Iterator[Difference]:
    """Compare a recorded reward and its parts with those computed again."""
    rows: list[tuple[str, float | None, float | None]] = [("reward", recorded.value, again.value)]
    for name in sorted(recorded.parts.keys() | again.parts.keys()):
        rows.append((f"reward part {name}", recorded.parts.get(name), again.parts.get(name)))
    for token, pair in enumerate(zip_longest(recorded.tokens, again.tokens)):
        rows.append((f"reward of token {token}", *pair))
    for what, got, expected in rows:
        if got != expected:
            yield Difference(file=file, sample=sample, what=what, expected=_said(expected), got=_said(got))


def _array_differences(
    file: str, index: int, what: str, got: np.ndarray, expected: np.ndarray
) -> Iterator[Difference]:
    count = min(len(got), len(expected))
    # bits: a negative zero is no zero, and a NaN is itself
    kind = np.dtype(f"u{expected.dtype.itemsize}")
    unlike = np.nonzero(got[:count].view(kind) != expected[:count].view(kind))[0]
    if len(unlike):
        first = int(unlike[0])
        others = f" and of {len(unlike) - 1} more tokens" if len(unlike) > 1 else ""
        yield Difference(
            file=file,
            sample=index,
            what=f"{what} of response token {first}{others}",
            expected=_said(expected[first]),
            got=_said(got[first]),
        )
    if len(got) != len(expected):
        yield Difference(
            file=file, sample=index, what=f"number of {what}s", expected=str(len(expected)), got=str(len(got))
        )


def _said(value: float | np.generic | None) -> str:
    """A number with every digit that tells it from its neighbours."""
    if value is None:
        return "none"
    if isinstance(value, np.generic):
        return f"{value:.9g}" if value.dtype == np.float32 else str(value)
    return repr(value)


@dataclass(slots=True, kw_only=True)
class Verification:
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
    faults: list[str] = field(default_factory=list)
    "what came of the run and cannot be right, however well its samples are proven"
    start_s: float = 0.0
    "until engines, tokenizer and prompts were there"
    seconds: float = 0.0
    "of verifying, without the start"
    generated_s: float = 0.0
    "that the run took to generate as many of its samples as were verified"

    @property
    def holds(self) -> bool:
        """Whether something was verified, nothing differs, and the run's outcome can be."""
        return self.num_regenerated > 0 and not self.differences and not self.faults
