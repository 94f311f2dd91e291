"""One decoder layer of an update, forward and backward, on tensors that have shapes and no numbers.

An 8B shape with products in bfloat16, a tree of 8 answers to one prompt. Pretended tensors of the CPU, whose autocast
rounds what a GPU's does. Liger's kernels are noted where Triton would launch them, and none runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from ...learning.training.batching import PackedSequences
from ...learning.training.training_forward import fused_rows, prepare_for_training

HIDDEN, INNER, HEADS, KV_HEADS = 4096, 14336, 32, 8
PROMPT_TOKENS, ANSWERS, ANSWER_TOKENS = 256, 8, 480
Note = Callable[[str, Sequence[Tensor]], None]
"Counts a launch by its name and the tensors that it reads and writes."


def has_liger() -> bool:
    """Whether its kernels can be counted here."""
    return find_spec("liger_kernel") is not None and find_spec("triton") is not None


def layer_update(calls: TorchDispatchMode, note: Note, *, liger: bool) -> None:
    """Run the layer while `calls` counts operators; `liger`: with its kernels, which go to `note`."""
    packed = _tree()
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
    )
    # undone behind it: other models are in this process
    with FakeTensorMode(allow_non_fake_inputs=True), patch.dict(vars(modeling_llama)), _launches(note, liger):
        model = LlamaForCausalLM(config)
        prepare_for_training(model, gradient_checkpointing=False)
        if liger:
            fused_rows(model)
        shape = (1, len(packed.ids), HIDDEN)
        states, cos, sin = torch.empty(shape), *torch.empty(2, *shape[:2], HIDDEN // HEADS)
        states.requires_grad_()
        with calls, torch.autocast("cpu", torch.bfloat16):
            found: Any = model.model.layers[0](states, position_embeddings=(cos, sin), packed=packed)
            found.backward(torch.empty_like(found))


def _tree() -> PackedSequences:
    prompt, rest = np.arange(PROMPT_TOKENS), np.arange(ANSWER_TOKENS - 1)
    packed = PackedSequences.of([np.concatenate([prompt, [index], rest]) for index in range(ANSWERS)])
    # as it goes to a GPU: one call of attention
    return replace(packed, on_gpu=packed.paths())


@contextmanager
def _launches(note: Note, liger: bool) -> Iterator[None]:
    """Note what Triton would launch."""
    if not liger:
        yield
        return
    from triton.runtime.jit import JITFunction

    def run(self: Any, *given: Any, **settings: Any) -> None:
        tensors = [one for one in (*given, *settings.values()) if isinstance(one, Tensor)]
        note(self.__name__, tensors)

    with patch.object(JITFunction, "run", run):
        yield


def layer_of_an_update(count: Callable[[], Any]) -> dict[str, float]:
    """Return launches and GiB read and written of one decoder layer's forward and backward, by torch and by Liger.

    `count` makes what counts operators (`benchmarks.device_ops.DeviceCalls`) on tensors of the host.
    """
    figures = {}
    for name, liger in (("", False), ("_liger", True)):
        if not liger or has_liger():
            calls = count()
            layer_update(calls, calls.note_kernel, liger=liger)
            figures[f"launches_a_layer_update{name}"] = calls.counts["launches"]
            figures[f"gib_a_layer_update{name}"] = calls.counts["bytes"] / 2**30
    return figures
