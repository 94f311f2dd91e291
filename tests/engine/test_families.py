"""Stock architectures through the runner equal the plain Hugging Face forward; others are refused clearly."""

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlhfspec.core.errors import ModelError
from rlhfspec.engine.model.forward_plan import TreePlan
from rlhfspec.engine.model.invariance_probe import check_invariance
from rlhfspec.engine.model.prefill_plan import PrefillPiece, PrefillPlan
from rlhfspec.engine.model.runner import ModelRunner
from tests.helpers.backends import own_backend

LLAMA = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT2 = {"vocab_size": 64, "n_embd": 64, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
WITH_HEAD_SIZE = LLAMA | {"head_dim": 16}
WINDOW = {"sliding_window": 16}
GEMMA = WITH_HEAD_SIZE | WINDOW | {"query_pre_attn_scalar": 16}
WITHOUT_KV_HEADS = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}

SUPPORTED = {
    "llama": ("llama", LLAMA),
    "llama, biases": ("llama", LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "llama, one KV head for each head, tied": (
        "llama",
        LLAMA | {"num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "llama, scaled rope": (
        "llama",
        LLAMA
        | {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "qwen2": ("qwen2", LLAMA),
    "qwen3": ("qwen3", WITH_HEAD_SIZE),
    "qwen3, wide heads": ("qwen3", LLAMA | {"head_dim": 32}),
    "mistral, window 16": ("mistral", LLAMA | WINDOW),
    "gemma2, window and softcaps": (
        "gemma2",
        GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    ),
    "gemma3, window": ("gemma3_text", GEMMA),
    "phi3": ("phi3", LLAMA),
    "gpt2": ("gpt2", GPT2),
    "gpt2, scaled by layer": ("gpt2", GPT2 | {"scale_attn_by_inverse_layer_idx": True}),
    "gpt_neox": ("gpt_neox", WITHOUT_KV_HEADS),
    "opt": ("opt", WITHOUT_KV_HEADS | {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "olmo2": ("olmo2", LLAMA),
}


def build(model_type: str, settings: dict) -> PreTrainedModel:
    """Weights large enough that attention matters; biases too."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **settings), attn_implementation="eager"
    )
    for weight in model.parameters():
        if weight.dim() >= 2:
            weight.data.mul_(4)
        else:
            weight.data.add_(torch.randn_like(weight) * 0.1)
    return model.eval().requires_grad_(False)


def runner_of(model: PreTrainedModel, *, stock: bool = False) -> ModelRunner:
    return ModelRunner(model, num_slots=3, capacity=160, backend=own_backend(), vocab_size=64, stock=stock)


def prefill(runner: ModelRunner, ids: Tensor, slot: int) -> None:
    """In two pieces, the second behind the first."""
    for start, stop in ((0, 9), (9, len(ids))):
        piece = PrefillPiece(slot=slot, start=start, length=stop - start)
        plan = PrefillPlan(pool=runner.pool, attention=runner.attention, pieces=[piece])
        runner.fill(ids[start:stop], torch.arange(start, stop), plan)


def tree_logits(runner: ModelRunner, ids: Tensor, base: int, seen: Tensor, depth: Tensor) -> Tensor:
    plan = TreePlan(
        pool=runner.pool,
        attention=runner.attention,
        base=torch.tensor([base]),
        num_tokens=len(ids),
        seen=seen[None],
        depth=depth[None],
        view_tokens=base + len(ids),
    )
    return runner.logits(ids, base + depth, plan)


OURS = ("llama", "qwen2", "qwen3", "mistral")
FORWARDS = [(name, False) for name in SUPPORTED] + [
    (name, True) for name in SUPPORTED if SUPPORTED[name][0] in OURS
]


@pytest.mark.parametrize(("name", "stock"), FORWARDS)
def test_prefill_decode_and_trees_equal_the_plain_forward(name: str, stock: bool) -> None:
    model = build(*SUPPORTED[name])
    ids = torch.randint(64, (44,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(ids[None], use_cache=False).logits[0]
    runner = runner_of(model, stock=stock)
    prefill(runner, ids[:36], 0)
    one = torch.ones(1, 1, dtype=torch.bool)
    plain = [tree_logits(runner, ids[t : t + 1], t, one, torch.zeros(1).long()) for t in range(36, 40)]
    torch.testing.assert_close(torch.cat(plain), expected[36:40], rtol=0, atol=1e-4)
    # root, then a decoy and the true token at each level
    path = [0, 2, 4, 6]
    nodes = torch.tensor([40, 0, 41, 0, 42, 0, 43])
    depth = torch.tensor([0, 1, 1, 2, 2, 3, 3])
    seen = torch.eye(7, dtype=torch.bool)
    for level, node in enumerate(path):
        seen[node, path[: level + 1]] = True
        if level:
            seen[node - 1, path[:level]] = True
    tree = tree_logits(runner, ids[nodes], 40, seen, depth)[path]
    torch.testing.assert_close(tree, expected[40:44], rtol=0, atol=1e-4)


@pytest.mark.parametrize(("name", "stock"), FORWARDS)
def test_logits_are_invariant(name: str, stock: bool) -> None:
    assert check_invariance(runner_of(build(*SUPPORTED[name]), stock=stock), max_nodes=8)


ALIBI = {"vocab_size": 64, "hidden_size": 64, "n_layer": 2, "n_head": 4}
MOE = WITH_HEAD_SIZE | {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
REFUSED = {
    "mamba: no attention": ("mamba", {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2}),
    "gpt_neo: own attention": (
        "gpt_neo",
        {
            "vocab_size": 64,
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global"], 2]],
        },
    ),
    "deepseek_v3: latent cache": ("deepseek_v3", LLAMA | {"kv_lora_rank": 16, "moe_intermediate_size": 32}),
    "gptj: own attention": ("gptj", GPT2 | {"rotary_dim": 8}),
    "bloom: own attention, ALiBi": ("bloom", ALIBI),
    "gpt_oss: attention sinks": ("gpt_oss", MOE | WINDOW | {"num_local_experts": 4}),
    "llama4: chunked attention": (
        "llama4_text",
        WITH_HEAD_SIZE | {"num_local_experts": 2, "attention_chunk_size": 16, "intermediate_size_mlp": 96},
    ),
    "phi3: rope that depends on the longest neighbour": (
        "phi3",
        LLAMA
        | {
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 8,
                "long_factor": [4.0] * 8,
                "original_max_position_embeddings": 32,
            },
        },
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_architectures_that_cannot_be_served_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match="not supported"):
        runner_of(build(*REFUSED[name]))
