"""Liger's kernels between a model's products, in Triton's interpreter: the same function, whatever wraps the model."""

from importlib.util import find_spec

import pytest

from rlhfspec.learning.training.training_forward import fused_rows, use_fused_rows
from tests.helpers.tiny_llama import tiny_llama
from tests.helpers.triton_scripts import NEEDS_TRITON, interpreted

NEEDS_LIGER = pytest.mark.skipif(
    find_spec("liger_kernel") is None, reason="liger-kernel is not installed: extra dev"
)
SCRIPT = """
import sys, tempfile
from importlib import import_module
import numpy as np
import torch
import torch.distributed as dist
import triton.language as tl
from triton.runtime import interpreter
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from rlhfspec.core.settings.trainer import LoraConfig
from rlhfspec.learning.training import training_forward
from rlhfspec.learning.training.adapter import Adapter
from rlhfspec.learning.training.batching import PackedSequences
from rlhfspec.learning.training.sharded import Sharded
from tests.helpers.tiny_llama import SIZES

converted = interpreter._implicit_cvt

def as_compiled(given):
    # the interpreter hands floats on as Python's, which have no types
    if not isinstance(given, float):
        return converted(given)
    return tl.tensor(interpreter.TensorHandle(np.array([given], np.float32), tl.float32), tl.float32)

interpreter._implicit_cvt = as_compiled
# of a library for GPUs
import_module("liger_kernel.ops.rms_norm").rsqrt = lambda x: tl.rsqrt(x)
family, wrapped = sys.argv[1:]
torch.manual_seed(0)
config = CONFIG_MAPPING[family](**SIZES | {"initializer_range": 0.3, "eos_token_id": 1, "tie_word_embeddings": False})
model = AutoModelForCausalLM.from_config(config)
training_forward.prepare_for_training(model, gradient_checkpointing=wrapped == "checkpointed")
if wrapped == "lora":
    Adapter(model, LoraConfig(rank=2), seed=0)
    for name, one in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(one, std=0.1)
if wrapped == "sharded":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    Sharded(torch.device("cpu")).shard(model)
# a tree: two answers to one prompt, and one alone
sequences = [np.array(one) for one in ([3, 4, 5, 6, 7], [3, 4, 5, 9], [8, 3, 4])]
packed = PackedSequences.of(sequences, [np.arange(len(one)) > 1 for one in sequences])

def results():
    found = training_forward.response_statistics(model, packed, 19, 0.7, entropy=True)
    (found.logprobs.sum() + found.entropy.sum()).backward()
    whole = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad()
    return [found.logprobs, *(getattr(one, "full_tensor", lambda one=one: one)() for one in whole.values())]

modeling = import_module(f"transformers.models.{family}.modeling_{family}")
classes = {name: one for name, one in vars(modeling).items() if isinstance(one, type)}
own = results()
assert training_forward.fused_rows(model) == "Liger's kernels"
assert {name: one for name, one in vars(modeling).items() if isinstance(one, type)} == classes
inside = model.model.layers[0]
for part in (inside.input_layernorm, inside.mlp, model.model.norm):
    assert part.forward.__module__.startswith("liger_kernel"), part
turned = []
rope = import_module("liger_kernel.transformers.rope")
dispatch = rope.dispatch
rope.dispatch = lambda name, *args, **more: (turned.append(name), dispatch(name, *args, **more))[1]
fused = results()
assert turned.count("rope") >= 2, "a layer each"
assert len(own) == len(fused) > 4
for one, other in zip(own, fused, strict=True):
    assert (one - other).norm() <= 1e-4 * one.norm() and other.any()
print("equal")
"""


@NEEDS_TRITON
@NEEDS_LIGER
@pytest.mark.parametrize(
    ("family", "wrapped"),
    [
        ("llama", "checkpointed"),
        ("llama", "lora"),
        ("llama", "sharded"),
        ("mistral", ""),
        ("qwen2", ""),
        ("qwen3", ""),
    ],
)
def test_a_tree_has_the_same_values_and_gradients(family: str, wrapped: str) -> None:
    assert interpreted(SCRIPT, family, wrapped).endswith("equal")


def test_a_cpus_model_stays_as_it_is() -> None:
    model = tiny_llama()
    before = dict(vars(model.model.norm))
    use_fused_rows(model, None)
    assert vars(model.model.norm) == before
    model.config.model_type = "gemma2"
    assert "llama, mistral, qwen2, qwen3" in fused_rows(model)
