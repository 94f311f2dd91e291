"""Rollouts as Parquet, one file an iteration, one row a sample, in the order of the sample index."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlhfspec.core.files import write_whole
from rlhfspec.core.records import Rollout

SCHEMA_VERSION = "4"
"1 had no advantages, 2 one weight version a sample, 3 whether caches of older weights were kept."

SCHEMA = pa.schema(
    [
        ("run_seed", pa.uint64()),
        ("stream", pa.string()),
        ("sample_index", pa.uint64()),
        ("group_id", pa.int64()),
        ("prompt_id", pa.int64()),
        ("prompt", pa.string()),
        ("reference", pa.string()),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("response", pa.string()),
        ("response_token_ids", pa.list_(pa.int32())),
        ("policy_logprobs", pa.list_(pa.float32())),
        ("sampling_logprobs", pa.list_(pa.float32())),
        ("response_sampled", pa.list_(pa.bool_())),
        ("reward", pa.float64()),
        ("reward_parts", pa.map_(pa.string(), pa.float64())),
        ("advantage", pa.float32()),
        ("finish_reason", pa.string()),
        ("weight_version", pa.int64()),
        ("span_versions", pa.list_(pa.int32())),
        ("span_positions", pa.list_(pa.int32())),
        ("epoch", pa.int32()),
        ("instance", pa.string()),
        ("num_decode_steps", pa.int32()),
        ("num_accepted_tokens", pa.int32()),
    ],
    metadata={"schema_version": SCHEMA_VERSION},
)


def write_rollouts(
    path: Path, rollouts: Sequence[Rollout], advantages: Sequence[float | None] | None = None
) -> None:
    """Write the file whole or not at all. Raises StorageError.

    `advantages` are the samples' means, null of those that it has not computed, or not learned from.
    """
    rows = [_row(rollout) for rollout in rollouts]
    for row, advantage in zip(rows, advantages or [None] * len(rows), strict=True):
        row["advantage"] = advantage
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    file = BytesIO()
    pq.write_table(table, file, compression="zstd")
    write_whole(path, file.getvalue())


def _row(rollout: Rollout) -> dict[str, object]:
    prompt, completion, reward = rollout.prompt, rollout.completion, rollout.reward
    return {
        "run_seed": completion.key.run_seed,
        "stream": str(completion.key.stream),
        "sample_index": completion.key.sample_index,
        "group_id": completion.group_id,
        "prompt_id": prompt.prompt_id,
        "prompt": prompt.text,
        "reference": prompt.reference,
        "prompt_token_ids": prompt.token_ids.astype(np.int32),
        "response": rollout.response_text,
        "response_token_ids": completion.token_ids.astype(np.int32),
        "policy_logprobs": completion.policy_logprobs,
        "sampling_logprobs": completion.sampling_logprobs,
        # null where all were sampled
        "response_sampled": completion.sampled,
        "reward": reward.value,
        "reward_parts": list(reward.parts.items()),
        "finish_reason": str(completion.finish_reason),
        # of the last token; where a response comes of several: each one, and its first token
        "weight_version": completion.weight_spans[-1].weight_version,
        "span_versions": _spans([span.weight_version for span in completion.weight_spans]),
        "span_positions": _spans([span.first_position for span in completion.weight_spans]),
        "epoch": completion.epoch,
        "instance": completion.instance,
        "num_decode_steps": completion.num_decode_steps,
        "num_accepted_tokens": completion.num_accepted_tokens,
    }


def _spans(numbers: list[int]) -> list[int] | None:
    return numbers if len(numbers) > 1 else None
