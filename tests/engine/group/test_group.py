"""A model dealt to two or four processes gives the bits of one, whatever is drafted, filtered, loaded or moved."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import timedelta
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
from rlhfspec.engine.cuda.cuda_backend import CudaBackend
from rlhfspec.engine.engine import Engine
from rlhfspec.engine.exchange import TARGET
from rlhfspec.engine.group import collectives
from rlhfspec.engine.group.collectives import ProcessGroupCollectives
from rlhfspec.engine.group.dealing import PANEL, LocalRanks, dealt, require_dealt, require_module_dealt
from rlhfspec.engine.group.follower import Follower
from rlhfspec.engine.group.group_probe import require_bits_of_one_rank
from rlhfspec.engine.group.ranks import GroupError, GroupRanks, joined
from rlhfspec.engine.model.compute_backend import ComputeBackend
from rlhfspec.engine.model.cuda_graphs import ForwardGraphs, Run
from rlhfspec.engine.model.llama_model import LlamaModel, config_of, known_config
from rlhfspec.engine.numerics import choose_backend
from rlhfspec.engine.weights.chunks import unique_tensors
from tests.engine.test_exchange import read
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


def joined_in_test(folder: Path, rank: int, num_ranks: int = 4) -> GroupRanks:
    return joined(str(folder), rank, num_ranks, instance="gen-0", start_timeout_s=60.0, step_timeout_s=60.0)


class Threads:
    """The ranks of a group as threads of this process: they meet as processes do."""

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self.followers: list[Follower] = []
        self._folder, self._num_ranks = folder, num_ranks
        self._pool = ThreadPoolExecutor(num_ranks - 1)
        self._running = [self._pool.submit(self._follow, rank) for rank in range(1, num_ranks)]
        self.ranks = joined_in_test(folder, 0, num_ranks)

    def _follow(self, rank: int) -> None:
        with closing(joined_in_test(self._folder, rank, self._num_ranks)) as ranks:
            self.followers.append(Follower(ranks))
            self.followers[-1].follow()

    def stop(self) -> None:
        """Let them end; what they raised is raised."""
        self.ranks.order("stop")
        for running in self._running:
            running.result(timeout=60.0)
        self.ranks.close()


@contextmanager
def threads(folder: Path, num_ranks: int) -> Iterator[Threads]:
    group = Threads(folder, num_ranks)
    try:
        yield group
    finally:
        group.stop()


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
    with threads(tmp_path, request.param) as group:
        yield group.ranks


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
def test_a_step_is_one_order_one_exchange_and_two_sums_a_layer(
    group: GroupRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of("tree", group)
    for request in requests(3, max_new_tokens=40):
        engine.submit(request)
    engine.step()
    calls: list[str] = []
    for name in ("gather", "broadcast"):
        usual = getattr(group._devices, name)
        monkeypatch.setattr(
            group._devices,
            name,
            lambda one, called=name, usual=usual, **how: calls.append(called) or usual(one, **how),
        )
    before = group.num_orders, group.num_sums, group.num_exchanges
    engine.step()
    after = group.num_orders, group.num_sums, group.num_exchanges
    assert tuple(np.subtract(after, before)) == (1, 2 * LAYERS, 1)
    # what the order says of tensors comes by one broadcast, behind its header
    assert calls == ["broadcast", "broadcast", *["gather"] * (2 * LAYERS + 1)]


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
    counts = [source.exchange.cached_tokens(request.key) or {} for request in wanted]
    leases = [source.exchange.lease(request.key) for request in wanted]
    source.step()
    for request, held, lease in zip(wanted, counts, leases, strict=True):
        # read while decoding goes on; the rest comes as the sample leaves
        leased = read(lease, source, held)
        source.exchange.end_lease(lease)
        left = source.exchange.detach(request.key, weight_version=0, shipped=held)
        assert left is not None
        state, pieces = left
        assert any(piece.part == TARGET for piece in pieces)
        assert to.exchange.attach(state, [*leased, *pieces]) == 0
    done = {}
    while to.has_work:
        done |= {completion.key: completion for completion in to.step()}
    expected = engine_of("plain").generate(wanted)
    assert bits([done[request.key] for request in wanted]) == bits(expected)


@pytest.mark.parametrize(("num_ranks", "killed"), [(2, 1), (4, 3)])
def test_a_killed_rank_ends_the_instance_with_its_name(tmp_path: Path, num_ranks: int, killed: int) -> None:
    processes = LocalRanks(tmp_path, num_ranks)
    others = " or ".join(map(str, range(1, num_ranks)))
    try:
        engine = engine_of("look_up", processes.ranks)
        for request in requests(4):
            engine.submit(request)
        engine.step()
        processes.followers[killed - 1].kill()
        processes.followers[killed - 1].wait()
        waited = f"rank 0 of {num_ranks} waited for rank {others} and got"
        with pytest.raises(GroupError, match=f"{waited}|a rank ended with -9"):
            while engine.has_work:
                engine.step()
    finally:
        processes.kill()


def test_a_rank_that_stands_still_is_named_with_how_long_it_was_waited_for(tmp_path: Path) -> None:
    processes = LocalRanks(tmp_path, 2)
    try:
        engine = engine_of("look_up", processes.ranks)
        engine.submit(requests(1)[0])
        engine.step()
        assert isinstance(processes.ranks._hosts, ProcessGroupCollectives)
        processes.ranks._hosts._timeout = timedelta(seconds=1)
        processes.followers[0].send_signal(signal.SIGSTOP)
        late = r"(no answer within 1 s|Timed out waiting 1000ms for \w+ operation to complete)"
        waited = rf"rank 0 of 2 waited for rank 1 and got: {late}; the instance is lost"
        with pytest.raises(GroupError, match=waited):
            while engine.has_work:
                engine.step()
    finally:
        processes.kill()


def test_ranks_that_do_not_come_are_named(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"^rank 1, 2, 3 of 4 did not come within 0 s"):
        joined(str(tmp_path), 0, 4, instance="gen-0", start_timeout_s=0.0, step_timeout_s=60.0)


def test_the_folder_where_ranks_met_may_go_once_the_leader_has_met_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    met = collectives._await_all

    def slowly(store: object, rank: int, num_ranks: int, **how: object) -> None:
        met(store, rank, num_ranks, **how)  # type: ignore[arg-type]
        # the leader first: it has met everybody long before they have met each other
        time.sleep(0.5 if rank else 0.0)

    monkeypatch.setattr(collectives, "_await_all", slowly)
    (tmp_path / "meeting").mkdir()

    def follow(rank: int) -> None:
        with closing(joined_in_test(tmp_path / "meeting", rank)) as ranks:
            assert ranks.next_order() == ("stop", (), {})

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


def fast_engine(backend: ComputeBackend, ranks: GroupRanks | None) -> Engine:
    """As on a GPU: library products, or operators of a GPU in torch's own calls."""
    model, draft = llama(1), dealt(llama(8, num_hidden_layers=1), None)
    config, tensors = config_of(model), dict(unique_tensors(model))
    assert config is not None
    target = LlamaModel(config, torch.float32, backend, ranks=ranks)
    target.load(tensors, [tensors])
    settings = EngineConfig(
        device=backend.device.type,  # type: ignore[arg-type]
        numerics="fast",
        attention="sdpa",
        max_running_samples=6,
    )
    drafts = "look_up" if backend.device.type == "cuda" else "chain"
    return build_engine(
        target,
        None if drafts == "look_up" else draft,
        engine=settings,
        speculation=PLANS[drafts],
        max_total_tokens=96,
    )


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_give_the_tokens_of_one(tmp_path: Path) -> None:
    backend = choose_backend(torch.device("cuda", 0))
    wanted = requests(8, temperature=0.0)
    expected = [one.token_ids.tolist() for one in fast_engine(backend, None).generate(wanted)]
    processes = LocalRanks(tmp_path, 2, "cuda")
    try:
        engine = fast_engine(backend, processes.ranks)
        # recorded, then replayed
        for _ in range(2):
            assert [one.token_ids.tolist() for one in engine.generate(wanted)] == expected
        processes.stop()
    finally:
        processes.kill()


@pytest.mark.parametrize("make_backend", [ComputeBackend, CudaBackend])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_forwards_of_a_gpu_give_the_tokens_of_one_rank_and_are_recorded_by_all(
    tmp_path: Path, make_backend: type[ComputeBackend], num_ranks: int
) -> None:
    """Library products and our operators' torch bodies, greedy; half of the shapes find the recorder full."""

    wanted = requests(8, temperature=0.0)
    expected = [one.token_ids.tolist() for one in fast_engine(make_backend(CPU), None).generate(wanted)]
    with threads(tmp_path, num_ranks) as group:
        engine = fast_engine(make_backend(CPU), group.ranks)
        engine.generate(requests(1))
        recorders = [_Again() for _ in range(num_ranks)]
        runners = [engine.runner, *(each._runner for each in group.followers)]
        for runner, recorder, limit in zip(runners, recorders, [4, *[1000] * num_ranks], strict=False):
            assert runner is not None
            runner.graphs = ForwardGraphs(recorder, max_bytes=limit)
        assert [one.token_ids.tolist() for one in engine.generate(wanted)] == expected
    first = recorders[0]
    assert first.held_bytes == 4 and first.replays > 10
    assert all((one.held_bytes, one.replays) == (first.held_bytes, first.replays) for one in recorders)


class _Again:
    """Runs again what it was given, over the tensors that it had."""

    def __init__(self) -> None:
        self.held_bytes = self.replays = 0

    def record(self, run: Run) -> Run:
        run()
        self.held_bytes += 1

        def replay() -> torch.Tensor:
            self.replays += 1
            return run()

        return replay


def test_a_gpu_waits_for_no_collective_call_on_the_host() -> None:
    waits: list[tuple] = []

    class Work:
        def wait(self, *timeout: object) -> None:
            waits.append(timeout)

    class Group:
        def _allgather_base(self, everyone: torch.Tensor, mine: torch.Tensor) -> Work:
            everyone.copy_(mine.repeat(2))
            return Work()

        def broadcast(self, tensors: list[torch.Tensor], options: object) -> Work:
            return Work()

    mine = torch.arange(6, dtype=torch.float64).view(2, 3).t()
    for device, number in (("cuda", 0), ("cpu", 1)):
        waits.clear()
        calls = collectives.ProcessGroupCollectives(
            Group(), num_ranks=2, device=torch.device(device), timeout_s=5.0
        )
        assert torch.equal(calls.gather(mine), torch.stack([mine, mine]))
        calls.broadcast(mine.contiguous())
        assert [len(timeout) for timeout in waits] == [number, number]


@pytest.mark.parametrize("group", [2], indirect=True)
def test_library_forwards_are_refused(group: GroupRanks) -> None:
    model = llama(1)
    tensors = dict(unique_tensors(model))
    text = model.config.to_json_string(use_diff=False)
    config = known_config(text, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    assert config is not None
    plain = LlamaModel(config, torch.float32, ComputeBackend(CPU), ranks=group)
    plain.load(tensors, [tensors])
    with pytest.raises(ConfigError, match="gives the bits of one rank by forwards of our own on CPUs"):
        build_engine(
            plain,
            None,
            engine=EngineConfig(device="cpu"),
            speculation=PLANS["plain"],
            max_total_tokens=96,
        )
