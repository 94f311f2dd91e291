"""A target's own MTP layer drafts what DeepSeek-V3's and MiMo's equations give; no token depends on it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from rlhfspec.core.config import EngineConfig, SpeculationConfig
from rlhfspec.core.decode_records import Budget
from rlhfspec.core.errors import ConfigError
from rlhfspec.core.records import SamplingParams
from rlhfspec.engine.build import build_engine
from rlhfspec.engine.decoding.noise import gumbel_noise
from rlhfspec.engine.drafters.head.head_drafter import MAX_WAITING, HeadDrafter
from rlhfspec.engine.drafters.head.head_weights import HeadWeights
from rlhfspec.engine.drafters.head.mtp_weights import load_mtp
from rlhfspec.engine.drafters.head.published_head import (
    head_checksum,
    is_head,
    is_mtp,
    pack_head,
    published_head,
)
from rlhfspec.engine.engine import Engine
from rlhfspec.engine.weights.causal_lm import DTYPES
from rlhfspec.engine.weights.chunks import weight_views
from rlhfspec.engine.weights.loading import load_causal_lm, load_hf_config
from rlhfspec.policies.drafting.baselines import FixedPolicy
from tests.helpers.hand_profile import hand_cost, hand_profile
from tests.helpers.random_heads import random_head
from tests.helpers.tiny_mimo import stored_mtp, write_tiny_mimo

CHAIN = SpeculationConfig(policy="fixed", drafter="mtp", num_nodes=4, depth=4, branching=1)
PLANS = {
    "chain": CHAIN,
    "tree": SpeculationConfig(policy="fixed", drafter="mtp", num_nodes=8, depth=4, branching=3),
    "pair": SpeculationConfig(
        policy="fixed", drafter="mtp", num_nodes=8, depth=4, branching=3, look_up="suffix"
    ),
    "goodput": SpeculationConfig(policy="goodput", drafter="mtp", max_nodes=8, max_depth=4),
    "off": SpeculationConfig(policy="off", drafter="mtp"),
}
PROFILE = hand_profile(0.6, hand_cost(forward_ms=1.0, token_ms=0.001, level_ms=0.05))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_mimo(tmp_path_factory.mktemp("mimo"))


@pytest.fixture(scope="module")
def target(folder: Path) -> Any:
    return load_causal_lm(str(folder), "float32")


@pytest.fixture(scope="module")
def layer(folder: Path) -> HeadWeights:
    return load_mtp(str(folder), load_hf_config(str(folder))).head


def engine_of(target, layer: HeadWeights | None, speculation: SpeculationConfig, **engine: Any) -> Engine:
    settings = {"device": "cpu", "max_running_samples": 4, "max_prefill_tokens": 64, "probe": False}
    return build_engine(
        target,
        layer,
        engine=EngineConfig(**(settings | engine)),
        speculation=speculation,
        max_total_tokens=192,
        profile=PROFILE if speculation.policy == "goodput" else None,
    )


class Equations:
    """MiMo's layer, written from its paper and from what vLLM computes: no cache, all positions at once."""

    def __init__(self, target: Any, folder: Path) -> None:
        self._target, self._config = target, target.config
        own = "model.mtp_layers.0."
        self._w = {name.removeprefix(own): value.float() for name, value in stored_mtp(folder).items()}

    def last_states(self, ids: list[int]) -> torch.Tensor:
        """Outputs of the target's last layer, before its norm, [T, H]."""
        seen: list[torch.Tensor] = []
        hook = self._target.model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        with torch.inference_mode():
            self._target(torch.tensor([ids]), use_cache=False)
        hook.remove()
        return seen[0][0]

    def layer(self, hidden: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of every position and the normed states, of h_i beside token i + 1."""
        w, config = self._w, self._config
        embedded = self._target.get_input_embeddings()(torch.tensor(tokens)).clone()
        embedded[0] = 0.0
        both = [self._norm(hidden, "hidden_layernorm"), self._norm(embedded, "token_layernorm")]
        h = torch.cat(both, -1) @ w["input_proj.weight"].T
        x = self._norm(h, "input_layernorm")
        size = config.hidden_size // config.num_attention_heads
        q, k, v = (
            (x @ w[f"self_attn.{each}_proj.weight"].T + w[f"self_attn.{each}_proj.bias"])
            .view(len(tokens), -1, size)
            .transpose(0, 1)
            for each in "qkv"
        )
        q, k = self._rotated(q), self._rotated(k)
        repeat = config.num_attention_heads // config.num_key_value_heads
        k, v = k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0)
        mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)
        weights = (q @ k.transpose(1, 2) * size**-0.5 + mask).softmax(-1)
        h = h + (weights @ v).transpose(0, 1).flatten(1) @ w["self_attn.o_proj.weight"].T
        x = self._norm(h, "post_attention_layernorm")
        gated = F.silu(x @ w["mlp.gate_proj.weight"].T) * (x @ w["mlp.up_proj.weight"].T)
        h = self._norm(h + gated @ w["mlp.down_proj.weight"].T, "final_layernorm")
        return h @ self._target.lm_head.weight.T, h

    def chain(self, ids: list[int], key_words: Any, temperature: float, depth: int) -> list[int]:
        """Draft behind these tokens: each level's token goes in beside the state that the layer gave before it."""
        hidden, tokens, drafted = self.last_states(ids)[:-1], list(ids[1:]), []
        for level in range(depth):
            logits, states = self.layer(hidden, tokens)
            noise = gumbel_noise(key_words, np.array([[len(ids) + level]]), logits.shape[-1])[0, 0]
            drafted.append(int((logits[-1] / temperature + noise).argmax()))
            tokens.append(drafted[-1])
            hidden = torch.cat([hidden, states[-1:]])
        return drafted

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + self._config.rms_norm_eps).rsqrt()
        return x * scale * self._w[f"{name}.weight"]

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        theta = self._config.rope_parameters["rope_theta"]
        angles = torch.arange(x.shape[1])[:, None] * theta ** (-torch.arange(half) / half)
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


@pytest.fixture(scope="module")
def equations(target, folder: Path) -> Equations:
    with torch.inference_mode():
        yield Equations(target, folder)


def budget(num_nodes: int, depth: int, branching: int) -> Budget:
    return Budget(num_nodes=num_nodes, depth=depth, branching=branching, width=branching, reason="test")


@pytest.mark.parametrize(("prefill", "changes"), [(64, {}), (7, {}), (64, {"forward": "stock"})])
def test_logits_and_chains_are_those_of_the_equations(
    target, layer, equations: Equations, make_requests, prefill: int, changes: dict
) -> None:
    """After a prefill, one of a prompt that another shares, after accepted tokens, and after many plain steps."""
    engine = engine_of(target, layer, CHAIN, max_prefill_tokens=prefill, numerics="fast", **changes)
    drafter, drafting = engine.drafter, engine.policy
    assert isinstance(drafter, HeadDrafter)
    first, *others = make_requests((9, 21, 2), SamplingParams(temperature=0.8, max_new_tokens=100))
    for request in (first, *others):
        engine.submit(request)
    plain = FixedPolicy(num_nodes=0, depth=0, branching=1)
    compared = 0
    for step in range(2 * MAX_WAITING + 12):
        engine.policy = plain if 4 <= step < 4 + 2 * MAX_WAITING else drafting
        engine.step()
        if step not in (0, 1, 3, 4 + 2 * MAX_WAITING, 7 + 2 * MAX_WAITING):
            continue
        batch = engine._batch
        logits = drafter.root_logits(batch)
        tree = drafter.draft(batch, budget(4, 4, 1), batch.noise(5, 64))
        for slot in range(len(batch)):
            ids = batch.tokens[slot, : batch.lengths[slot]].tolist()
            expected, _ = equations.layer(equations.last_states(ids)[:-1], ids[1:])
            torch.testing.assert_close(logits[slot], expected[-1], rtol=1e-3, atol=1e-3)
            drafted = equations.chain(ids, batch.words[slot : slot + 1], 0.8, 4)
            assert tree.token_ids[slot].tolist() == drafted
            compared += 1
    assert compared >= 12


@pytest.mark.parametrize("plan", ["chain", "tree", "pair", "goodput"])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_tokens_are_those_of_plain_decoding(
    folder: Path, layer, make_requests, plan: str, dtype: str
) -> None:
    target = load_causal_lm(str(folder), dtype)
    sampling = [
        SamplingParams(temperature=temperature, max_new_tokens=40) for temperature in (0.0, 0.3, 1.0, 1.0)
    ]
    requests = make_requests((9, 3, 17, 17), sampling)
    plain = engine_of(target, layer, PLANS["off"]).generate(requests)
    engine = engine_of(target, layer, PLANS[plan], numerics="invariant")
    drafted = engine.generate(requests)
    assert [c.token_ids.tolist() for c in drafted] == [c.token_ids.tolist() for c in plain]
    assert [c.policy_logprobs.tolist() for c in drafted] == [c.policy_logprobs.tolist() for c in plain]
    assert sum(c.num_accepted_tokens for c in drafted) > 0


def test_a_published_layer_keeps_every_bit(layer: HeadWeights) -> None:
    manifest, chunks = pack_head(layer, weight_version=0)
    again = published_head(manifest, weight_views(manifest, chunks))
    assert is_mtp(manifest) and not is_head(manifest)
    assert again.config == layer.config and again.tensors.keys() == layer.tensors.keys()
    assert all(again.tensors[name].equal(tensor) for name, tensor in layer.tensors.items())
    assert manifest.checksum == head_checksum(layer) == head_checksum(again)


def test_the_layer_reads_the_targets_new_output_matrix(folder: Path, layer, make_requests) -> None:
    """Embedding and output are the target's own: what is published to it, the layer drafts with."""
    target = load_causal_lm(str(folder), "float32")
    engine = engine_of(target, layer, CHAIN)
    for request in make_requests((9, 12), SamplingParams(max_new_tokens=60)):
        engine.submit(request)
    engine.step()
    random = torch.Generator().manual_seed(3)
    changed = {
        name: tensor + torch.randn(tensor.shape, generator=random) * 0.05
        for name, tensor in target.state_dict().items()
    }
    engine.runner.load(changed)
    batch = engine._batch
    hidden = engine.drafter._root[: len(batch)]
    out = engine.runner.output_logits(hidden)
    torch.testing.assert_close(out, hidden @ changed["lm_head.weight"].T, rtol=1e-3, atol=1e-3)
    assert engine.drafter.forward._embedding.equal(changed["model.embed_tokens.weight"])


def test_an_eagle_head_is_no_mtp_layer(target, layer) -> None:
    with pytest.raises(ConfigError, match="is 'mtp' but no MTP layer was given"):
        engine_of(target, random_head(target), CHAIN)
    with pytest.raises(ConfigError, match="is 'head' but no draft head was given"):
        engine_of(target, layer, CHAIN.model_copy(update={"drafter": "head"}))
