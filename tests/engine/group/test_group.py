"""A model dealt to two or four processes gives the bits of one, whatever is drafted, filtered, loaded or moved."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhfspec.core.config import EngineConfig, SpeculationConfig
from rlhfspec.core.errors import ConfigError, ModelError, NumericsError, WeightsError
from rlhfspec.core.records import Completion, Prompt, SampleKey, SampleRequest, SamplingParams, Stream
from rlhfspec.engine.build import build_engine
from rlhfspec.engine.cpu import products
from rlhfspec.engine.engine import Engine
from rlhfspec.engine.exchange import TARGET
from rlhfspec.engine.group import rank_sockets
from rlhfspec.engine.group.dealing import PANEL, LocalRanks, dealt, require_dealt, require_module_dealt
from rlhfspec.engine.group.group_probe import require_bits_of_one_rank
from rlhfspec.engine.group.ranks import GroupError, GroupRanks, joined
from rlhfspec.engine.model.compute_backend import ComputeBackend
from rlhfspec.engine.model.llama_model import LlamaModel, known_config
from rlhfspec.engine.numerics import choose_backend
from rlhfspec.engine.weights.chunks import unique_tensors
from tests.helpers.backends import CPU

VOCABULARY, LAYERS = 203, 2
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    # three KV heads: of two ranks one has one, of four one has none
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "intermediate_size": 136,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
PLANS = {
    "plain": SpeculationConfig(drafter="none", policy="off"),
    "look_up": SpeculationConfig(drafter="suffix", policy="fixed", num_nodes=6, depth=4, branching=2),
    "tree": SpeculationConfig(drafter="model", policy="fixed", num_nodes=7, depth=3, branching=2),
    "chain": SpeculationConfig(drafter="model", policy="fixed", num_nodes=4, depth=4, branching=1),
}


def llama(seed: int, **changes: object) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**(SIZES | changes))).eval()  # type: ignore[arg-type]


def joined_in_test(folder: Path, rank: int) -> GroupRanks:
    return joined(str(folder), rank, 4, instance="gen-0", start_timeout_s=60.0, step_timeout_s=60.0)


def engine_of(plan: str, ranks: GroupRanks | None = None, seed: int = 1, **changes: object) -> Engine:
    draft = dealt(llama(seed + 7, num_hidden_layers=1), None) if PLANS[plan].drafter == "model" else None
    settings = {"device": "cpu", "numerics": "invariant", "max_running_samples": 6, "probe": False}
    return build_engine(
        dealt(llama(seed), ranks),
        draft,
        engine=EngineConfig(**(settings | changes)),  # type: ignore[arg-type]
        speculation=PLANS[plan],
        max_total_tokens=96,
    )


def requests(count: int, **sampling: object) -> list[SampleRequest]:
    random = np.random.default_rng(count)
    # pairs share a prompt: the second one's cells are copied from the first one's slot
    prompts = [random.integers(1, VOCABULARY, 3 + number % 9) for number in range(-(-count // 2))]
    return [
        SampleRequest(
            key=SampleKey(run_seed=3, stream=Stream.BENCH, sample_index=index),
            prompt=Prompt(prompt_id=index // 2, token_ids=prompts[index // 2]),
            sampling=SamplingParams(
                **({"max_new_tokens": 24, "temperature": (1.0, 0.6, 0.0)[index % 3]} | sampling)  # type: ignore[arg-type]
            ),
        )
        for index in range(count)
    ]


def bits(completions: list[Completion]) -> list[tuple]:
    return [
        (
            one.finish_reason,
            *(a.tobytes() for a in (one.token_ids, one.policy_logprobs, one.sampling_logprobs)),
        )
        for one in completions
    ]


@pytest.fixture
def group(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[GroupRanks]:
    processes = LocalRanks(tmp_path, request.param)
    try:
        yield processes.ranks
        processes.stop()
    finally:
        processes.kill()


@pytest.mark.parametrize("group", [2, 4], indirect=True)
def test_a_group_gives_the_bits_of_one_rank(group: GroupRanks) -> None:
    for plan in PLANS:
        alone, groups = engine_of(plan), engine_of(plan, group)
        wanted = requests(10)
        assert bits(groups.generate(wanted)) == bits(alone.generate(wanted)), plan
        filtered = requests(4, top_p=0.8, temperature=0.9, top_k=50)
        assert bits(groups.generate(filtered)) == bits(alone.generate(filtered)), plan


@pytest.mark.parametrize("group", [2], indirect=True)
def test_weights_that_are_loaded_reach_every_rank(group: GroupRanks) -> None:
    other = dict(unique_tensors(llama(2)))
    alone, groups = engine_of("look_up"), engine_of("look_up", group)
    for engine in (alone, groups):
        engine.generate(requests(2))
        engine.runner.load_parts(other, [{name: tensor} for name, tensor in other.items()])
    wanted = requests(6)
    found = bits(groups.generate(wanted))
    assert found == bits(alone.generate(wanted)) == bits(engine_of("plain", seed=2).generate(wanted))


@pytest.mark.parametrize("group", [4], indirect=True)
def test_a_version_that_ends_early_is_followed_by_a_whole_one(group: GroupRanks) -> None:
    other = dict(unique_tensors(llama(2)))
    engine = engine_of("look_up", group)

    def ends_early() -> Iterator[dict[str, torch.Tensor]]:
        for name, tensor in list(other.items())[:5]:
            yield {name: tensor}
        raise WeightsError("chunk 1 of 2 is damaged")

    with pytest.raises(WeightsError, match="is damaged"):
        engine.runner.load_parts(other, ends_early())
    with pytest.raises(WeightsError, match="ended early"):
        engine.runner.load_parts(other, [])
    with pytest.raises(WeightsError, match="1 names differ, first 'nope'"):
        engine.runner.load_parts(other, [{"nope": torch.zeros(1)}])
    engine.runner.load_parts(other, [other])
    wanted = requests(6)
    assert bits(engine.generate(wanted)) == bits(engine_of("plain", seed=2).generate(wanted))


@pytest.mark.parametrize("group", [2], indirect=True)
def test_the_published_width_of_weights_changes_nothing(group: GroupRanks) -> None:
    half = [dealt(llama(1).bfloat16(), ranks) for ranks in (None, group)]
    alone, groups = (
        build_engine(
            model,
            None,
            engine=EngineConfig(device="cpu", numerics="invariant", kv_cache_mb=1.0),
            speculation=PLANS["look_up"],
            max_total_tokens=96,
            vocab_size=VOCABULARY,
        )
        for model in half
    )
    wanted = requests(8)
    assert bits(groups.generate(wanted)) == bits(alone.generate(wanted))


@pytest.mark.parametrize("group", [2], indirect=True)
def test_a_step_is_one_order_one_exchange_and_two_sums_a_layer(group: GroupRanks) -> None:
    engine = engine_of("tree", group)
    for request in requests(3, max_new_tokens=40):
        engine.submit(request)
    engine.step()
    before = group.num_orders, group.num_sums, group.num_exchanges
    engine.step()
    after = group.num_orders, group.num_sums, group.num_exchanges
    assert tuple(np.subtract(after, before)) == (1, 2 * LAYERS, 1)


@pytest.mark.parametrize("group", [2], indirect=True)
@pytest.mark.parametrize("outwards", [True, False])
def test_a_sample_moves_between_groups_of_other_sizes(group: GroupRanks, outwards: bool) -> None:
    """A cell's bytes lie by head, whoever wrote them: half a response here, half there, the bits of one engine."""
    alone, groups = engine_of("chain"), engine_of("chain", group)
    source, to = (groups, alone) if outwards else (alone, groups)
    wanted = requests(3, max_new_tokens=40, temperature=1.0)
    for request in wanted:
        source.submit(request)
    for _ in range(4):
        source.step()
    for request in wanted:
        left = source.exchange.detach(
            request.key, weight_version=0, shipped=dict.fromkeys(source.exchange.token_bytes, 0)
        )
        assert left is not None
        state, pieces = left
        assert any(piece.part == TARGET for piece in pieces)
        assert to.exchange.attach(state, pieces) == 0
    done = {}
    while to.has_work:
        done |= {completion.key: completion for completion in to.step()}
    expected = engine_of("plain").generate(wanted)
    assert bits([done[request.key] for request in wanted]) == bits(expected)


@pytest.mark.parametrize("number", [0, 2])
def test_a_killed_rank_ends_the_instance_with_its_name(tmp_path: Path, number: int) -> None:
    processes = LocalRanks(tmp_path, 4)
    try:
        engine = engine_of("look_up", processes.ranks)
        for request in requests(4):
            engine.submit(request)
        engine.step()
        processes.followers[number].kill()
        processes.followers[number].wait()
        with pytest.raises(GroupError, match=r"instance gen-0: rank 0 of 4 waited for rank \d"):
            while engine.has_work:
                engine.step()
    finally:
        processes.kill()


def test_the_folder_where_ranks_met_may_go_once_the_leader_has_met_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = rank_sockets._reached

    def slowly(place: str, rank: int, ends_s: float) -> socket.socket:
        # the leader first: it has met everybody long before they have met each other
        if not place.endswith("/0"):
            time.sleep(0.5)
        return reached(place, rank, ends_s)

    monkeypatch.setattr(rank_sockets, "_reached", slowly)
    (tmp_path / "meeting").mkdir()

    def follow(rank: int) -> None:
        with closing(joined_in_test(tmp_path / "meeting", rank)) as ranks:
            assert ranks.next_order() == ("stop", {})

    with ThreadPoolExecutor(3) as threads:
        followers = [threads.submit(follow, rank) for rank in (1, 2, 3)]
        leader = joined_in_test(tmp_path / "meeting", 0)
        shutil.rmtree(tmp_path / "meeting")
        leader.order("stop")
        for follower in followers:
            follower.result(timeout=60.0)
        leader.close()


@pytest.mark.parametrize("group", [2, 4], indirect=True)
def test_the_probe_finds_ranks_that_do_not_give_the_bits_of_one(
    group: GroupRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, backend = llama(1).config.to_json_string(use_diff=False), choose_backend(CPU)
    for dtype in ("float32", "bfloat16"):
        require_bits_of_one_rank(text, dtype, backend=backend, ranks=group)
    of_a_layer = f"of a layer that {group.share.ranks} ranks compute differ"
    exchange, add_up = group.exchange, group.add_up

    def sums_off_by_a_little(mine: torch.Tensor) -> torch.Tensor:
        return exchange(mine + 1e-5 if mine.dtype == torch.float64 else mine)

    with monkeypatch.context() as patch:
        patch.setattr(group, "exchange", sums_off_by_a_little)
        with pytest.raises(NumericsError, match=f"log-probabilities at temperature 1 {of_a_layer}"):
            require_bits_of_one_rank(text, "float32", backend=backend, ranks=group)

    def off_by_a_little(x: torch.Tensor, part: torch.Tensor) -> None:
        add_up(x, part + 1e-6 * part)

    monkeypatch.setattr(group, "add_up", off_by_a_little)
    with pytest.raises(NumericsError, match=f"logits {of_a_layer}"):
        require_bits_of_one_rank(text, "float32", backend=backend, ranks=group)


def test_models_that_cannot_be_dealt_are_refused_by_name() -> None:
    text = llama(1).config.to_json_string(use_diff=False)
    shapes = {name: tuple(tensor.shape) for name, tensor in unique_tensors(llama(1))}
    config = known_config(text, shapes)
    require_dealt(text, config, 4, None)
    with pytest.raises(ModelError, match="multiples of 16, got one of type 'llama'"):
        require_dealt(text, None, 2, None)
    with pytest.raises(ModelError, match="multiples of 16, got one of type 'llama'"):
        require_module_dealt(llama(1, hidden_size=72), 2, None)
    assert products.PANEL == PANEL
    with pytest.raises(ModelError, match="must be 1, 2 or 4, got 3"):
        require_dealt(text, config, 3, None)
    with pytest.raises(ModelError, match="rank 3 would have 8 inner columns and 7 token ids"):
        require_dealt(text, config, 4, 34)
    with pytest.raises(ModelError, match=r"have no bias, got 'model.layers.0.self_attn.o_proj.bias'"):
        require_module_dealt(llama(1, attention_bias=True), 2, None)


@pytest.mark.parametrize("group", [2], indirect=True)
def test_library_forwards_are_refused(group: GroupRanks) -> None:
    model = llama(1)
    tensors = dict(unique_tensors(model))
    text = model.config.to_json_string(use_diff=False)
    config = known_config(text, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    assert config is not None
    plain = LlamaModel(config, torch.float32, ComputeBackend(CPU), ranks=_Silent(group))
    with pytest.raises(ConfigError, match="needs forwards of our own on CPUs"):
        build_engine(
            plain,
            None,
            engine=EngineConfig(device="cpu"),
            speculation=PLANS["plain"],
            max_total_tokens=96,
        )


class _Silent:
    """Ranks that hear of nothing: what is tried is refused before they would."""

    def __init__(self, ranks: GroupRanks) -> None:
        self.share = ranks.share

    def order(self, kind: str, **what: object) -> None:
        raise AssertionError(kind)

    add_up = exchange = hand_on = give = order  # type: ignore[assignment]
