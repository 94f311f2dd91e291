"""What was written is read again and says what was learned; a folder that does not is kept apart, with the state."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from supervised_items import STEPS, items_of, new_learner, tiny
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from rlhfspec.core.checkpoint_manifest import verify_checkpoint
from rlhfspec.core.errors import ConfigError, NotAsLearned
from rlhfspec.core.settings.supervised import (
    PreferenceLossConfig,
    SupervisedModelConfig,
    SupervisedTrainerConfig,
)
from rlhfspec.core.settings.trainer import LoraConfig
from rlhfspec.engine.weights.chunks import model_checksum
from rlhfspec.learning.models.tokenization import character_tokenizer
from rlhfspec.learning.training.adapter_merge import Wrapped
from rlhfspec.learning.training.finished_model import ModelForm, save_model
from rlhfspec.learning.training.reloaded import TOLERATED, own_log_probs, require_reloads
from rlhfspec.learning.training.supervised_job import SupervisedJob, last_state, run_job

MERGED = Wrapped.merged

TOKENIZER = character_tokenizer("abcdefghijklmnopq")
Fault = Callable[[Path], None]


def learned(lora: LoraConfig | None = None):
    """A learner that has taken its steps, and the form that it is saved in."""
    learner = new_learner("sft", lora)
    form = ModelForm.of(learner.model, is_classifier=False, dtype="float32")
    for _ in range(STEPS):
        learner.step(items_of("sft")[:5])
    return learner, form


def spoils(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    """Let whatever writes a model's files make a fault in them."""
    really = PreTrainedModel.save_pretrained

    def save(model: PreTrainedModel, folder: Path, **settings) -> None:
        really(model, folder, **settings)
        fault(Path(folder))

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", save)


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def turned(folder: Path) -> None:
    """The rope of another family."""
    tree = json.loads((folder / "config.json").read_text())
    tree["rope_parameters"]["rope_theta"] = 500_000.0
    (folder / "config.json").write_text(json.dumps(tree))


def zeroed(folder: Path) -> None:
    """A weight that is not what was learned."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.model.layers[1].mlp.up_proj.weight.data.zero_()
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)])
def test_a_saved_model_says_what_its_trainer_says(tmp_path: Path, lora: LoraConfig | None) -> None:
    learner, form = learned(lora)
    said = learner.say()
    assert len(said.log_probs) == sum(len(ids) - 1 for ids in said.sequences) > 8
    save_model(learner, form, TOKENIZER, tmp_path / "model", said)
    verify_checkpoint(tmp_path / "model")
    found = own_log_probs(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), said.sequences)
    assert float((found - said.log_probs).abs().max()) < TOLERATED[torch.float32] / 10


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_are_widened_for_a_forward_alone(tmp_path: Path, dtype: str) -> None:
    learner, _ = learned()
    model = tiny("sft").to(getattr(torch, dtype))
    before = model_checksum(model)
    narrow = own_log_probs(model, learner.say().sequences)
    assert model_checksum(model) == before
    assert torch.equal(narrow, own_log_probs(model.float(), learner.say().sequences))


@pytest.mark.parametrize(
    ("fault", "said_of_it"),
    [
        (cut, r"cannot be read again: .*(cut or damaged|incomplete|Incomplete)"),
        (turned, r"'rope_parameters' of its config\.json is .*500000.*expected .*10000"),
        (zeroed, r"its weights have checksum \w+, expected \w+"),
    ],
)
def test_a_fault_of_writing_is_told_and_the_model_before_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault, said_of_it: str
) -> None:
    learner, form = learned()
    save_model(learner, form, TOKENIZER, tmp_path / "model")
    before = verify_checkpoint(tmp_path / "model")
    spoils(monkeypatch, fault)
    with pytest.raises(NotAsLearned, match=said_of_it) as caught:
        save_model(learner, form, TOKENIZER, tmp_path / "model", learner.say())
    assert f"kept as {tmp_path / 'model-refused'}" in str(caught.value)
    assert verify_checkpoint(tmp_path / "model") == before
    assert (tmp_path / "model-refused" / "config.json").is_file()


def test_swapped_end_tokens_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner, form = learned()
    really = GenerationConfig.to_json_file

    def swapped(settings: GenerationConfig, file: Path, **how) -> None:
        settings = GenerationConfig(eos_token_id=settings.pad_token_id, pad_token_id=settings.eos_token_id)
        really(settings, file, **how)

    monkeypatch.setattr(GenerationConfig, "to_json_file", swapped)
    with pytest.raises(
        NotAsLearned, match=r"its generation_config\.json ends a response at \[0\], expected \[1\]"
    ):
        save_model(learner, form, TOKENIZER, tmp_path / "model")


def test_weights_that_are_not_the_trainers_are_told_by_what_they_say(tmp_path: Path) -> None:
    """An adapter that was not merged: files and their checksum agree with each other, and not with the trainer."""
    learner, form = learned(LoraConfig(rank=4))
    said = learner.say()
    with torch.no_grad():
        for name, parameter in learner.model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    with pytest.raises(
        NotAsLearned, match=r"log-probabilities of \d+ tokens .* nats away from the trainer's"
    ):
        save_model(learner, form, TOKENIZER, tmp_path / "model", said)


def test_a_nan_is_not_within_rounding(tmp_path: Path) -> None:
    learner, form = learned()
    said = learner.say()
    save_model(learner, form, TOKENIZER, tmp_path / "model")
    said.log_probs[0] = torch.nan
    with pytest.raises(NotAsLearned, match="nats away"):
        require_reloads(tmp_path / "model", said=said)


def job_in(folder: Path, **trainer: Any) -> SupervisedJob:
    tiny("sft").save_pretrained(folder / "start")
    return SupervisedJob(
        kind="sft",
        model=SupervisedModelConfig(name=str(folder / "start"), dtype="float32"),
        trainer=SupervisedTrainerConfig(max_steps=2, batch_size=4, **trainer),
        loss=PreferenceLossConfig(),
        seed=0,
        tokenizer=TOKENIZER,
        train=items_of("sft"),
        held_out=[],
        folder=folder / "out",
    )


def left_out(wrapped: Wrapped, owner: tuple[str, str], tensor: torch.Tensor) -> torch.Tensor:
    """A merge that forgets the modules of one layer."""
    return tensor.float() if "layers.1" in owner[0] else MERGED(wrapped, owner, tensor)


def failing(wrapped: Wrapped, owner: tuple[str, str], tensor: torch.Tensor) -> torch.Tensor:
    raise ConfigError("cannot be merged")


@pytest.mark.parametrize(
    ("merged", "error"), [(left_out, r"nats away from the trainer's"), (failing, "cannot be merged")]
)
def test_a_merge_that_leaves_something_out_ends_a_job_whose_adapter_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, merged: Any, error: str
) -> None:
    monkeypatch.setattr(Wrapped, "merged", merged)
    job = job_in(tmp_path, lora=LoraConfig(rank=4), learning_rate=0.1)
    with pytest.raises((NotAsLearned, ConfigError), match=error):
        list(run_job(job, device=torch.device("cpu")))
    monkeypatch.undo()
    assert verify_checkpoint(tmp_path / "out" / "adapter")["weight_version"] == 2
    assert not (tmp_path / "out" / "model").exists()
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "start")
    loaded = PeftModel.from_pretrained(base, tmp_path / "out" / "adapter").state_dict()
    assert all(one.abs().max() > 0 for name, one in loaded.items() if "lora_B" in name)


def test_a_job_whose_model_is_refused_can_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_in(tmp_path)
    with monkeypatch.context() as patch:
        spoils(patch, turned)
        with pytest.raises(NotAsLearned, match="rope_parameters"):
            list(run_job(job, device=torch.device("cpu")))
    assert last_state(tmp_path / "out", print).name == "state_0002"
    list(run_job(job, device=torch.device("cpu")))
    verify_checkpoint(tmp_path / "out" / "model")
