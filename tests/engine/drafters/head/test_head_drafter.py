"""The head's drafts are what its equations give from the target's hidden states, whatever way they came."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from rlhfspec.core.config import EngineConfig, SpeculationConfig
from rlhfspec.core.decode_records import Budget
from rlhfspec.core.records import SamplingParams
from rlhfspec.engine.build import build_engine
from rlhfspec.engine.decoding.noise import gumbel_noise
from rlhfspec.engine.drafters.head.head_drafter import MAX_WAITING, HeadDrafter
from rlhfspec.engine.drafters.head.head_weights import HeadWeights, load_head, save_head
from rlhfspec.engine.engine import Engine
from rlhfspec.policies.drafting.baselines import FixedPolicy
from tests.helpers.random_heads import random_head

CHAIN = SpeculationConfig(policy="fixed", drafter="head", num_nodes=4, depth=4, branching=1)


@pytest.fixture(scope="module")
def target(new_model: Callable):
    return new_model(7, "float32", num_layers=4)


def engine_of(target, head: HeadWeights, speculation: SpeculationConfig = CHAIN, **engine) -> Engine:
    settings = {"device": "cpu", "max_running_samples": 4, "max_prefill_tokens": 64, "probe": False}
    return build_engine(
        target,
        head,
        engine=EngineConfig(**(settings | engine)),
        speculation=speculation,
        max_total_tokens=192,
    )


def budget(num_nodes: int, depth: int, branching: int) -> Budget:
    return Budget(num_nodes=num_nodes, depth=depth, branching=branching, width=branching, reason="test")


def rotated(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary positions 0.. of [heads, T, E], pairs half a head apart as transformers has them."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] * theta ** (-torch.arange(half) / half)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * cos + turned * sin


def reference_chain(
    target, head: HeadWeights, ids: list[int], key_words, temperature: float, depth: int
) -> list[int]:
    """Draft by the equations alone: no cache, every level a forward over the whole sequence."""
    config, w = head.config, {name: tensor.float() for name, tensor in head.tensors.items()}
    with torch.inference_mode():
        states = target(torch.tensor([ids]), output_hidden_states=True).hidden_states
    taps = torch.cat([states[layer][0, :-1] for layer in config.tapped_layers], -1)
    hidden = taps @ w["fc.weight"].T
    tokens, drafted = list(ids[1:]), []
    norm = lambda x, name: F.rms_norm(x, (x.shape[-1],), w[name], config.rms_norm_eps)  # noqa: E731
    for level in range(depth):
        embedded = target.get_input_embeddings()(torch.tensor(tokens))
        x = torch.cat(
            [norm(embedded, "midlayer.input_layernorm.weight"), norm(hidden, "midlayer.hidden_norm.weight")],
            -1,
        )
        part = "midlayer.self_attn.{}_proj.weight"
        q, k, v = (
            (x @ w[part.format(each)].T).view(len(tokens), -1, config.head_size).transpose(0, 1)
            for each in "qkv"
        )
        theta = config.rope_parameters["rope_theta"]
        q, k = rotated(q, theta), rotated(k, theta)
        repeat = config.num_heads // config.num_kv_heads
        k, v = k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)
        h = hidden + attended @ w[part.format("o")].T
        mlp = norm(h, "midlayer.post_attention_layernorm.weight")
        gate, up = mlp @ w["midlayer.mlp.gate_proj.weight"].T, mlp @ w["midlayer.mlp.up_proj.weight"].T
        h = h + (F.silu(gate) * up) @ w["midlayer.mlp.down_proj.weight"].T
        logits = norm(h[-1], "norm.weight") @ w["lm_head.weight"].T
        noise = gumbel_noise(key_words, np.array([[len(ids) + level]]), config.vocab_size)[0, 0]
        drafted.append(int(head.token_ids[(logits / temperature + noise[head.token_ids]).argmax()]))
        # a drafted token's hidden state is the layer's own output behind the token before
        tokens.append(drafted[-1])
        hidden = torch.cat([hidden, h[-1:]])
    return drafted


@pytest.mark.parametrize(("prefill", "changes"), [(64, {}), (7, {}), (64, {"forward": "stock"})])
def test_chains_are_those_of_the_equations(target, make_requests, prefill: int, changes: dict) -> None:
    """After a prefill, after accepted tokens, and after more plain steps than may wait."""
    head = random_head(target, draft_vocab_size=40, dtype=torch.bfloat16)
    engine = engine_of(target, head, max_prefill_tokens=prefill, numerics="fast", **changes)
    drafter = engine.drafter
    assert isinstance(drafter, HeadDrafter)
    sampling = SamplingParams(temperature=0.8, max_new_tokens=100)
    for request in make_requests((9, 21, 9), sampling):
        engine.submit(request)
    plain = FixedPolicy(num_nodes=0, depth=0, branching=1)
    drafting = engine.policy
    compared = 0
    for step in range(2 * MAX_WAITING + 24):
        # long stretches without a draft, in which hidden states wait and are written
        engine.policy = plain if 4 <= step < 4 + 2 * MAX_WAITING else drafting
        engine.step()
        batch = engine._batch
        if step not in (0, 1, 2, 3, 4 + 2 * MAX_WAITING, 6 + 2 * MAX_WAITING):
            continue
        tree = drafter.draft(batch, budget(4, 4, 1), batch.noise(5, 64))
        for slot in range(len(batch)):
            ids = batch.tokens[slot, : batch.lengths[slot]].tolist()
            expected = reference_chain(target, head, ids, batch.words[slot : slot + 1], 0.8, 4)
            assert tree.token_ids[slot].tolist() == expected
            compared += 1
    assert compared >= 12


def test_a_tree_offers_the_chain_too(target, make_requests) -> None:
    """The best child of the best child is in the tree: parents hand their own hidden state down."""
    head = random_head(target, dtype=torch.bfloat16)
    engine = engine_of(target, head)
    for request in make_requests((12, 5), SamplingParams(max_new_tokens=60)):
        engine.submit(request)
    for _ in range(3):
        engine.step()
        batch = engine._batch
        noise = batch.noise(4, 64)
        tree = engine.drafter.draft(batch, budget(24, 3, 3), noise)
        for slot in range(len(batch)):
            ids = batch.tokens[slot, : batch.lengths[slot]].tolist()
            expected = reference_chain(target, head, ids, batch.words[slot : slot + 1], 1.0, 3)
            paths = [(node, [int(tree.token_ids[slot, node])]) for node in range(tree.num_nodes)]
            found = []
            for node, path in paths:
                parent = int(tree.parents[slot, node])
                while parent:
                    path.insert(0, int(tree.token_ids[slot, parent - 1]))
                    parent = int(tree.parents[slot, parent - 1])
                found.append(path)
            assert expected in found
            # a second child has a sibling's parent: its path begins as the equations say, too
            second = [path for path in found if len(path) == 2 and path[0] != expected[0]]
            for path in second[:1]:
                longer = reference_chain(target, head, [*ids, path[0]], batch.words[slot : slot + 1], 1.0, 1)
                assert longer, "a forward over the changed sequence was made"


def test_files_keep_every_bit(target, tmp_path) -> None:
    head = random_head(target, draft_vocab_size=40, dtype=torch.bfloat16)
    save_head(tmp_path / "head", head)
    again = load_head(tmp_path / "head", num_target_layers=4)
    assert again.config == head.config
    assert again.tensors.keys() == head.tensors.keys()
    for name, tensor in head.tensors.items():
        assert torch.equal(again.tensors[name], tensor) and again.tensors[name].dtype == tensor.dtype


def test_new_weights_draft_anew(target, make_requests) -> None:
    head, other = random_head(target), random_head(target, seed=4)
    engine = engine_of(target, head)
    requests = make_requests((9, 14), SamplingParams(max_new_tokens=20))
    before = engine.generate(requests)
    engine.drafter.load({n: t for n, t in other.tensors.items() if t.is_floating_point()})
    assert engine.drafter.checksum() != engine_of(target, head).drafter.checksum()
    assert engine.drafter.checksum() == engine_of(target, other).drafter.checksum()
    after = engine.generate(requests)
    assert [c.token_ids.tolist() for c in before] == [c.token_ids.tolist() for c in after]
