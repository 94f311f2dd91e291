"""What the plan says of a trainer's forward, beside the tensors that are there after one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from rlhfspec.cluster.plan import model_files
from rlhfspec.cluster.plan.memory_plan import MemoryNeeds
from rlhfspec.cluster.plan.model_files import count_params, model_shape
from rlhfspec.cluster.plan.model_sizes import ModelShapes
from rlhfspec.core.config import TrainerConfig
from rlhfspec.core.config_io import config_from_dict
from rlhfspec.engine.cache.kv_pool import KVPool
from rlhfspec.engine.model.compute_backend import ComputeBackend
from rlhfspec.engine.model.llama_model import LlamaModel
from rlhfspec.engine.parts import Share
from rlhfspec.engine.weights.llama_config import LlamaConfig
from rlhfspec.engine.weights.loading import load_hf_config
from rlhfspec.learning.training.batching import PackedSequences
from rlhfspec.learning.training.trainer_core import optimizer_of
from rlhfspec.learning.training.training_forward import prepare_for_training, response_statistics

NUM_ROWS, LENGTH, VOCAB = 8, 48, 64
FAMILIES: dict[str, dict[str, Any]] = {
    # a fourth of the hidden sizes, all ratios as in SmolLM2-135M, Qwen2.5-0.5B, Qwen3-0.6B
    "llama": {
        "hidden_size": 144,
        "intermediate_size": 384,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "qwen2": {
        "hidden_size": 224,
        "intermediate_size": 1216,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "qwen3": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 32,
    },
}


class Made(TorchDispatchMode):
    """Counts the bytes of what is made inside and still there."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        before = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if torch.is_tensor(one)}
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            # a view of what came from outside was not made
            if torch.is_tensor(one) and (storage := one.untyped_storage())._cdata not in before:
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def alive_bytes(self) -> int:
        return sum(size for storage, size in self._made.values() if not storage.expired())


def counted(config: Any, dtype: torch.dtype, *, checkpointing: bool) -> int:
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    prepare_for_training(model, gradient_checkpointing=checkpointing)
    random = np.random.default_rng(0)
    rows = [np.append(first, random.integers(0, VOCAB, LENGTH - 1)) for first in range(NUM_ROWS)]
    learned = [np.arange(LENGTH) > 0 for _ in rows]
    with Made() as made:
        found = response_statistics(
            model, PackedSequences.of(rows, learned), VOCAB, 1.0, entropy=False, compute_dtype=dtype
        )
    assert found.logprobs.requires_grad
    return made.alive_bytes() - NUM_ROWS * LENGTH * VOCAB * dtype.itemsize


def planned(config: Any, dtype: str, *, checkpointing: bool, optim: str = "adamw") -> dict[str, int]:
    settings = config_from_dict(
        {
            "data": {"task": "chain"},
            "models": {"target": "demo", "draft": "demo", "dtype": dtype},
            "drafter_training": {"refit": False},
            "rollout": {"prompts_per_iteration": NUM_ROWS, "samples_per_prompt": 1},
            "trainer": {"minibatch_size": NUM_ROWS, "gradient_checkpointing": checkpointing, "optim": optim},
            # what an allocator of a CPU keeps besides is no tensor
            "cluster": {"trainer": {"num_gpus": 1}},
        }
    )
    shapes = ModelShapes(target=model_shape(config))
    parts = MemoryNeeds(settings, shapes, max_total_tokens=LENGTH).plan(object_store_bytes=0).trainer_parts
    (activations,) = (size for name, size in parts.items() if name.startswith("activations of 384 tokens"))
    learned = {"learned": parts["gradient, moments"]} if optim != "adamw" else {}
    return {"activations": activations, "rounded": parts["rounded weights"], **learned}


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_files_tell_the_sizes_that_transformers_module_has(
    family: str, is_tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {**FAMILIES[family], "num_hidden_layers": 2, "vocab_size": VOCAB, "tie_word_embeddings": is_tied}
    config = AutoConfig.for_model(family, **sizes)
    expected = model_shape(config)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    monkeypatch.setattr(model_files, "meta_model", lambda *given: pytest.fail("a module was built"))
    config = load_hf_config(str(tmp_path))
    assert model_shape(config, str(tmp_path)) == expected
    assert count_params(config, AutoModelForCausalLM, str(tmp_path)) == expected.num_params


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_leaves_behind_what_the_plan_says_within_a_tenth(family: str, dtype: str) -> None:
    config = AutoConfig.for_model(
        family, **FAMILIES[family], num_hidden_layers=3, vocab_size=VOCAB, tie_word_embeddings=True
    )
    found = counted(config, getattr(torch, dtype), checkpointing=False)
    plan = planned(config, dtype, checkpointing=False)
    assert sum(plan.values()) == pytest.approx(found, rel=0.1)
    assert (plan["rounded"] > 0) == (dtype == "bfloat16")

    # every layer's input is there after the forward, and one whole layer beside it in the backward pass
    anew, shape = planned(config, dtype, checkpointing=True), model_shape(config)
    one_layer = NUM_ROWS * LENGTH * shape.layer_bytes(in_bfloat16=dtype == "bfloat16")
    found = counted(config, getattr(torch, dtype), checkpointing=True)
    assert anew["activations"] - one_layer == pytest.approx(found, rel=0.1)
    assert anew["rounded"] * 3 == plan["rounded"]


@pytest.mark.parametrize("optim", ["muon", "adamw_8bit"])
def test_an_optimizer_keeps_what_the_plan_says_within_a_twentieth(optim: str) -> None:
    if optim == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    config = AutoConfig.for_model("llama", **FAMILIES["llama"], num_hidden_layers=3, vocab_size=VOCAB)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    optimizer = optimizer_of(model, TrainerConfig(optim=optim))
    for one in model.parameters():
        one.grad = torch.ones_like(one)
    optimizer.step()
    states = [part for held in optimizer.state.values() for part in held.values() if torch.is_tensor(part)]
    # a table of what codes mean is one of all weights
    kept = sum({part.data_ptr(): part.nbytes for part in states}.values())
    gradients = sum(one.nbytes for one in model.parameters())
    plan = planned(config, "float32", checkpointing=False, optim=optim)["learned"]
    assert plan == pytest.approx(gradients + kept, rel=0.05)
    assert plan < 2.6 * gradients, "AdamW's are 3"


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_other_gpus_of_a_group_hold_is_planned_by_its_tensors(ranks: int) -> None:
    """Weights and cells of one rank less those of a leader: eight layers of Qwen2.5-32B, on the meta device."""
    described = AutoConfig.for_model(
        "qwen2",
        hidden_size=5120,
        intermediate_size=27648,
        num_attention_heads=40,
        num_key_value_heads=8,
        num_hidden_layers=8,
        vocab_size=152064,
        tie_word_embeddings=False,
        # which a config of a checkpoint has
        architectures=["Qwen2ForCausalLM"],
    )
    meta, own = torch.device("meta"), LlamaConfig.of(described.to_json_string(use_diff=False))

    def held(num_ranks: int) -> int:
        group: Any = SimpleNamespace(share=Share(ranks=num_ranks), order=lambda *_, **__: None)
        with Made() as made:
            model = LlamaModel(
                own, torch.bfloat16, ComputeBackend(meta), ranks=None if num_ranks == 1 else group
            )
            pool = KVPool(model.kv_shape, num_slots=64, capacity=1600, dtype=torch.bfloat16, device=meta)
        assert pool.cells.device == meta
        return made.alive_bytes()

    def planned(num_ranks: int) -> int:
        settings = config_from_dict(
            {
                "data": {"task": "chain"},
                "models": {"target": "x", "dtype": "bfloat16"},
                "speculation": {"drafter": "none", "policy": "off"},
                "engine": {"max_running_samples": 64},
                "cluster": {"generation": {"num_gpus": 1, "tensor_parallel": num_ranks}},
            }
        )
        shapes = ModelShapes(target=model_shape(described))
        parts = MemoryNeeds(settings, shapes, max_total_tokens=1599).plan(object_store_bytes=0).gpu_parts
        return parts["weights and logits"] + parts["KV pool"]

    assert planned(1) - planned(ranks) == pytest.approx(held(1) - held(ranks), rel=0.1)
