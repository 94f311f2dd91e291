"""What the check, the memory plan and the first weights say of a target's own MTP layer."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.jobs.evaluate_models import evaluation_config
from rlhfspec.cluster.plan.drafts import what_drafts
from rlhfspec.cluster.plan.run_check import check_run
from rlhfspec.cluster.plan.run_plan import RunPlan
from rlhfspec.cluster.plan.run_profile import RunProfile
from rlhfspec.cluster.resume.checkpoints import kept_models
from rlhfspec.core.config import Config
from rlhfspec.core.config_io import config_from_dict
from rlhfspec.core.errors import ConfigError, ModelError
from rlhfspec.engine.drafters.head.published_head import head_checksum, pack_head
from tests.conftest import TinyPair
from tests.helpers.tiny_mimo import write_tiny_mimo


@pytest.fixture
def mimo(tiny_pair: TinyPair, tmp_path: Path) -> Callable[..., Path]:
    """A tiny MiMo with the pair's tokenizer."""

    def write(name: str, **changes: Any) -> Path:
        tokenizer = AutoTokenizer.from_pretrained(tiny_pair.target)
        ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        folder = write_tiny_mimo(tmp_path / name, vocab_size=len(tokenizer), **ids, **changes)
        tokenizer.save_pretrained(folder)
        return folder

    return write


def config_of(target: Path, draft: Path | None = None, **speculation: Any) -> Config:
    return config_from_dict(
        {
            "models": {"target": str(target), "draft": None if draft is None else str(draft)},
            "data": {"task": "chain", "limit": 8},
            "sampling": {"max_new_tokens": 20},
            "speculation": {"drafter": "mtp", "policy": "fixed", **speculation},
            "engine": {"max_running_samples": 4},
            "rollout": {"prompts_per_iteration": 8},
            "trainer": {"minibatch_size": 8},
        }
    )


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Config], RunPlan]:
    monkeypatch.setattr("rlhfspec.cluster.ray_start.machine.num_cores", lambda: 4)
    return lambda config: check_run(config, output_dir=tmp_path)


def test_the_check_describes_the_layer_and_reckons_it(mimo, check) -> None:
    config = config_of(mimo("mimo"))
    report = check(config)
    (line,) = [line for line in report.models.lines if line.startswith("MTP layer")]
    assert "0.0" in line and "it stays as it is" in line and "drafts, over and over" not in line
    plain = config.model_copy(
        update={"speculation": config.speculation.model_copy(update={"drafter": "none"})}
    )
    without = check(plain).memory
    assert report.memory.kv_pool_bytes > without.kv_pool_bytes
    assert report.memory.generation_bytes > without.generation_bytes
    # nothing of it is written with a checkpoint
    assert report.memory.disk_bytes == without.disk_bytes


def test_the_check_says_which_of_several_layers_drafts(mimo, check) -> None:
    report = check(config_of(mimo("mimo", num_mtp_layers=2)))
    assert any("the first of 2 drafts, over and over" in line for line in report.models.lines)


def test_a_target_without_a_layer_is_refused_and_another_checkpoint_may_bring_it(
    mimo, check, tiny_pair: TinyPair
) -> None:
    """A checkpoint of a run has no MTP layer: that of the model it began with serves."""
    folder = mimo("mimo")
    trained = mimo("trained", seed=2)
    index = trained / "model.safetensors.index.json"
    tree = json.loads(index.read_text())
    tree["weight_map"] = {key: file for key, file in tree["weight_map"].items() if "mtp" not in key}
    index.write_text(json.dumps(tree))
    with pytest.raises(ModelError, match=r"brings no MTP layer .*models\.draft"):
        check(config_of(trained))
    report = check(config_of(trained, draft=folder))
    assert any(line.startswith(f"MTP layer of {folder}") for line in report.models.lines)
    with pytest.raises(ModelError, match="does not fit the target: expected hidden size 32, got 64"):
        check(config_of(tiny_pair.target, draft=folder))


def test_what_a_profile_is_of_is_what_is_published(mimo, check) -> None:
    config = config_of(mimo("mimo"))
    described = RunProfile(config, check(config).inputs).described()
    assert described.draft_model.startswith("MTP layer on the last one's output")
    assert described.draft_weights == head_checksum(what_drafts(config).read())


def test_an_evaluation_of_a_checkpoint_without_the_layer_decodes_plainly(mimo) -> None:
    tree = config_of(mimo("mimo")).model_dump(mode="json")
    made = evaluation_config(tree, model="elsewhere", data=None, overrides=[], sampling={})
    assert made.speculation.drafter == "none"


def test_a_frozen_layer_is_not_trained_with_the_target(mimo) -> None:
    tree = config_of(mimo("mimo")).model_dump(mode="json")
    with pytest.raises(ConfigError, match="drafter mtp under policy fixed has no draft model to train"):
        config_from_dict(tree | {"drafter_training": {"mode": "cotrain"}})
    config = config_from_dict(tree)
    assert not config.trains_head and not config.refits_draft


def test_who_goes_on_from_the_last_weights_takes_the_layer_from_where_it_was_read(
    mimo, tmp_path: Path
) -> None:
    """A run writes none: its checkpoints hold what has learned."""
    config = config_of(mimo("mimo"))
    manifest, _ = pack_head(what_drafts(config).read(), weight_version=0)
    system: Any = SimpleNamespace(config=config, draft=SimpleNamespace(manifest=manifest))
    run = RunDir(path=tmp_path)
    assert kept_models(system, run) == {
        "target": str(run.checkpoint_dir("target")),
        "draft": config.models.target,
    }
