"""What `check --gpus` says of GPUs that are not here: configs of `configs/gpu` pass, others are told what would do."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlhfspec.cluster.cli import main
from rlhfspec.cluster.plan import run_check
from rlhfspec.cluster.plan.reward_plan import CheckedReward
from tests.helpers.described_models import described

CONFIGS = Path(__file__).resolve().parents[3] / "configs" / "gpu"
ONE_14B = {"models.target": "Qwen/Qwen2.5-14B-Instruct"}
ONE_32B = {"models.target": "Qwen/Qwen2.5-32B-Instruct"}
FULL = {"trainer.lora": "null"}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    described(monkeypatch, tmp_path / "hub")
    # a cluster that this shell would join is not asked
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "train.jsonl"
    file.write_text(
        "".join(json.dumps({"question": f"{i} + 1?", "answer": f"#### {i + 1}"}) + "\n" for i in range(256))
    )
    return file


def check(config: str, data: Path, gpus: str, **settings: object) -> int:
    sets = {"data.path": data, **settings}
    given = [one for key, value in sets.items() for one in ("--set", f"{key}={value}")]
    return main(["check", "--config", str(CONFIGS / config), *given, "--gpus", gpus])


@pytest.mark.parametrize("config", sorted(path.name for path in CONFIGS.iterdir()))
def test_a_config_runs_on_the_gpus_of_its_name(
    config: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    number = re.fullmatch(r".*_(\d)gpus?\.yaml", config)
    assert number is not None
    assert check(config, data, f"{number[1]}x79") == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert f"check passed: the config can run on {number[1]} GPUs of 79 GiB" in out
    assert f"and {number[1]} GPU, PACK" in out, "all of them"


REFUSED = {
    "all weights of 7B on one GPU": (
        "qwen2.5_7b_lora_1gpu.yaml",
        "1x79",
        FULL,
        r"a trainer needs 1\d\d\.\d+ GiB .*moments \d+.* share the model",
    ),
    "14B in the halves of 7B": (
        "qwen2.5_7b_8gpus.yaml",
        "8x79",
        ONE_14B,
        r"an instance needs .*; cluster\.generation\.num_gpus 0\.\d+ (or engine\.kv_cache_mb \d+ )?would do; ",
    ),
    "32B beside trainers": (
        "qwen2.5_7b_8gpus.yaml",
        "8x79",
        ONE_32B,
        r"an instance needs .*; cluster\.generation\.num_gpus 1 with engine\.kv_cache_mb \d+ would do",
    ),
    "all weights of 32B on four": (
        "qwen2.5_32b_lora_8gpus.yaml",
        "8x79",
        FULL,
        r"a trainer needs .* set trainer\.lora",
    ),
    "GPUs for each": (
        "qwen2.5_7b_8gpus.yaml",
        "8x79",
        {"cluster.generation.num_gpus": 1, "cluster.trainer.num_gpus": 1},
        r"cannot be placed on this machine: .* the machine has 8 GPU; missing: 8 GPU",
    ),
    "a config without any": (
        "qwen2.5_1.5b_1gpu.yaml",
        "1x79",
        {"cluster.generation.num_gpus": 0, "cluster.trainer.num_gpus": 0},
        r"--gpus is of GPUs, and the config asks for none; set cluster\.trainer\.num_gpus",
    ),
    "smaller ones": ("qwen2.5_1.5b_1gpu.yaml", "1x23", {}, r"a trainer needs|an instance needs"),
}


@pytest.mark.parametrize(("config", "gpus", "settings", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_what_does_not_fit_is_refused_in_one_line_that_says_what_to_set(
    config: str,
    gpus: str,
    settings: dict[str, object],
    said: str,
    data: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert check(config, data, gpus, **settings) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and re.search(said, lines[0]), lines


def test_14b_has_gpus_of_its_own_for_trainers_and_instances(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pools = {"trainer": 6, "generation": 2}
    alone = {f"cluster.{pool}.num_actors": number for pool, number in pools.items()}
    alone |= {f"cluster.{pool}.num_gpus": 1 for pool in pools}
    assert check("qwen2.5_7b_8gpus.yaml", data, "8x79", **ONE_14B, **alone) == 0, capsys.readouterr().err
    store = re.search(r"object store +([\d.]+) GiB", capsys.readouterr().out)
    assert store is not None and 27.5 < float(store[1]) < 2 * 27.5, "one version, for it learns or samples"


def test_what_would_do_does(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """14B, by what each refusal says, and each GPU shared by what then is asked for."""
    shares = {"cluster.trainer.num_gpus": 0.1, "cluster.generation.num_gpus": 0.3}
    settings: dict[str, object] = {"engine.max_running_samples": 16, "trainer.lora": "{rank: 32}"}
    settings |= shares | ONE_14B
    for _ in range(3):
        if check("qwen2.5_7b_8gpus.yaml", data, "8x79", **settings) == 0:
            break
        (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        key, value = re.findall(r"; (cluster\.\w+\.num_gpus) ([\d.]+)(?= would do| or )", error)[0]
        settings[key] = value
    assert "check passed" in capsys.readouterr().out
    assert all(settings[key] != before for key, before in shares.items())


def test_that_reward_models_on_gpus_are_not_planned_is_said(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checked = CheckedReward(num_params=7 * 10**9, functions=())
    monkeypatch.setattr(run_check, "check_reward", lambda *_: checked)
    said = (
        "what reward models take of GPUs (weights, a forward of reward.batch_size texts) is not in the plan"
    )
    model = {"reward.kind": "model", "reward.model": "somebody/a-judge", "cluster.reward.num_actors": 1}
    model["cluster.trainer.num_gpus"] = 0.4
    for gpus, is_said in ((0, False), (0.3, True)):
        scoring = {**model, "cluster.reward.num_gpus": gpus, "cluster.generation.num_gpus": 0.3}
        assert check("qwen2.5_7b_lora_1gpu.yaml", data, "1x300", **scoring) == 0, capsys.readouterr().err
        assert (said in capsys.readouterr().out) == is_said
