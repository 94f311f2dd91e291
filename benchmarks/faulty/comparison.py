"""Two run folders of one config beside each other: samples, tokens, rewards, metrics, final weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from rlhfspec.core.checkpoint_manifest import verify_checkpoint
from rlhfspec.core.metrics import read_metrics

_KEY = ("run_seed", "stream", "sample_index")
_EQUAL = ("response_token_ids", "policy_logprobs", "sampling_logprobs", "reward", "finish_reason")
_OF_THE_CLOCK = (
    "time/",
    "moves/",
    "pool/",
    "rollout/goodput",
    # what a lost instance, or a fuller one, makes again
    "rollout/num_recomputed",
    "rollout/num_preemptions",
    # how far a refit gets in its seconds, and what is accepted then
    "draft/",
    "rollout/acceptance_rate",
    "rollout/mean_acceptance_length",
)
"Metrics that two equal runs need not share."


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What a disturbed run has more, less or otherwise than the undisturbed one."""

    num_samples: int
    num_lost: int
    num_duplicated: int
    num_different: int
    "samples of which a token, a log-probability or the reward differs"
    weights_equal: bool
    metrics_different: Sequence[str]
    "names of those that differ in any iteration, beside those of the clock"

    @property
    def is_equal(self) -> bool:
        """Whether nobody could tell which was which."""
        wrong = self.num_lost or self.num_duplicated or self.num_different or self.metrics_different
        return self.weights_equal and not wrong


def compare_runs(undisturbed: Path, disturbed: Path) -> Comparison:
    """Compare all rollouts, the metrics, and the checksum of the last weights."""
    one, other = _samples(undisturbed), _samples(disturbed)
    counts = Counter(key for key, _ in other)
    expected, got = dict(one), dict(other)
    return Comparison(
        num_samples=len(one),
        num_lost=len(expected.keys() - got.keys()),
        num_duplicated=sum(count - 1 for count in counts.values()) + len(got.keys() - expected.keys()),
        num_different=sum(key in got and got[key] != value for key, value in expected.items()),
        weights_equal=final_checksum(undisturbed) == final_checksum(disturbed),
        metrics_different=_metrics_different(undisturbed, disturbed),
    )


def final_checksum(run: Path) -> str:
    """Of the target that the run ended with; its files are compared with their manifest."""
    return str(verify_checkpoint(run / "checkpoints" / "target")["parameter_checksum"])


def _samples(run: Path) -> list[tuple[Any, Mapping[str, Any]]]:
    return [
        ((file.name, *(row[name] for name in _KEY)), {name: row[name] for name in _EQUAL})
        for file in sorted((run / "rollouts").glob("iteration_*.parquet"))
        for row in pq.read_table(file, columns=[*_KEY, *_EQUAL]).to_pylist()
    ]


def _metrics_different(one: Path, other: Path) -> list[str]:
    rows, others = (read_metrics(run / "metrics.jsonl") for run in (one, other))
    if len(rows) != len(others):
        return [f"number of iterations: {len(rows)} and {len(others)}"]
    pairs = list(zip(rows, others, strict=True))
    names = sorted({name for pair in pairs for row in pair for name in row})
    return [
        name
        for name in names
        if not name.startswith(_OF_THE_CLOCK) and any(row.get(name) != its.get(name) for row, its in pairs)
    ]
