"""What is wrong with a draft head is said before a run starts, in one error; what is right with it, by the check."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma2Config, LlamaConfig

from rlhfspec.cluster.plan.drafts import what_drafts
from rlhfspec.cluster.plan.run_check import check_run
from rlhfspec.cluster.plan.run_plan import RunPlan
from rlhfspec.core.config import Config
from rlhfspec.core.config_io import apply_overrides, config_from_dict
from rlhfspec.core.errors import ConfigError, ModelError
from rlhfspec.engine.drafters.head.head_weights import save_head
from rlhfspec.engine.weights.loading import load_causal_lm
from rlhfspec.engine.weights.weight_files import weights_digest
from tests.conftest import TinyPair
from tests.helpers.random_heads import random_head


@pytest.fixture
def head(tiny_pair: TinyPair, tmp_path: Path) -> Path:
    target: Any = load_causal_lm(str(tiny_pair.target), "float32")
    save_head(tmp_path / "head", random_head(target, draft_vocab_size=7))
    return tmp_path / "head"


@pytest.fixture
def config(tiny_pair: TinyPair) -> Callable[[Path | None], Config]:
    def of(draft: Path | None) -> Config:
        return config_from_dict(
            {
                "models": {"target": str(tiny_pair.target), "draft": None if draft is None else str(draft)},
                "data": {"task": "chain", "limit": 8},
                "sampling": {"max_new_tokens": 20},
                "speculation": {"drafter": "head", "policy": "fixed"},
                "engine": {"max_running_samples": 4},
                "rollout": {"prompts_per_iteration": 8},
                "trainer": {"minibatch_size": 8},
            }
        )

    return of


@pytest.fixture
def check(config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], RunPlan]:
    monkeypatch.setattr("rlhfspec.cluster.ray_start.machine.num_cores", lambda: 4)
    return lambda draft: check_run(config(draft), output_dir=tmp_path)


def changed(head: Path, **changes: Any) -> Path:
    file = head / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return head


def test_the_check_describes_a_head_and_reckons_it(head: Path, check, config, tmp_path: Path) -> None:
    report = check(head)
    assert any(f"draft head {head}" in line and "7 of the target's" in line for line in report.models.lines)
    # a head has one layer's cache of its own
    without = check_run(without_draft(config(head)), output_dir=tmp_path).memory
    assert report.memory.kv_pool_bytes > without.kv_pool_bytes


def test_what_only_generates_trains_no_head(head: Path, check) -> None:
    plan = check(head)
    assert plan.models.drafts.frozen_because == "" and plan.generation_spec("gen-0").spot is not None
    alone = plan.generating()
    assert alone.models.drafts.frozen_because == "drafter_training.spot is off"
    assert alone.generation_spec("gen-0").spot is None and not alone.topology.trainer


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ([], "the head is trained by instances that have no samples, from at most 256 MB"),
        (["drafter_training.spot=off"], "the head stays as it is: drafter_training.spot is off"),
        (["drafter_training.refit=false"], "the head stays as it is: drafter_training.refit is false"),
        (["speculation.policy=off"], "the head stays as it is: speculation.policy is off"),
        (["engine.device=cuda"], "the head stays as it is: instances on GPUs train none so far"),
    ],
)
def test_the_check_says_whether_a_head_will_be_trained(config, changes: list[str], line: str) -> None:
    tree = config(Path("head")).model_dump(mode="json")
    drafts = what_drafts(config_from_dict(apply_overrides(tree, changes)))
    assert drafts.describe_training(LlamaConfig()).startswith(line)


def test_a_target_that_says_more_than_its_norm_and_output_teaches_none(config, head: Path) -> None:
    """Gemma's norm adds 1 to its gain, and some of its kin cap their logits."""
    tree = config(head).model_dump(mode="json") | {"drafter_training": {"spot": "auto"}}
    assert "a 'gemma2' target teaches none" in what_drafts(config_from_dict(tree)).describe_training(
        Gemma2Config()
    )


def test_a_head_is_not_trained_on_gpus(config) -> None:
    tree = config(Path("head")).model_dump(mode="json")
    with pytest.raises(ConfigError, match=r"drafter_training\.spot is on, but instances decode on GPUs"):
        config_from_dict(apply_overrides(tree, ["engine.device=cuda", "drafter_training.spot=on"]))


def without_draft(config: Config) -> Config:
    return config.model_copy(
        update={"speculation": config.speculation.model_copy(update={"drafter": "none"})}
    )


def test_a_head_must_be_named(config) -> None:
    with pytest.raises(ConfigError, match=r"drafter is 'head' but models\.draft is null; name the folder"):
        config(None)


def with_drafter(config: Config, drafter: str, draft: Path) -> Config:
    changes = [f"speculation.drafter={drafter}", f"models.draft={draft}"]
    return config_from_dict(apply_overrides(config.model_dump(mode="json"), changes))


def test_a_head_given_as_a_draft_model_is_called_one(head: Path, check, config, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds a draft head, .* set speculation\.drafter to head"):
        check_run(with_drafter(config(head), "model", head), output_dir=tmp_path)


@pytest.mark.parametrize(
    ("drafter", "draft", "said"),
    [
        ("suffix", "draft", "models.draft has no effect: speculation takes none"),
        ("none", "draft", "models.draft has no effect: speculation takes none"),
        ("model", "target", "models.draft is the target itself"),
        ("model", "copy", "models.draft is the target itself"),
        ("model", "draft", None),
    ],
)
def test_a_draft_that_gains_nothing_is_said_by_check_and_at_the_start(
    config, check, tiny_pair: TinyPair, tmp_path: Path, drafter: str, draft: str, said: str | None
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(tiny_pair.target, folder)
    named = {"draft": tiny_pair.draft, "target": tiny_pair.target, "copy": folder}[draft]
    plan = check_run(with_drafter(config(named), drafter, named), output_dir=tmp_path)
    for lines in (plan.notes, plan.report):
        doubts = [line for line in lines if line.strip().startswith("models.draft ")]
        assert len(doubts) == (said is not None) and (said is None or said in doubts[0])


def test_a_folder_that_is_no_head_is_refused(check, tiny_pair: TinyPair, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no draft head: expected an EAGLE-3 architecture"):
        check(tiny_pair.draft)
    with pytest.raises(ModelError, match=r"cannot be read: expected a folder with config\.json"):
        check(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden_size": 64}, "of EAGLE-3's form: expected fc.weight"),
        ({"vocab_size": 4096}, "of EAGLE-3's form: expected t2d"),
        (
            {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
            "layer 2, the target has 2 layers",
        ),
    ],
)
def test_a_head_of_another_target_is_refused(head: Path, check, sizes, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        check(changed(head, **sizes))


def test_a_head_whose_sizes_go_together_but_not_with_the_target_is_refused(check, tmp_path: Path) -> None:
    from tests.helpers.tiny_llama import tiny_llama

    save_head(tmp_path / "other", random_head(tiny_llama(hidden_size=16, head_dim=4)))
    with pytest.raises(ModelError, match=r"does not fit the target: expected hidden size 32, got 16"):
        check(tmp_path / "other")


def test_the_check_says_what_a_head_was_made_for(head: Path, check, tiny_pair: TinyPair) -> None:
    def lines() -> str:
        return "\n".join(check(head).models.lines)

    assert "does not say which target it was made for: `rlhfspec drafter eval`" in lines()
    made_for = head / "made_for.json"
    mine = {"target": "t", "target_weights": weights_digest(str(tiny_pair.target)), "chat": False}
    made_for.write_text(json.dumps(mine))
    assert "made" not in lines()
    made_for.write_text(json.dumps(mine | {"target_weights": "0" * 64, "chat": True}))
    assert "made for other weights than this target's (t)" in lines()
    assert "made from prompts with data.chat=true, this run has false" in lines()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: (folder / "config.json").write_text("{"),
            r"config\.json \(1 bytes\) is cut or damaged",
        ),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(
                (folder / "model.safetensors").read_bytes()[:-9]
            ),
            r"model\.safetensors \([0-9,]+ bytes\) is cut or damaged; copy it again",
        ),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), r"\(0 bytes\) is cut or damaged"),
        (
            lambda folder: (folder / "model.safetensors").unlink(),
            r"lacks its weights: expected model\.safeten",
        ),
    ],
)
def test_a_half_written_head_is_called_so(head: Path, check, damage, message: str) -> None:
    damage(head)
    with pytest.raises(ModelError, match=message):
        check(head)
