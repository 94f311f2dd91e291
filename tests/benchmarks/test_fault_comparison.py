"""Two runs are equal only where every sample is there once, with the same tokens, and the weights are the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhfspec.benchmarks.faulty.outcome import compare_runs
from rlhfspec.core.checkpoint_manifest import write_manifest


def row(sample: int, *tokens: int) -> dict[str, object]:
    logprobs = [-1.0] * len(tokens)
    return {
        "run_seed": 0,
        "stream": "train",
        "sample_index": sample,
        "response_token_ids": list(tokens),
        "policy_logprobs": logprobs,
        "sampling_logprobs": logprobs,
        "reward": 1.0,
        "finish_reason": "stop",
    }


def run(
    folder: Path, rows: list[dict[str, object]], checksum: str = "ab", kl: float = 0.5, seconds: float = 1.0
) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "rollouts").mkdir(parents=True)
    target = folder / "checkpoints" / "target"
    target.mkdir(parents=True)
    (target / "weights").write_text(checksum)
    write_manifest(target, model="target", weight_version=1, parameter_checksum=checksum)
    pq.write_table(pa.Table.from_pylist(rows), folder / "rollouts" / "iteration_0000.parquet")
    metrics = {"iteration": 0, "learner/approx_kl": kl, "time/iteration_s": seconds}
    (folder / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    return folder


ROWS = [row(0, 1, 2), row(1, 3)]


@pytest.mark.parametrize(
    ("rows", "checksum", "wrong"),
    [
        (ROWS, "ab", {}),
        (ROWS[:1], "ab", {"num_lost": 1}),
        ([*ROWS, ROWS[1]], "ab", {"num_duplicated": 1}),
        ([*ROWS, row(7, 3)], "ab", {"num_duplicated": 1}),
        ([ROWS[0], row(1, 4)], "ab", {"num_different": 1}),
        (ROWS, "cd", {"weights_equal": False}),
    ],
)
def test_what_differs_is_counted(tmp_path: Path, rows, checksum: str, wrong: dict[str, object]) -> None:
    found = compare_runs(run(tmp_path / "one", ROWS), run(tmp_path / "other", rows, checksum))
    counts = {"num_lost": 0, "num_duplicated": 0, "num_different": 0, "weights_equal": True} | wrong
    assert {name: getattr(found, name) for name in counts} == counts
    assert found.is_equal == (not wrong) and found.num_samples == 2


def test_metrics_differ_but_for_those_of_the_clock(tmp_path: Path) -> None:
    one = run(tmp_path / "one", ROWS)
    assert compare_runs(one, run(tmp_path / "other", ROWS, seconds=9.0)).is_equal
    found = compare_runs(one, run(tmp_path / "other", ROWS, kl=0.25))
    assert found.metrics_different == ["learner/approx_kl"] and not found.is_equal
    with (tmp_path / "other" / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 1}\n')
    assert compare_runs(one, tmp_path / "other").metrics_different == ["number of iterations: 1 and 2"]
