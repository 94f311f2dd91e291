"""Figures of `bench trl` from rows made by hand: what is over what, and which rewards both sides give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from byte_chat import save_byte_pair

from rlhfspec.benchmarks.memory.processes import peak_memory
from rlhfspec.benchmarks.peers.build import TRL_RELEASES, trl_folder
from rlhfspec.benchmarks.peers.trl_trainer import rewards
from rlhfspec.benchmarks.support.harness import Bench
from rlhfspec.benchmarks.trl import (
    _figures,
    _supervised_by_us,
    _write_examples,
    _write_pairs,
    by_trl,
    write_prompts,
)


def row(step_s: float) -> dict[str, float]:
    return {"step_s": step_s, "generate_s": 1.0, "reward": 0.5}


def test_seconds_are_theirs_over_ours_and_memory_ours_over_theirs(tmp_path: Path) -> None:
    bench = Bench("trl", out=tmp_path)
    bench.rows = [
        {"side": side, "step": step, "reward": step / 4, "peak_bytes": peak}
        for side, peak in (("trl", 4e9), ("rollouts", 5e9), ("ours", 6e9))
        for step in (1, 2)
    ]
    rows = {
        "trl": [row(12.0), row(10.0)],
        "rollouts": [row(8.0), row(5.0)],
        "ours": [],
        "trl_sft": [],
        "sft": [],
        "trl_dpo": [],
        "dpo": [],
    }
    _figures(bench, rows)
    values = bench.figures.values
    assert values["rollouts_over_trl"] == pytest.approx((1.5 + 2.0) / 2)
    assert values["memory_over_trl_rollouts"] == 1.25
    assert values["step_s_trl"] == 11.0
    assert values["last_reward_trl"] == 0.5
    assert "step_over_trl" not in values
    _figures(bench, rows | {"ours": [row(4.0), row(5.0)]})
    assert (values["step_over_trl"], values["memory_over_trl_ours"]) == (2.5, 1.5)


def order(folder: Path, *, rows: Path, task: str) -> dict[str, Any]:
    whole = {"model": folder / "target", "out": folder / "trl", "rows": rows}
    return {key: str(path) for key, path in whole.items()} | {
        "task": task,
        "steps": 2,
        "seed": 0,
        "threads": 2,
    }


@pytest.mark.slow
@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_both_sides_of_supervised_steps_have_the_same_losses(tmp_path: Path, task: str) -> None:
    trl = trl_folder(TRL_RELEASES[-1])
    if trl is None:
        pytest.skip("no TRL: python -m rlhfspec.benchmarks.peers.build --only trl (make bench-peers)")
    save_byte_pair(tmp_path)
    examples = _write_examples(tmp_path / "examples.jsonl")
    rows = examples if task == "sft" else _write_pairs(tmp_path / "pairs.jsonl", examples)
    theirs = by_trl(trl, order(tmp_path, rows=rows, task=task))
    ours = _supervised_by_us(task, tmp_path, tmp_path / "target", rows, 2, 0)
    for one, other in zip(theirs, ours, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("rollouts", ["own", "ours"])
def test_trl_trains_in_a_process_of_its_own(tmp_path: Path, rollouts: str) -> None:
    trl = trl_folder(TRL_RELEASES[-1])
    if trl is None:
        pytest.skip("no TRL: python -m rlhfspec.benchmarks.peers.build --only trl (make bench-peers)")
    save_byte_pair(tmp_path)
    prompts = write_prompts(tmp_path / "prompts.jsonl", 2)
    with peak_memory() as peak:
        rows = by_trl(trl, order(tmp_path, rows=prompts, task="grpo") | {"rollouts": rollouts})
    assert len(rows) == 2 and peak.bytes > 1 << 27
    for each in rows:
        assert 0.0 < each["generate_s"] < each["step_s"] and 0.0 < each["generate_cpu_s"] < each["step_cpu_s"]
        assert 32 <= each["tokens"] <= 32 * 32
        # by measured costs look-ups may not pay here
        assert each["acceptance"] >= 1.0 if rollouts == "ours" else each["acceptance"] == 1.0


def test_both_sides_are_paid_by_the_same_rule() -> None:
    said = ["An owl is a bird that hunts at night.", "owl"]
    paid = rewards([[{"role": "assistant", "content": text}] for text in said], ["owl", "owl"])
    assert paid == [1.0, 0.0]
