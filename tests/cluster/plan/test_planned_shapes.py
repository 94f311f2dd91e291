"""The plan of models from 1.5B to 32B on GPUs of 80 GB, beside a count of tensors that have shapes alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from rlhfspec.cluster.plan.memory_plan import MemoryNeeds
from rlhfspec.cluster.plan.model_files import model_shape
from rlhfspec.cluster.plan.model_sizes import ModelShapes
from rlhfspec.core.config import TrainerConfig
from rlhfspec.core.config_io import config_from_dict
from rlhfspec.core.settings.trainer import LoraConfig
from rlhfspec.core.weight_records import DEVICE_BUCKET_BYTES, TensorSpec, WeightManifest
from rlhfspec.engine.model.compute_backend import ComputeBackend
from rlhfspec.engine.model.llama_model import LlamaModel
from rlhfspec.engine.weights.chunks import unique_tensors
from rlhfspec.engine.weights.llama_config import LlamaConfig
from rlhfspec.learning.training.adapter import Adapter
from rlhfspec.learning.training.batching import PackedSequences
from rlhfspec.learning.training.objectives.head_statistics import HeadSettings, head_statistics
from rlhfspec.learning.training.trainer_core import optimizer_of
from rlhfspec.learning.training.training_forward import prepare_for_training, response_statistics

NUM_ROWS, LENGTH = 4, 1024
LORA = LoraConfig(rank=16)
SIZES = {
    # hidden, inner, layers, heads, KV heads, vocabulary, tied: the config.json of Qwen2.5
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
    "14B": (5120, 13824, 48, 40, 8, 152064, False),
    "32B": (5120, 27648, 64, 40, 8, 152064, False),
}


@dataclass(frozen=True)
class Run:
    """A way to train one of them."""

    size: str
    lora: bool = False
    trainers: int = 1
    checkpointing: bool = True

    def __str__(self) -> str:
        return f"{self.size} {'LoRA' if self.lora else 'full'} on {self.trainers}"


RUNS = [
    Run("1.5B", checkpointing=False),
    Run("7B", lora=True),
    Run("7B", trainers=8),
    Run("14B", trainers=8),
    pytest.param(Run("32B", lora=True, trainers=8), marks=pytest.mark.slow),
    Run("32B", trainers=8),
]


def described(size: str, **changes: Any) -> Any:
    hidden, inner, layers, heads, kv_heads, vocabulary, tied = SIZES[size]
    settings = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 32768,
    }
    return AutoConfig.for_model("qwen2", **settings | changes)


def built(config: Any, *, lora: bool) -> Any:
    """The module as a trainer holds it, on the meta device: float32, or bfloat16 linears below adapters."""
    with no_init_weights(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.tie_weights()
    prepare_for_training(model, gradient_checkpointing=False)
    if lora:
        for module in model.modules():
            if isinstance(module, nn.Linear) and module.weight is not model.get_input_embeddings().weight:
                for name, one in list(module.named_parameters(recurse=False)):
                    setattr(module, name, nn.Parameter(one.detach().bfloat16()))
        Adapter(model, LORA, seed=0)
    return model


def on_cpu(model: Any) -> None:
    """Give a model tensors of the CPU, where autocast is known: fake ones in a mode that makes such."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, one in module._parameters.items():
            if one is not None and id(one) not in made:
                made[id(one)] = nn.Parameter(torch.empty_like(one, device="cpu"), one.requires_grad)
            module._parameters[name] = one if one is None else made[id(one)]
        for name, one in module._buffers.items():
            module._buffers[name] = torch.empty_like(one, device="cpu")


class Alive(TorchDispatchMode):
    """Counts the bytes of what is made inside: now, and the most at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        before = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if torch.is_tensor(one)}
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if torch.is_tensor(one) and (storage := one.untyped_storage())._cdata not in before:
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.most = max(self.most, self.now())
        return result

    def now(self) -> int:
        self._made = {key: one for key, one in self._made.items() if not one[0].expired()}
        return sum(size for _, size in self._made.values())


@cache
def whole(size: str, *, lora: bool) -> Any:
    """All of a model, on the meta device."""
    return built(described(size), lora=lora)


@cache
def held(size: str, *, lora: bool) -> dict[str, int]:
    """Bytes of weights, and of gradients and moments, of a whole model; what goes out, and merging's largest."""
    model = whole(size, lora=lora)
    learned = [one for one in model.parameters() if one.requires_grad]
    for one in learned:
        one.grad = torch.empty_like(one)
    optimizer = optimizer_of(model, TrainerConfig())
    optimizer.step()
    moments = sum(
        part.nbytes for state in optimizer.state.values() for part in state.values() if torch.is_tensor(part)
    )
    with torch.device("meta"):
        published = unique_tensors(AutoModelForCausalLM.from_config(described(size), dtype=torch.bfloat16))
    specs, at = [], 0
    for name, one in published:
        specs.append(
            TensorSpec(
                name=name, dtype="bfloat16", shape=tuple(one.shape), offset_bytes=at, num_bytes=one.nbytes
            )
        )
        at += one.nbytes + -one.nbytes % 16
    manifest = WeightManifest(
        model="target",
        weight_version=0,
        checksum="",
        num_bytes=at,
        chunk_num_bytes=(),
        chunk_checksums=(),
        tensors=tuple(specs),
        hf_config_json="{}",
    )
    largest = (
        max(module.base_layer.weight.numel() for module in model.modules() if hasattr(module, "base_layer"))
        if lora
        else 0
    )
    return {
        "weights": sum(one.nbytes for one in model.parameters()),
        "gradient, moments": sum(one.nbytes for one in learned) + moments,
        # two buckets between devices, or one for the object store, where tensors are whole
        "publication": max(
            2 * max(manifest.in_chunks_of(DEVICE_BUCKET_BYTES).chunk_num_bytes),
            *(one.nbytes for _, one in published),
        ),
        # what is added to it, and their sum
        "merging": 2 * 4 * largest,
    }


@cache
def of_forward(size: str, layers: int, *, lora: bool, checkpointing: bool) -> int:
    """Bytes that a forward of so many layers leaves for its backward pass, logits left out."""
    vocabulary = 64
    random = np.random.default_rng(0)
    rows = [np.append(first, random.integers(0, vocabulary, LENGTH - 1)) for first in range(NUM_ROWS)]
    learned = [np.arange(LENGTH) > 0 for _ in rows]
    packed = PackedSequences.of(rows, learned)
    config = described(size, num_hidden_layers=layers, vocab_size=vocabulary, tie_word_embeddings=True)
    model = built(config, lora=lora)
    with FakeTensorMode(allow_non_fake_inputs=True):
        on_cpu(model)
        prepare = prepare_for_training if not lora else _checkpoint_only
        prepare(model, gradient_checkpointing=checkpointing)
        with Alive() as alive:
            found = response_statistics(
                model, packed, vocabulary, 1.0, entropy=False, compute_dtype=torch.bfloat16
            )
        assert found.logprobs.requires_grad
        return alive.now()


def _checkpoint_only(model: Any, *, gradient_checkpointing: bool) -> None:
    """Adapters alone go on learning."""
    learns = {id(one) for one in model.parameters() if one.requires_grad}
    prepare_for_training(model, gradient_checkpointing=gradient_checkpointing)
    for one in model.parameters():
        one.requires_grad_(id(one) in learns)


def activations(run: Run) -> int:
    """Of all layers, from two depths; where they are computed anew one layer's whole ones come beside the inputs."""

    def of(layers: int, *, checkpointing: bool) -> int:
        return of_forward(run.size, layers, lora=run.lora, checkpointing=checkpointing)

    layers = SIZES[run.size][2]
    two, three = (of(depth, checkpointing=run.checkpointing) for depth in (2, 3))
    one_whole = of(3, checkpointing=False) - of(2, checkpointing=False) if run.checkpointing else 0
    return two + (layers - 2) * (three - two) + one_whole


@cache
def logits(size: str, *, learns_head: bool) -> int:
    """The most bytes at once of the head's statistics and their gradients."""
    hidden, _, _, _, _, vocabulary, _ = SIZES[size]
    states = torch.empty(NUM_ROWS * LENGTH, hidden, device="meta", requires_grad=True)
    dtype = torch.float32 if learns_head else torch.bfloat16
    weight = torch.empty(vocabulary, hidden, device="meta", dtype=dtype, requires_grad=learns_head)
    ids = torch.empty(NUM_ROWS * LENGTH, dtype=torch.int64, device="meta")
    how = HeadSettings(
        vocab_size=vocabulary, dtype=torch.bfloat16, temperature=1.0, entropy=False, has_backward=True
    )
    with Alive() as alive:
        head_statistics(states, weight, ids, how, None)[0].sum().backward()
    return alive.most


def counted(run: Run) -> dict[str, int]:
    there = held(run.size, lora=run.lora)
    parts = {name: there[name] // run.trainers for name in ("weights", "gradient, moments")}
    forward = {
        "activations": activations(run),
        "logits": logits(run.size, learns_head=not run.lora),
    }
    return parts | forward | {name: there[name] for name in ("publication", "merging")}


def needs(run: Run) -> MemoryNeeds:
    settings = config_from_dict(
        {
            "data": {"task": "chain"},
            "algorithm": {"kind": "grpo", "kl_coef": 0.0},
            "models": {"target": "demo", "draft": "demo", "dtype": "bfloat16"},
            "drafter_training": {"refit": False},
            "rollout": {"prompts_per_iteration": 1, "samples_per_prompt": NUM_ROWS},
            "trainer": {
                "minibatch_size": NUM_ROWS,
                "gradient_checkpointing": run.checkpointing,
                "strategy": "fsdp2",
                "lora": LORA.model_dump() if run.lora else None,
            },
            "cluster": {
                "trainer": {"num_gpus": 1, "num_actors": run.trainers},
                "generation": {"num_gpus": 1},
            },
        }
    )
    shape = model_shape(described(run.size))
    if run.lora:
        learned = sum(one.numel() for one in whole(run.size, lora=True).parameters() if one.requires_grad)
        shape = replace(shape, num_adapter_params=learned)
    return MemoryNeeds(settings, ModelShapes(target=shape), max_total_tokens=LENGTH)


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_a_trainer_is_planned_within_a_tenth_of_its_tensors(run: Run) -> None:
    plan = needs(run).plan(object_store_bytes=0)
    assert not any(plan.trainer_parts[name] for name in ("reference", "teacher", "critic", "draft"))
    found = counted(run)
    assert plan.trainer_gpu_bytes == pytest.approx(sum(found.values()), rel=0.1), (plan.trainer_parts, found)


@pytest.mark.parametrize("size", SIZES)
def test_an_instances_weights_are_planned_within_a_tenth_of_its_tensors(size: str) -> None:
    config = described(size)
    backend: Callable[..., Any] = ComputeBackend
    with Alive() as alive:
        model = LlamaModel(
            LlamaConfig.of(config.to_json_string(use_diff=False)),
            torch.bfloat16,
            backend(torch.device("meta")),
        )
    assert model.layers
    planned = model_shape(config).decoding_bytes("bfloat16", on_gpu=True)
    assert planned == pytest.approx(alive.now(), rel=0.1)
