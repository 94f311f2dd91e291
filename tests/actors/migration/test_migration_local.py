"""Forced random moves between real tiny engines: no token and no log-probability changes, nothing is left behind.

A whole pool in one thread (`local_pool`); a test policy moves samples again and again, both directions at once.
"""

from collections import Counter
from collections.abc import Iterator

import pytest
import tiny_pool
import torch
from forced_moves import Forced
from local_pool import LocalPool

from rlhfspec.core.records import SampleKey, SamplingParams
from rlhfspec.policies.reallocation.pool_records import MoveMode


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def make_pool() -> Iterator:
    pools = []

    def make(
        plans: dict[str, str], *, slots: int = 8, of_engine: dict | None = None, **settings
    ) -> LocalPool:
        engines = {
            name: tiny_pool.engine(plan, slots=slots, **(of_engine or {})) for name, plan in plans.items()
        }
        pools.append(LocalPool(engines, **settings))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def moved(pool: LocalPool) -> Counter[str]:
    return Counter(str(record.order.mode) for record in pool.outcome.moves if record.outcome == "moved")


def check(pool: LocalPool, asked) -> None:
    assert tiny_pool.mismatches(pool.outcome.completions, tiny_pool.reference(asked)) == []
    assert pool.outcome.alarms == [] and pool.outcome.delivered_twice == []
    pool.settle(max_turns=300)


def test_three_hundred_moves_change_no_bit(make_pool):
    asked = tiny_pool.requests(28, new_tokens=110, group_size=2)
    pool = make_pool({"a": "tree8", "b": "chain4"}, slots=32, reallocation=Forced(share=0.9))
    pool.run(asked)
    counts = moved(pool)
    assert sum(counts.values()) >= 300 and min(counts["migrate"], counts["recompute"]) >= 100
    each = Counter(record.order.key for record in pool.outcome.moves if record.outcome == "moved")
    assert max(each.values()) >= 5, "no sample was moved several times"
    ways = Counter(r.order.source for r in pool.outcome.moves if r.outcome == "moved")
    assert min(ways["a"], ways["b"]) >= 100
    check(pool, asked)


@pytest.mark.parametrize("mode", list(MoveMode))
def test_moves_among_three_instances_with_more_samples_than_slots(make_pool, mode):
    asked = tiny_pool.requests(14, new_tokens=40)
    policy = Forced(share=0.4, modes=[mode], seed=2)
    pool = make_pool({"a": "tree8", "b": "chain4", "c": "seldom"}, slots=4, reallocation=policy)
    pool.run(asked)
    # how many fit into the samples' time is the machine's load to say
    assert moved(pool)[str(mode)] >= 3
    check(pool, asked)


def test_moves_of_filtered_samples_that_stop_early(make_pool):
    sampling = SamplingParams(max_new_tokens=100, top_p=0.9, top_k=20, temperature=0.8, stop_token_ids=(3, 9))
    asked = tiny_pool.requests(24, sampling=sampling, group_size=3)
    pool = make_pool({"a": "tree8", "b": "chain4"}, slots=8, reallocation=Forced(share=0.5, seed=2))
    pool.run(asked)
    assert sum(moved(pool).values()) >= 20
    assert len({len(c.token_ids) for c in pool.outcome.completions.values()}) > 5
    check(pool, asked)


def test_moves_between_full_caches(make_pool):
    """Samples are preempted while they are shipped, and come to instances that have no room for them."""
    asked = tiny_pool.requests(12, new_tokens=260, group_size=2)
    # two samples of full length, or five that are short
    small = {"kv_cache_mb": 0.2, "max_total_tokens": 300}
    pool = make_pool(
        {"a": "tree8", "b": "chain4"}, slots=16, of_engine=small, reallocation=Forced(share=0.3, seed=8)
    )
    pool.run(asked)
    preempted = [each.engine.stats.num_preemptions for each in pool.instances.values()]
    assert min(preempted) >= 2 and sum(moved(pool).values()) >= 30
    check(pool, asked)


def test_moves_between_engines_without_draft_model(make_pool):
    asked = tiny_pool.requests(12, new_tokens=60)
    pool = make_pool({"a": "suffix", "b": "off"}, slots=8, reallocation=Forced(share=0.3, seed=3))
    pool.run(asked)
    assert sum(moved(pool).values()) >= 30
    check(pool, asked)


def test_a_short_sample_is_never_kept_from_finishing_by_its_moves(make_pool):
    asked = tiny_pool.requests(12, new_tokens=3)
    pool = make_pool({"a": "seldom", "b": "seldom"}, slots=8, reallocation=Forced(share=1.0, seed=4))
    pool.run(asked, max_turns=200)
    why = Counter(record.why_ended for record in pool.outcome.moves)
    assert why["finished before it left"] > 0
    check(pool, asked)


def test_a_channel_outlives_samples_that_finish_while_they_are_shipped(make_pool):
    """A destination that was told to wait for frames hears that none will come, and its channel stays good."""
    asked = tiny_pool.requests(40, new_tokens=6)
    policy = Forced(share=1.0, modes=[MoveMode.MIGRATE], seed=5)
    pool = make_pool({"a": "seldom", "b": "seldom"}, slots=8, reallocation=policy)
    pool.run(asked)
    ended = Counter((record.outcome, record.why_ended) for record in pool.outcome.moves)
    assert ended["kept", "finished before it left"] >= 2 and moved(pool)["migrate"] >= 2
    cold = [r.metrics["was_cold"] for r in pool.outcome.moves if "was_cold" in r.metrics]
    # a channel in each direction is opened once; moves prepared before it was known share its ticket
    assert len(pool.hub.wires) == 2, ended
    assert 0.0 in cold
    check(pool, asked)


def test_equal_seeds_give_equal_orders_of_the_first_moves(make_pool):
    """The pool is a fair test bed: what the policy orders first does not depend on the transfer threads."""
    first: list[list[tuple[SampleKey, str]]] = []
    for _ in range(2):
        pool = make_pool({"a": "seldom", "b": "seldom"}, reallocation=Forced(share=0.2, seed=6))
        pool.run(tiny_pool.requests(6, new_tokens=20))
        records = sorted(pool.outcome.moves, key=lambda record: record.ordered_s)
        first.append([(r.order.key, r.order.destination) for r in records if r.ordered_s <= 0.02])
    assert first[0] == first[1]
