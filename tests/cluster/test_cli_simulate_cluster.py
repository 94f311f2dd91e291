"""`rlhfspec simulate cluster`: tables, JSON, sweep, bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hand_profile import hand_cost, hand_profile
from refused_command import refused

from rlhfspec.cluster.cli import main
from rlhfspec.profiles.profile import save_profile

SMALL = (
    "simulate",
    "cluster",
    *("--set", "pools.instances=2", "--set", "lengths.samples=8", "--set", "lengths.max_new_tokens=64"),
    *("--set", "step.steps=1"),
)


def test_it_runs_without_a_file_and_writes_what_it_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "cluster.json"
    assert main([*SMALL, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    tree = json.loads(out.read_text())
    for name in ("plain", "speculative"):
        assert f"{tree[name]['rollout_s']:.2f}" in shown and f"{tree[name]['step_s']:.2f}" in shown
    assert f"at most {tree['step_bound']:.2f}" in " ".join(shown.split())
    assert tree["config"]["pools"]["instances"] == 2
    names = [row["name"] for row in tree["assumptions"]]
    assert "device.memory_share" in names and all(row["source"] for row in tree["assumptions"])


def test_the_shipped_example_runs(tmp_path: Path) -> None:
    file = Path(__file__).resolve().parents[2] / "configs" / "simulated" / "qwen3_235b_gb200.yaml"
    out = tmp_path / "cluster.json"
    smaller = ("--set", "lengths.samples=64", "--set", "lengths.max_new_tokens=256")
    assert main(["simulate", "cluster", "--config", str(file), *smaller, "--out", str(out)]) == 0
    tree = json.loads(out.read_text())
    assert tree["memory"]["instance_fits"] and tree["memory"]["trainer_fits"]
    assert tree["rollout_speedup"] > 1.0


def test_a_file_and_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "profile"
    save_profile(hand_profile(0.8, hand_cost()), folder)
    file = tmp_path / "cluster.yaml"
    lengths = tmp_path / "lengths.jsonl"
    lengths.write_text("16\n32\n")
    file.write_text(
        f"device: {{profile: {folder}}}\nlengths: {{samples: 4, file: {lengths}}}\n"
        "pools: {instances: 2, trainer_gpus: 1}\nstep: {steps: 1}\nlearner: {measured_s: 1.5}\n"
    )
    out = tmp_path / "cluster.json"
    assert main(["simulate", "cluster", "--config", str(file), "--out", str(out)]) == 0
    tree = json.loads(out.read_text())
    assert tree["levels"] == [] and tree["training"]["update_s"] == 1.5
    # a forward of 10 ms, so tens of tokens take tenths of seconds, and no data sheet does
    assert 0.16 < tree["plain"]["rollout_s"] < 0.6
    assert "measured costs" in capsys.readouterr().out
    ahead = ("--set", "step.look_ahead=auto", "--out", str(out))
    assert main(["simulate", "cluster", "--config", str(file), *ahead]) == 0
    sooner = json.loads(out.read_text())["plain"]
    assert 0 < sooner["proved_tokens"] <= sooner["attempted_tokens"]
    assert sooner["rollout_s"] < tree["plain"]["rollout_s"] and "look-ahead: " in capsys.readouterr().out


def test_a_sweep_names_the_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sweep.json"
    argv = [*SMALL, "--set", "sweep={step.staleness: [0, 1]}", "--sweep"]
    assert main([*argv, "--out", str(out)]) == 0
    tree = json.loads(out.read_text())
    assert [row["values"] for row in tree["sweep"]] == [{"step.staleness": 0}, {"step.staleness": 1}]
    assert tree["best"] == {"step.staleness": 1}
    assert "best: staleness 1" in capsys.readouterr().out


def test_bad_input_gets_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean 'pools'" in refused(capsys, "simulate", "cluster", "--set", "pool.instances=2")
    assert "does not exist" in refused(capsys, "simulate", "cluster", "--config", tmp_path / "none.yaml")
    assert "is a folder" in refused(capsys, "simulate", "cluster", "--out", tmp_path)
    assert "make it first" in refused(capsys, "simulate", "cluster", "--out", tmp_path / "none" / "a.json")
    assert "no file of lengths" in refused(capsys, *SMALL, "--set", f"lengths.file={tmp_path / 'none.jsonl'}")
    assert "cannot read" in refused(capsys, *SMALL, "--set", f"model.config={tmp_path / 'none.json'}")
    assert "no 8-bit floats" in refused(
        capsys, *SMALL, "--set", "device.name=A100", "--set", "model.precision=fp8"
    )
    wide = refused(capsys, *SMALL, "--set", "model.dimensions={hidden_size: 8192}")
    assert "num_hidden_layers expects a count" in wide
