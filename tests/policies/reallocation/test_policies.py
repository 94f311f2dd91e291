"""Laws of every reallocation policy, and of each."""

from collections import Counter

import numpy as np
import pytest
from pool_views import after, cheap_gate, cpu_curve, pool_view

from rlhfspec.core.errors import ConfigError
from rlhfspec.policies.reallocation.by_name import make_reallocation_policy
from rlhfspec.policies.reallocation.finish_time_policy import FinishTimePolicy
from rlhfspec.policies.reallocation.gate import Gate
from rlhfspec.policies.reallocation.paper_rule import PaperRule
from rlhfspec.policies.reallocation.pool_records import InstanceView, MoveMode, PoolView, ReallocationPolicy
from rlhfspec.policies.reallocation.sample_arrays import flatten
from rlhfspec.profiles.transfer import PrefillModel, TransferModel

MOVING = ("paper_rule", "finish_time")


def make(name: str) -> ReallocationPolicy:
    policy = make_reallocation_policy(name, curve=cpu_curve(), gate=cheap_gate())
    assert policy is not None
    return policy


def random_view(seed: int, *, num_instances: int = 6, num_slots: int = 12) -> PoolView:
    random = np.random.default_rng(seed)
    lengths = [
        random.integers(0, 200, random.integers(0, num_slots + 1)).tolist() for _ in range(num_instances)
    ]
    room = [num_slots - len(tokens) for tokens in lengths]
    return pool_view(
        *lengths,
        num_slots=num_slots,
        num_queued=int(random.integers(0, 8)),
        now_s=float(seed),
        arriving=[int(random.integers(0, r + 1)) if random.random() < 0.3 else 0 for r in room],
    )


@pytest.mark.parametrize("name", MOVING)
def test_no_sample_moves_twice_and_no_destination_gets_more_than_fits(name: str) -> None:
    policy = make(name)
    num_moves = 0
    for seed in range(60):
        view = random_view(seed)
        moves = policy.plan(view)
        num_moves += len(moves)
        assert len({move.key for move in moves}) == len(moves)
        by_name = {instance.instance: instance for instance in view.instances}
        for move in moves:
            assert move.key in by_name[move.source].keys
            assert move.source != move.destination
        for instance in view.instances:
            count = sum(move.destination == instance.instance for move in moves)
            assert count <= max(instance.num_free_slots, 0)
        # what the queue will take is not free
        free = sum(max(instance.num_free_slots, 0) for instance in view.instances)
        assert len(moves) <= max(free - view.num_queued, 0)
    assert num_moves > 20


@pytest.mark.parametrize("name", MOVING)
def test_equal_views_give_equal_moves(name: str) -> None:
    one, other = make(name), make(name)
    for seed in range(20):
        for policy in (one, other):
            policy.note_finished(10 * seed + 1)
            policy.note_transfer(num_bytes=1000 * seed + 1, seconds=0.01, cold=seed % 2 == 0)
            policy.note_prefill(num_tokens=seed + 1, seconds=0.01)
        assert one.plan(random_view(seed)) == other.plan(random_view(seed))


@pytest.mark.parametrize("name", MOVING)
@pytest.mark.parametrize("lengths", [(), ([],), ([5, 6],), ([], []), ([5], [])])
def test_where_nothing_can_be_gained_nothing_moves(name: str, lengths: tuple) -> None:
    assert make(name).plan(pool_view(*lengths)) == ()


def test_static_and_pull_move_nothing() -> None:
    for name in ("static", "pull"):
        assert make_reallocation_policy(name, curve=cpu_curve(), gate=cheap_gate()) is None


def test_an_unknown_policy_is_refused_with_the_names_of_the_others() -> None:
    with pytest.raises(ConfigError, match="paper_rule, finish_time"):
        make("lucky")


# ours


def test_a_balanced_pool_gives_no_moves() -> None:
    policy = make("finish_time")
    for step in range(40):
        tokens = [5 * step] * 12
        assert policy.plan(pool_view(tokens, tokens, now_s=0.1 * step)) == ()


def test_a_skewed_pool_moves_until_nearly_balanced_and_then_stops() -> None:
    policy = make("finish_time")
    random = np.random.default_rng(0)
    view = pool_view([60] * 16, [50] * 2)
    history = []
    for step in range(1, 60):
        moves = policy.plan(view)
        history.append(len(moves))
        view = after(view, moves, now_s=0.1 * step, extra_tokens=int(random.integers(0, 3)))
    sizes = [len(instance.keys) for instance in view.instances]
    assert max(sizes) - min(sizes) <= 2
    assert sum(history[:5]) == sum(history) == 16 - sizes[0]


def test_small_differences_that_come_and_go_move_nothing() -> None:
    policy = make("finish_time")
    random = np.random.default_rng(1)
    for step in range(100):
        sizes = 16 + random.integers(0, 2, 2)
        lengths = [(20 + 2 * step + random.integers(0, 12, size)).tolist() for size in sizes]
        assert policy.plan(pool_view(*lengths, now_s=0.1 * step, max_new_tokens=1024)) == ()


def test_a_moved_sample_and_its_reverse_route_have_a_cooldown() -> None:
    policy = FinishTimePolicy(cpu_curve(), cheap_gate(), sample_cooldown_s=5.0, pair_cooldown_s=2.0)
    first = policy.plan(pool_view([60] * 12, []))
    moved = {move.key.sample_index for move in first}
    assert moved
    # the same samples are on the other side, and now too many
    everything = pool_view([], [60] * 12)
    turned = PoolView(
        now_s=1.0,
        instances=(
            everything.instances[0],
            InstanceView(
                instance="gen-1",
                num_slots=32,
                keys=pool_view([60] * 12).instances[0].keys,
                response_tokens=everything.instances[1].response_tokens,
                context_tokens=everything.instances[1].context_tokens,
            ),
        ),
        num_queued=0,
        max_new_tokens=256,
    )
    assert policy.plan(turned) == ()
    later = PoolView(now_s=3.0, instances=turned.instances, num_queued=0, max_new_tokens=256)
    again = policy.plan(later)
    assert again
    assert not moved & {move.key.sample_index for move in again}


def test_nothing_moves_while_the_queue_fills_every_slot() -> None:
    policy = make("finish_time")
    assert policy.plan(pool_view([100] * 8, [5], num_slots=8, num_queued=7)) == ()
    assert policy.plan(pool_view([100] * 8, [5], num_slots=8, num_queued=0)) != ()


def test_samples_in_transit_count_at_their_destination() -> None:
    assert make("finish_time").plan(pool_view([60] * 8, [], arriving=(0, 8))) == ()
    assert make("finish_time").plan(pool_view([60] * 8, [])) != ()


def test_a_move_that_costs_more_than_it_gains_is_left_alone() -> None:
    dear = Gate(
        kv_bytes_per_token=1e6,
        transfer=TransferModel(latency_s=60.0, bytes_per_s=1e6),
        prefill=PrefillModel(fixed_s=60.0),
    )
    view = pool_view([60] * 16, [])
    assert FinishTimePolicy(cpu_curve(), dear).plan(view) == ()
    assert FinishTimePolicy(cpu_curve(), cheap_gate()).plan(view) != ()


def test_migration_or_recompute_is_chosen_by_cost_to_the_pool() -> None:
    slow_link = Gate(
        kv_bytes_per_token=1e6,
        transfer=TransferModel(latency_s=60.0, bytes_per_s=1e6),
        prefill=PrefillModel(fixed_s=1e-3, token_s=1e-6),
    )
    moves = FinishTimePolicy(cpu_curve(), slow_link).plan(pool_view([60] * 16, []))
    assert {move.mode for move in moves} == {MoveMode.RECOMPUTE}
    moves = FinishTimePolicy(cpu_curve(), cheap_gate()).plan(pool_view([60] * 16, []))
    assert {move.mode for move in moves} == {MoveMode.MIGRATE}


def test_samples_about_to_end_are_not_moved() -> None:
    # all end at 100: what has 98 tokens is as good as done
    policy = make("finish_time")
    for _ in range(200):
        policy.note_finished(100)
    assert policy.plan(pool_view([3] * 12, [3] * 12)) == ()
    assert policy.plan(pool_view([98] * 12, [], now_s=5.0)) == ()


def test_predicted_times_are_those_of_the_rate_curve() -> None:
    policy = FinishTimePolicy(cpu_curve(), cheap_gate())
    for _ in range(5000):
        policy.note_finished(100)
    view = pool_view([40] * 8, [90], [])
    pool = flatten(view)
    load = policy._load(pool, policy._expect(view, pool))
    seconds = load.course(cpu_curve()).finish_seconds()
    # 60 tokens at 1250 tokens a second for eight, 10 at 440 for one; cells of 4 tokens, a prior of one sample
    assert seconds[:2] == pytest.approx([60 * 8 / 1250, 10 / 440], rel=0.2)
    assert seconds[2] == 0.0


def test_measured_goodput_corrects_the_rate_curve() -> None:
    curve = cpu_curve()
    policy = FinishTimePolicy(curve, cheap_gate())
    for step in range(200):
        # three have just finished in one of them: what was measured, was measured with eight
        view = pool_view([60] * 8, [60] * 5, now_s=0.1 * step)
        slow = tuple(
            InstanceView(
                instance=i.instance,
                num_slots=i.num_slots,
                keys=i.keys,
                response_tokens=i.response_tokens,
                context_tokens=i.context_tokens,
                goodput_tokens_per_s=625.0,
                goodput_samples=8.0,
            )
            for i in view.instances
        )
        policy.plan(PoolView(now_s=view.now_s, instances=slow, num_queued=0, max_new_tokens=256))
    assert curve.factor == pytest.approx(0.5, rel=0.02)


def test_a_plan_for_1024_instances_fits_every_destination_and_leaves_the_fullest() -> None:
    random = np.random.default_rng(0)
    policy = make("finish_time")
    for length in random.integers(1, 600, 500).tolist():
        policy.note_finished(length)
    lengths = [random.integers(1, 600, random.integers(1, 33)).tolist() for _ in range(1024)]
    view = pool_view(*lengths, max_new_tokens=640)
    moves = policy.plan(view)
    assert len(moves) > 20
    assert len({move.key for move in moves}) == len(moves)
    size = {instance.instance: len(instance.keys) for instance in view.instances}
    come, gone = (Counter(getattr(move, end) for move in moves) for end in ("destination", "source"))
    free = {instance.instance: instance.num_free_slots for instance in view.instances}
    assert all(count <= free[name] for name, count in come.items())
    assert not come.keys() & gone.keys()
    # samples leave instances that hold more than those that they go to
    assert np.mean([size[move.source] for move in moves]) > 2 * np.mean([size[m.destination] for m in moves])


# the paper's rule


def test_the_papers_rule_moves_from_above_the_threshold_to_below_it_only() -> None:
    rule = PaperRule(cpu_curve(), cheap_gate())
    threshold = rule.threshold(32)
    assert 4 <= threshold <= 12
    sizes = (threshold + 6, threshold + 1, threshold, threshold - 3, 0)
    moves = rule.plan(pool_view(*([30] * size for size in sizes)))
    gone = [sum(move.source == f"gen-{k}" for move in moves) for k in range(5)]
    come = [sum(move.destination == f"gen-{k}" for move in moves) for k in range(5)]
    assert gone == [6, 1, 0, 0, 0]
    # the largest deficit first
    assert come[:3] == [0, 0, 0] and sum(come) == 7 and come[4] >= 5
    assert all(size - g + c <= max(size, threshold) for size, g, c in zip(sizes, gone, come, strict=True))


def test_the_papers_rule_needs_instances_on_both_sides_of_the_threshold() -> None:
    rule = PaperRule(cpu_curve(), cheap_gate())
    threshold = rule.threshold(32)
    assert rule.plan(pool_view([30] * threshold, [])) == ()
    assert rule.plan(pool_view([30] * 20, [30] * threshold)) == ()


def test_the_papers_rule_moves_the_least_context_and_has_a_cooldown() -> None:
    rule = PaperRule(cpu_curve(), cheap_gate(), cooldown_s=1.0)
    threshold = rule.threshold(32)
    lengths = list(range(100, 100 + threshold + 2))
    moves = rule.plan(pool_view(lengths[::-1], []))
    assert [move.key.sample_index for move in moves] == [threshold + 1, threshold]
    assert rule.plan(pool_view(lengths, [], now_s=0.9)) == ()
    assert len(rule.plan(pool_view(lengths, [], now_s=1.1))) == 2
