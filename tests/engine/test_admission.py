"""Caches smaller than all samples at full length: who waits, who goes on, and no bit that differs for it."""

import mmap
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from rlhfspec.cluster.plan.memory_plan import MemoryNeeds
from rlhfspec.cluster.plan.model_sizes import ModelShape, ModelShapes
from rlhfspec.core.config import EngineConfig, SpeculationConfig
from rlhfspec.core.config_io import config_from_dict
from rlhfspec.core.errors import ConfigError
from rlhfspec.core.records import Completion, SamplingParams
from rlhfspec.engine.admission import MB, KVAdmission
from rlhfspec.engine.build import build_engine
from rlhfspec.engine.cache.cuda_memory import MappedMemory
from rlhfspec.engine.cache.kv_memory import PagedHostMemory
from rlhfspec.engine.cache.kv_pool import KVShape
from rlhfspec.engine.decoding.running_batch import RunningBatch
from rlhfspec.engine.engine import Engine
from tests.helpers.backends import CPU, own_backend
from tests.helpers.host_pages import HostPages

PROMPTS = (5, 40, 17, 1, 33, 64, 20, 9)
LONGEST = 400
SAMPLING = [SamplingParams(max_new_tokens=count) for count in (30, 240, 90, 60, 20, 300, 45, 150)]
PLANS = {
    "off": SpeculationConfig(policy="off"),
    "chain4": SpeculationConfig(policy="fixed", num_nodes=4, branching=1),
    "tree16": SpeculationConfig(policy="fixed", num_nodes=16, depth=4, branching=3),
    "suffix": SpeculationConfig(policy="fixed", drafter="suffix", num_nodes=5),
}


def bits(completion: Completion) -> tuple:
    arrays = (completion.token_ids, completion.policy_logprobs, completion.sampling_logprobs)
    return (completion.finish_reason, *(array.tobytes() for array in arrays))


@pytest.fixture(scope="module")
def make_small(pairs) -> Callable[..., Engine]:
    """An engine of 8 slots whose caches have room for `num_long` samples of full length."""

    def make(plan: str, num_long: float | None, *, dtype: str = "float32", attention: str = "auto") -> Engine:
        limit = None
        if num_long is not None:
            # two layers, two heads of 16, keys and values, float32; 416 tokens to a slot, rounded up
            one = 2 * 2 * 2 * 448 * 16 * 4 * (1 if plan in ("off", "suffix") else 2)
            limit = num_long * one / MB
        config = EngineConfig(
            device="cpu",
            attention=attention,  # type: ignore[arg-type]
            numerics="fast" if attention == "sdpa" else "invariant",
            max_running_samples=8,
            max_prefill_tokens=96,
            probe=False,
            kv_cache_mb=limit,
        )
        return build_engine(
            pairs[dtype].target,
            pairs[dtype].draft,
            engine=config,
            speculation=PLANS[plan],
            max_total_tokens=LONGEST,
        )

    return make


@pytest.fixture(scope="module")
def with_room(make_small, make_requests) -> Callable[..., tuple[list[tuple], int]]:
    """Bits of plain decoding in caches that all samples fit into, made once, and how many tokens it prefilled."""

    @cache
    def of(dtype: str = "float32", attention: str = "auto") -> tuple[list[tuple], int]:
        whole = make_small("off", None, dtype=dtype, attention=attention)
        done = [bits(completion) for completion in whole.generate(make_requests(PROMPTS, SAMPLING))]
        assert whole.stats.num_preemptions == 0
        return done, whole.stats.num_prefill_tokens

    return of


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("plan", PLANS)
def test_preempted_samples_come_to_the_same_bits(make_small, make_requests, with_room, plan, dtype):
    small = make_small(plan, 1.2, dtype=dtype)
    assert isinstance(small.runner.pool.memory, PagedHostMemory)
    expected, num_prefill_tokens = with_room(dtype=dtype)
    done = small.generate(make_requests(PROMPTS, SAMPLING))
    assert [bits(completion) for completion in done] == expected
    assert small.stats.num_preemptions > 0
    assert small.stats.num_prefill_tokens > num_prefill_tokens, "what was preempted is computed again"


def nothing_behind_what_is_held(pools) -> bool:
    """What was given back reads as zeros; what was not would show what it last held."""
    for pool in pools:
        tokens = pool.memory._held * mmap.PAGESIZE // (16 * 4)
        if any(pool.cells[:, :, slot, :, count:].any() for slot, count in enumerate(tokens.tolist())):
            return False
    return True


def test_pages_of_a_sample_that_moved_twice_are_given_back(make_small):
    """Slots 2 and 0 end in one step, and slot 3 is long: it passes through slot 2, where a short sample comes next."""
    engine = make_small("off", 4.0)
    pool = engine.runner.pool
    pool.memory.hold(np.array([60, 60, 60, 400]))
    pool.cells[:, :, 3, :, :400] = 1.0
    pool.move_slot(3, 2, 400)
    pool.move_slot(2, 0, 400)
    pool.memory.hold(np.array([400, 60, 60]))
    assert nothing_behind_what_is_held([pool])
    assert pool.cells[:, :, 0, :, :400].all()


def test_what_is_held_stays_within_the_limit_at_every_step(make_small, make_requests):
    engine = make_small("tree16", 1.5)
    room, pools = engine.exchange.kv_admission, [engine.runner.pool, engine.drafter.cache]
    most = 1.5 * 2 * 2 * 2 * 2 * 448 * 16 * 4
    for request in make_requests(PROMPTS, SAMPLING):
        engine.submit(request)
    held, most_running = [], 0
    while engine.has_work:
        engine.step()
        most_running = max(most_running, engine.num_running)
        held.append(sum(int(pool.memory._held.sum()) * pool.memory.growth_bytes for pool in pools))
        assert held[-1] <= most
        assert engine.num_context_tokens == engine._batch.lengths[: engine.num_running].sum()
        assert nothing_behind_what_is_held(pools)
        assert room.free_bytes is not None and len(engine.progress()) == engine.num_running
    assert most_running > 2, "short ones share what one long one would take"
    assert max(held) > 0.6 * most
    assert not engine.runner.pool.cells.any(), "an idle engine keeps nothing"


def test_the_shortest_is_preempted_and_is_the_first_to_return(make_small, make_requests):
    engine = make_small("off", 1.2)
    for request in make_requests((60, 50, 40), SamplingParams(max_new_tokens=300)):
        engine.submit(request)
    orders: list[tuple[list[int], list[int]]] = []
    while engine.has_work:
        running = {key.sample_index: count for key, count in engine.progress().items()}
        waiting = [state.request.key.sample_index for state in engine._waiting]
        before = engine.stats.num_preemptions
        engine.step()
        if engine.stats.num_preemptions > before and running:
            now = {key.sample_index for key in engine.progress()}
            gone = set(running) - now
            lengths = {i: count + (60, 50, 40)[i] for i, count in running.items()}
            assert gone and max(lengths[i] for i in gone) <= min(lengths[i] for i in now)
            assert engine._waiting[0].request.key.sample_index in gone
        orders.append((sorted(running), waiting))
    assert engine.stats.num_preemptions >= 2
    assert engine.stats.num_completions == 3


def test_a_cache_without_room_for_one_sample_is_refused(make_small):
    with pytest.raises(ConfigError, match=r"no room for one sample of 400 tokens.*data\.max_prompt_tokens"):
        make_small("chain4", 0.9)


@pytest.mark.parametrize("plan", ["off", "chain4"])
def test_the_plan_of_memory_asks_for_the_room_that_the_engine_asks_for(make_small, pairs, plan):
    shape = ModelShape(
        num_params=1, kv=KVShape.of(pairs["float32"].target.config), hidden_size=64, vocab_size=64
    )
    config = config_from_dict(
        {
            "data": {"task": "chain"},
            "models": {"draft": "demo"},
            "engine": {"kv_cache_mb": 1.0, "device": "cpu"},
            "speculation": {"policy": "off"} if plan == "off" else {"policy": "fixed", "num_nodes": 4},
        }
    )
    shapes = ModelShapes(target=shape, draft=None if plan == "off" else shape)
    made = MemoryNeeds(config, shapes, max_total_tokens=LONGEST).plan(object_store_bytes=0)
    full = 2 * 2 * 2 * 448 * 16 * 4 * (1 if plan == "off" else 2)
    assert made.longest_sample_bytes == full
    make_small(plan, 1.0)
    with pytest.raises(ConfigError, match="no room for one sample"):
        make_small(plan, 0.999)


def test_an_engine_without_a_limit_asks_for_nothing(make_small):
    engine = make_small("off", None)
    room = engine.exchange.kv_admission
    assert (room.free_bytes, room.one_too_many(), room.num_of(10**9), room.num_more()) == (None, None, 8, 8)
    assert room.admits(10**9)


def test_free_slots_are_those_the_caches_have_room_for(make_small, make_requests):
    engine = make_small("off", 2.0)
    assert engine.exchange.num_free_slots == 2, "nobody runs: it may be two long ones"
    for request in make_requests((20, 20), SamplingParams(max_new_tokens=300)):
        engine.submit(request)
    engine.step()
    assert engine.exchange.num_free_slots > 2, "those that run are short so far"
    engine.exchange.num_reserved = 8
    assert engine.exchange.num_free_slots < 0 and engine.load().num_free_slots == 0


def test_a_sample_that_comes_to_full_caches_waits_and_ends_alike(make_small, make_requests):
    requests = make_requests((60, 50, 200), SamplingParams(max_new_tokens=150))
    expected = {c.key: bits(c) for c in make_small("off", None).generate(requests)}
    source, to = make_small("chain4", None), make_small("chain4", 1.05)
    source.submit(requests[2])
    for request in requests[:2]:
        to.submit(request)
    for _ in range(3):
        source.step()
        to.step()
    left = source.exchange.detach(requests[2].key, weight_version=0, shipped={"target": 0, "draft": 0})
    assert left is not None
    assert to.exchange.attach(*left) is None
    assert to.num_waiting == 1 and to.num_running == 2
    done = {}
    while to.has_work:
        done.update((completion.key, bits(completion)) for completion in to.step())
    assert done == expected


def test_a_leased_sample_that_is_preempted_is_read_no_more(make_small, make_requests):
    engine = make_small("off", 1.2)
    requests = make_requests((60, 50), SamplingParams(max_new_tokens=300))
    for request in requests:
        engine.submit(request)
    engine.step()
    lease = engine.exchange.lease(requests[1].key)
    while not engine.stats.num_preemptions:
        engine.step()
    assert lease.slot is None
    left = engine.exchange.detach(requests[1].key, weight_version=0, shipped={"target": 10})
    assert left is not None and left[1] == () and len(left[0].token_ids) > 0


@pytest.mark.parametrize("plan", ["off", "chain4", "tree16"])
def test_mapped_pages_serve_an_engine_to_the_same_bits(
    make_small, make_requests, with_room, monkeypatch, plan
):
    """As on a GPU: cells token by token, pages behind addresses that stay, slots that change pages."""
    drivers: list[HostPages] = []

    def mapped(shape, device, *, paged):
        drivers.append(HostPages())
        return MappedMemory(shape, drivers[-1])

    expected, _ = with_room(attention="reference")
    monkeypatch.setattr("rlhfspec.engine.cache.kv_pool.memory_for", mapped)
    engine = make_small(plan, 1.1, attention="reference")
    done = engine.generate(make_requests(PROMPTS, SAMPLING))
    assert [bits(completion) for completion in done] == expected
    assert engine.stats.num_preemptions > 0
    assert 1 < drivers[0].num_created < len(drivers[0].mapped) / 2


def test_room_counts_every_cache(make_small):
    engine = make_small("chain4", 2.0)
    alone = make_small("off", 2.0)
    assert engine.exchange.kv_admission.num_of(100) == alone.exchange.kv_admission.num_of(100)
    batch = RunningBatch(num_slots=2, max_total_tokens=100, device=CPU, noise=own_backend().noise)
    with pytest.raises(ConfigError, match=r"0\.0 MB have no room"):
        KVAdmission(batch, [engine.runner.pool], max_bytes=10)
