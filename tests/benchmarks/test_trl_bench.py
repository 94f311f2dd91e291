"""Figures of `bench trl` from rows made by hand: what is over what, and which rewards both sides give."""

from __future__ import annotations

from pathlib import Path

import pytest
from byte_chat import save_byte_pair

from benchmarks.peers.build import TRL_RELEASES, trl_folder
from benchmarks.peers.trl_trainer import rewards
from benchmarks.support.harness import Bench
from benchmarks.trl import _by_trl, _figures, _write_prompts, peak_memory


def row(step_s: float) -> dict[str, float]:
    return {"step_s": step_s, "generate_s": 1.0, "reward": 0.5, "tokens": 64.0, "acceptance": 1.0}


def test_seconds_are_theirs_over_ours_and_memory_ours_over_theirs(tmp_path: Path) -> None:
    bench = Bench("trl", out=tmp_path)
    bench.rows = [{"side": "trl", "peak_bytes": 4e9}, {"side": "rollouts", "peak_bytes": 5e9}]
    rows = {"trl": [row(12.0), row(10.0)], "rollouts": [row(8.0), row(5.0)], "ours": []}
    _figures(bench, rows)
    values = bench.figures.values
    assert values["rollouts_over_trl"] == pytest.approx((1.5 + 2.0) / 2)
    assert values["memory_over_trl_rollouts"] == 1.25
    assert values["step_s_trl"] == 11.0
    assert "step_over_trl" not in values
    bench.rows.append({"side": "ours", "peak_bytes": 6e9})
    _figures(bench, rows | {"ours": [row(4.0), row(5.0)]})
    assert (values["step_over_trl"], values["memory_over_trl_ours"]) == (2.5, 1.5)


@pytest.mark.slow
@pytest.mark.parametrize("rollouts", ["own", "ours"])
def test_trl_trains_in_a_process_of_its_own(tmp_path: Path, rollouts: str) -> None:
    trl = trl_folder(TRL_RELEASES[-1])
    if trl is None:
        pytest.skip("no TRL: python -m benchmarks.peers.build --only trl (make bench-peers)")
    save_byte_pair(tmp_path)
    prompts = _write_prompts(tmp_path / "prompts.jsonl", 2)
    with peak_memory() as peak:
        rows = _by_trl(tmp_path, trl, tmp_path / "target", prompts, 2, rollouts)
    assert len(rows) == 2 and peak[0] > 1 << 27
    for each in rows:
        assert 0.0 < each["generate_s"] < each["step_s"] and 0.0 < each["generate_cpu_s"] < each["step_cpu_s"]
        assert 32 <= each["tokens"] <= 32 * 32
        assert (each["acceptance"] > 1.0) == (rollouts == "ours")


def test_both_sides_are_paid_by_the_same_rule() -> None:
    said = ["An owl is a bird that hunts at night.", "owl"]
    paid = rewards([[{"role": "assistant", "content": text}] for text in said], ["owl", "owl"])
    assert paid == [1.0, 0.0]
