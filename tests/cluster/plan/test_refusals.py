"""What `train` refuses before Ray starts, `check` refuses in the same words: one table of ways to be refused."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import rlhfspec.cluster.run.loop
from rlhfspec.cluster.cli import main
from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.plan.run_check import check_run
from rlhfspec.cluster.ray_start import machine, ray_session
from rlhfspec.cluster.ray_start.ray_init import free_ports
from rlhfspec.core.config_io import load_config
from tests.conftest import TinyPair

Files = Path
"A folder with target/, draft/ and prompts.jsonl of this test's own."


def in_json(file: str, **values: object) -> Callable[[Files], None]:
    """Change a JSON file of the folder; a value None takes the key away."""

    def change(files: Files) -> None:
        held = json.loads((files / file).read_text()) | values
        kept = {key: value for key, value in held.items() if value is not None}
        (files / file).write_text(json.dumps(kept))

    return change


def in_weights(change: Callable[[dict[str, Any]], dict[str, Any]], model: str = "target") -> Callable:
    def apply(files: Files) -> None:
        file = files / model / "model.safetensors"
        save_file(change(load_file(file)), file, metadata={"format": "pt"})

    return apply


def rows(*given: object) -> Callable[[Files], None]:
    text = "".join(one if isinstance(one, str) else json.dumps(one) + "\n" for one in given)
    return lambda files: (files / "prompts.jsonl").write_text(text) and None


def write(name: str, text: str) -> Callable[[Files], None]:
    return lambda files: (files / name).write_text(text) and None


def remove(name: str) -> Callable[[Files], None]:
    return lambda files: (files / name).unlink()


def cut(name: str) -> Callable[[Files], None]:
    return lambda files: (files / name).write_bytes((files / name).read_bytes()[:-200]) and None


@dataclass(frozen=True, slots=True)
class Way:
    """What is changed, and a part of what is said."""

    said: str
    settings: dict[str, object] = field(default_factory=dict)
    change: Callable[[Files], None] = lambda files: None
    environment: dict[str, str] = field(default_factory=dict)


LONG_ROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "rope_theta": 1e4,
    "original_max_position_embeddings": 8,
}
WAYS = {
    "an unknown key": Way("unknown key sampling.temprature", {"sampling.temprature": 1}),
    "a key without effect": Way("kl_horizon is of kl_target", {"algorithm.kl_horizon": 5}),
    "spare time without a head": Way("which has none", {"drafter_training.spot": "on"}),
    "greedy sampling": Way("temperature must be above 0", {"sampling.temperature": 0}),
    "groups of one": Way("samples_per_prompt >= 2", {"algorithm.kind": "grpo"}),
    "an output folder in a file": Way(
        "cannot make a run folder", {"run.output_dir": "FILES/prompts.jsonl/x"}
    ),
    "a copy where none can be": Way("Protocol not known", {"run.copy_to": "nowhere-at-all://x"}),
    "more actors than cores": Way("cannot be placed on this machine", {"cluster.trainer.num_cpus": 5000}),
    "GPUs that are not here": Way("missing: ", {"cluster.trainer.num_gpus": 1}),
    "pools without labels": Way("pin_pools", {"cluster.pin_pools": True}),
    "one machine each": Way("STRICT_SPREAD", {"cluster.placement": "STRICT_SPREAD"}),
    "more trainers than responses": Way(
        "would never learn", {"cluster.trainer.num_actors": 2, "trainer.minibatch_size": 1}
    ),
    "more threads than cores": Way("only wait for one another", {"trainer.num_threads": 1000}),
    "no room for objects": Way("object_store_bytes 5 cannot", {"cluster.object_store_bytes": 5}),
    "no such port": Way(
        "dashboard_port must be", {"cluster.dashboard": True, "cluster.dashboard_port": 99_999_999}
    ),
    "a cluster that is gone": Way("cannot reach the Ray cluster", {"cluster.address": "GONE"}),
    "RAY_ADDRESS of a cluster that is gone": Way(
        "cannot reach the Ray cluster", environment={"RAY_ADDRESS": "GONE"}
    ),
    "a client's address that is gone": Way("cannot reach", {"cluster.address": "ray://GONE"}),
    "invariant on threads": Way(
        "needs engine.num_threads 1", {"engine.numerics": "invariant", "engine.num_threads": 2}
    ),
    "attention that is not invariant": Way(
        "is not invariant", {"engine.numerics": "invariant", "engine.attention": "sdpa"}
    ),
    "scored by threads": Way("invariant numerics", {"trainer.scoring": "engine", "engine.num_threads": 2}),
    "no model there": Way("does not exist", {"models.target": "FILES/other"}),
    "no weights": Way("holds no weights", change=remove("target/model.safetensors")),
    "weights cut off": Way("cut or damaged", change=cut("target/model.safetensors")),
    "tied with two values": Way(
        "are one weight",
        change=lambda files: (
            in_json("target/config.json", tie_word_embeddings=True)(files),
            in_weights(lambda held: held | {"lm_head.weight": held["model.embed_tokens.weight"] + 1})(files),
        )[1],
    ),
    "quantized": Way(
        "are quantized", change=in_json("target/config.json", quantization_config={"quant_method": "awq"})
    ),
    "a quantized draft": Way(
        "draft' are quantized",
        change=in_json("draft/config.json", quantization_config={"quant_method": "gptq"}),
    ),
    "compiled": Way(
        "_orig_mod.", change=in_weights(lambda held: {f"_orig_mod.{n}": t for n, t in held.items()})
    ),
    "weights of another size": Way("do not fit", change=in_json("target/config.json", intermediate_size=96)),
    "long rope": Way("positions change", change=in_json("target/config.json", rope_parameters=LONG_ROPE)),
    "chunked attention": Way(
        "chunked attention", change=in_json("target/config.json", attention_chunk_size=8)
    ),
    "an adapter beside the model": Way("adapter", change=write("target/adapter_config.json", "{}")),
    "no tokenizer": Way("tokenizer", change=remove("target/tokenizer.json")),
    "another draft vocabulary": Way("equal tokenizers", change=lambda files: other_tokenizer(files)),
    "a head that is a model": Way("head", {"speculation.drafter": "head"}),
    "no MTP layer": Way("no MTP layer", {"speculation.drafter": "mtp"}),
    "adapters on nothing": Way("no_such_layer", {"trainer.lora": {"targets": ["no_such_layer"]}}),
    "no data there": Way("prompts2", {"data.path": "FILES/prompts2.jsonl"}),
    "a missing column": Way("query", {"data.prompt_field": "query"}),
    "a row that is no JSON": Way("prompts.jsonl", change=rows({"question": "01:a=", "answer": "b"}, "{]\n")),
    "an empty file": Way("prompts.jsonl", change=rows("")),
    "a template that fails": Way(
        "template",
        {"data.chat": True, "data.chat_template": "{{ nothing.at.all }}"},
    ),
    "a template that is none": Way("template", {"data.chat": True, "data.chat_template": "{% if %}"}),
    "longer than the context": Way("context holds 128", {"sampling.max_new_tokens": 500}),
    "a stop token that is none": Way("stop_token_ids", {"sampling.stop_token_ids": [10**6]}),
    "no reward of that name": Way("unknown reward.kind", {"reward.kind": "nothing"}),
    "a reward module that is not there": Way("no_such_module", {"reward.kind": "no_such_module:score"}),
    "a reward model that is none": Way(
        "none does not exist", {"reward.kind": "model", "reward.model": "FILES/none"}
    ),
    "no environment of that name": Way(
        "no_such_module",
        {"environment.kind": "no_such_module:World", "environment.max_observation_tokens": 8},
    ),
    "nothing left to train on": Way(
        "no training prompt is left", {"evaluation.every": 1, "evaluation.holdout": 10_000}
    ),
    "no room for one sample": Way("have no room for one sample", {"engine.kv_cache_mb": 0.001}),
    "more memory than there is": Way("available here", {"engine.max_running_samples": 10**8}),
    "no profile there": Way(
        "profile", {"speculation.policy": "goodput", "speculation.profile": "FILES/no-profile"}
    ),
    "a cache in a file": Way(
        "set run.cache_dir", {"speculation.policy": "goodput", "run.cache_dir": "FILES/prompts.jsonl"}
    ),
}
if not torch.cuda.is_available():
    WAYS["CUDA that is not here"] = Way("engine.device is cuda", {"engine.device": "cuda"})
if importlib.util.find_spec("wandb") is None:
    WAYS["a tracker that is not installed"] = Way("package wandb", {"tracking.wandb": {"project": "x"}})


def other_tokenizer(files: Files) -> None:
    from rlhfspec.learning.models.tokenization import character_tokenizer

    character_tokenizer("zyxw").save_pretrained(files / "draft")


@pytest.fixture
def files(tmp_path: Path, tiny_pair: TinyPair) -> Files:
    for model in ("target", "draft"):
        shutil.copytree(getattr(tiny_pair, model), tmp_path / model)
    rows(*({"question": f"0{i}:a+1=", "answer": "b"} for i in range(1, 5)))(tmp_path)
    return tmp_path


@pytest.fixture
def would_start(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where `train` would go on to start Ray."""
    starts: list[str] = []
    monkeypatch.setattr(rlhfspec.cluster.run.loop, "run_training", lambda *_, **__: starts.append("Ray"))
    # other tests of this process may share a Ray, which a run would take
    monkeypatch.setattr(ray_session.ray, "is_initialized", lambda: False)
    return starts


def config_of(files: Files, settings: dict[str, object], gone: str) -> Path:
    tree: dict[str, Any] = {
        "run": {"output_dir": str(files / "runs"), "cache_dir": str(files / "cache")},
        "models": {"target": str(files / "target"), "draft": str(files / "draft")},
        "data": {"path": str(files / "prompts.jsonl")},
        "reward": {"kind": "chain"},
        "sampling": {"max_new_tokens": 32},
        "speculation": {"policy": "fixed"},
        "engine": {"max_running_samples": 4},
        "trainer": {"max_tokens_per_forward": 256, "num_threads": 1},
        "cluster": {"dashboard": False, "generation": {"num_actors": 1}, "environment": {"num_cpus": 0.1}},
    }
    for key, value in settings.items():
        *sections, leaf = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        text = isinstance(value, str)
        node[leaf] = str(value).replace("FILES", str(files)).replace("GONE", gone) if text else value
    file = files / "run.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def refused(command: str, capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert main([command, *map(str, argv)]) == 2, capsys.readouterr()
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    # what is available changes from moment to moment, and so do a new run's name and an old one's age
    return re.sub(r"[\d.,]+ GiB|-\d{8}-\d{6}|heartbeat .* ago", "...", lines[0])


def test_the_table_has_enough_ways() -> None:
    assert len(WAYS) >= 40


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_check_refuses_what_train_refuses_in_the_same_words(
    way: Way,
    files: Files,
    would_start: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone = f"127.0.0.1:{free_ports(1)[0]}"
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name, value in way.environment.items():
        monkeypatch.setenv(name, value.replace("GONE", gone))
    way.change(files)
    file = config_of(files, way.settings, gone)
    said = refused("check", capsys, "--config", file)
    assert way.said in said
    assert refused("train", capsys, "--config", file) == said
    assert not would_start
    assert not (files / "runs").exists(), "a run that is refused leaves no folder"


def test_bfloat16_of_a_processor_without_it_is_refused_alike(
    files: Files, would_start: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = config_of(files, {"trainer.compute_dtype": "bfloat16"}, "")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    for has_it in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda has_it=has_it: has_it)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        if has_it:
            assert main(["check", "--config", str(file)]) == 0
            capsys.readouterr()
    said = refused("check", capsys, "--config", file)
    assert "trainer.compute_dtype is bfloat16, which needs instructions" in said
    assert refused("train", capsys, "--config", file) == said
    assert not would_start


def test_activations_are_computed_anew_where_the_plan_does_not_fit_otherwise_and_check_says_so(
    files: Files, would_start: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for all but a part of the activations."""
    tokens = {"trainer.max_tokens_per_forward": 1 << 16}
    settings = load_config(config_of(files, tokens, ""))
    plans = [
        check_run(settings.model_copy(update={"trainer": trainer}), output_dir=files / "runs")
        for trainer in (
            settings.trainer,
            settings.trainer.model_copy(update={"gradient_checkpointing": True}),
        )
    ]
    kept, anew = (plan.memory.total_bytes for plan in plans)
    assert not plans[0].memory.checkpoints and plans[0].config.trainer.gradient_checkpointing == "auto"
    monkeypatch.setattr(machine, "memory_bytes", lambda: (kept + anew) // 2)
    file = config_of(files, tokens, "")
    assert main(["check", "--config", str(file)]) == 0
    assert "computed anew (trainer.gradient_checkpointing)" in capsys.readouterr().out
    assert main(["train", "--config", str(file)]) == 0
    assert would_start == ["Ray"]
    (made,) = (files / "runs").iterdir()
    assert load_config(RunDir.open(made).config_file).trainer.gradient_checkpointing is True
    kept_only = config_of(files, tokens | {"trainer.gradient_checkpointing": False}, "")
    assert "of memory but" in refused("check", capsys, "--config", kept_only)
    monkeypatch.setattr(machine, "memory_bytes", lambda: anew - 1)
    assert "of memory but" in refused("check", capsys, "--config", config_of(files, tokens, ""))


def test_a_run_that_is_not_refused_gets_as_far_as_ray(
    files: Files, would_start: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = config_of(files, {}, "")
    assert main(["check", "--config", str(file)]) == 0
    assert not would_start
    assert main(["train", "--config", str(file)]) == 0
    assert would_start == ["Ray"]


def test_out_names_the_run_folder_itself(
    files: Files, would_start: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = config_of(files, {}, ""), files / "here" / "own"
    named = ("--config", file, "--out", out)
    assert main(["train", *map(str, named), "--dry-run"]) == 0
    assert not out.exists()
    assert main(["train", *map(str, named)]) == 0
    assert RunDir.open(out).config_file.is_file() and not (files / "runs").exists()
    assert would_start == ["Ray"]
    assert "is there already; expected a new folder" in refused("train", capsys, *named)
    assert "must outlive the job" in refused(
        "train", capsys, *named[:3], files / "runtime_resources" / "working_dir_files" / "x"
    )
    for place in (out, "auto"):
        words = refused("train", capsys, "--resume", place, *named)
        assert "expected none beside --resume" in words
    assert would_start == ["Ray"]


@pytest.mark.parametrize(
    ("state", "argv", "said"),
    [
        (None, (), "is not a run folder"),
        ("running", (), "is not cut off"),
        ("interrupted", (), "expected a whole state in checkpoints"),
        ("interrupted", ("--set", "sampling.temperature=0.5"), "sampling.temperature was 1.0, now 0.5"),
        ("interrupted", ("--config", "other.yaml"), "expected no --config beside it"),
    ],
)
def test_a_run_that_cannot_be_gone_on_with_is_refused_alike(
    state: str | None,
    argv: tuple[str, ...],
    said: str,
    files: Files,
    would_start: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = files / "runs" / "run"
    if state is not None:
        run_dir = RunDir.create(load_config(config_of(files, {}, "")), folder)
        run_dir.set_status(state)
    words = refused("check", capsys, "--resume", folder, *argv)
    assert said in words
    assert refused("train", capsys, "--resume", folder, *argv) == words
    assert not would_start
