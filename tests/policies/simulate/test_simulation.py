"""The simulator: times computed by hand, binding, moves and what they cost, replay."""

import numpy as np
import pytest
from forced_moves import Forced

from rlhfspec.policies.reallocation.pool_records import Move, MoveMode, PoolView
from rlhfspec.policies.reallocation.rate_curve import RateCurve
from rlhfspec.policies.simulate.compare import least_finish_s, perfect_finish_s
from rlhfspec.policies.simulate.simulated_pool import simulate
from rlhfspec.policies.simulate.simulation_records import (
    MoveTruth,
    PoolSetup,
    Samples,
    drawn_lengths,
    samples_of,
)
from rlhfspec.profiles.transfer import PrefillModel, TransferModel

LINE = RateCurve(np.arange(1, 65), 1.0 / (0.006 / np.arange(1, 65) + 0.004))
"6 ms + 4 ms for each sample."


def setup(num_instances: int, num_slots: int, curve: RateCurve = LINE, **changes: object) -> PoolSetup:
    values = {
        "moves": MoveTruth(
            kv_bytes_per_token=1e6,
            transfer=TransferModel(latency_s=0.010, bytes_per_s=1e9, open_s=0.1),
            prefill=PrefillModel(fixed_s=0.005, token_s=0.001, token_squared_s=0.0),
            bystander_share=0.0,
        ),
        "max_new_tokens": 256,
        "order_delay_s": 0.0,
    }
    return PoolSetup(num_instances=num_instances, num_slots=num_slots, curve=curve, **values | changes)


def samples(*lengths: int) -> Samples:
    return samples_of(np.array(lengths))


class OneMove(Forced):
    """Moves one sample at the first poll, and remembers what it was shown."""

    def __init__(self, sample: int, source: int, destination: int, mode: MoveMode) -> None:
        super().__init__(share=0.0)
        self._move = (sample, source, destination, mode)
        self.views: list[PoolView] = []

    def plan(self, view: PoolView) -> tuple[Move, ...]:
        self.views.append(view)
        if len(self.views) > 1:
            return ()
        sample, source, destination, mode = self._move
        keys = {key.sample_index: key for key in view.instances[source].keys}
        names = [instance.instance for instance in view.instances]
        return (
            Move(
                key=keys[sample],
                source=names[source],
                destination=names[destination],
                mode=mode,
                gain_s=0.0,
                reason="",
            ),
        )


def test_one_instance_takes_the_time_computed_by_hand() -> None:
    result = simulate(samples(30, 50), setup(1, 2), None)
    assert result.finish_s == pytest.approx(30 * 0.014 + 20 * 0.010)
    assert result.busy_s == pytest.approx([result.finish_s])
    assert result.num_tokens == 80


def test_a_capped_slot_makes_samples_wait() -> None:
    assert simulate(samples(30, 50), setup(1, 1), None).finish_s == pytest.approx(80 * 0.010)


def test_an_instance_is_faster_while_no_other_has_work() -> None:
    twice_as_fast = LINE.copy()
    twice_as_fast.factor = 2.0
    result = simulate(samples(30, 50), setup(2, 1, alone_curve=twice_as_fast), None)
    assert result.finish_s == pytest.approx(30 * 0.010 + 20 * 0.010 / 2)
    assert result.busy_s == pytest.approx([0.30, 0.40])


def test_a_fast_sample_needs_less_time() -> None:
    both = Samples(
        response_tokens=np.array([30, 50]), prompt_tokens=np.zeros(2, int), speed=np.array([1.0, 2.0])
    )
    # the second is done after 25 tokens of a mean sample
    assert simulate(both, setup(1, 2), None).finish_s == pytest.approx(25 * 0.014 + 5 * 0.010)


READING = RateCurve(
    np.arange(1, 65),
    1.0 / (0.006 / np.arange(1, 65) + 0.004),
    context_tokens=np.zeros(64).tolist(),
    context_token_s=[1e-4] * 64,
)
"The same line, and 0.1 ms for every token of context."


def grown_s(tokens: int, num_samples: int, context: int) -> float:
    """Seconds that reading takes while so many samples get so many tokens each, from a context of all of them."""
    return 1e-4 * (context * tokens + num_samples * tokens**2 / 2)


def test_contexts_are_read_as_they_grow() -> None:
    both = samples_of(np.array([30, 50]), prompt_tokens=10)
    result = simulate(both, setup(1, 2, READING), None)
    reading_s = grown_s(30, 2, 20) + grown_s(20, 1, 40)
    assert result.finish_s == pytest.approx(30 * 0.014 + 20 * 0.010 + reading_s)


def test_a_moved_sample_takes_its_context_along() -> None:
    # poll at 0.12 s; computing 20 tokens or so anew holds the second instance up, which has nothing else to do
    policy = OneMove(0, 0, 1, MoveMode.RECOMPUTE)
    lengths = samples_of(np.array([60, 1, 60]), prompt_tokens=10)
    result = simulate(lengths, setup(2, 2, READING, poll_interval_s=0.12), policy)
    (here, _) = policy.views[1].instances
    done = int(policy.views[0].instances[0].response_tokens[0])
    assert here.num_running == 1 and result.num_recomputed == 1
    prefill_s = 0.005 + 0.001 * (10 + done)
    alone_s = (60 - done) * 0.010 + grown_s(60 - done, 1, 10 + done)
    # what is done of a token that is not complete moves as well
    assert result.finish_s == pytest.approx(0.12 + prefill_s + alone_s, abs=0.012)


def test_perfect_reallocation_reads_contexts_too() -> None:
    both = samples_of(np.array([40, 40]), prompt_tokens=10)
    perfect_s = perfect_finish_s(both, setup(2, 2, READING))
    assert perfect_s == pytest.approx(40 * 0.010 + grown_s(40, 1, 10), rel=0.05)
    assert least_finish_s(both, setup(2, 2, READING)) <= perfect_s
    assert simulate(both, setup(2, 2, READING), None).finish_s == pytest.approx(perfect_s, rel=0.05)


def test_prompts_hold_decode_steps_up() -> None:
    both = samples_of(np.array([30, 30]), prompt_tokens=10)
    assert simulate(both, setup(1, 2, prompt_token_s=0.002), None).finish_s == pytest.approx(
        2 * 10 * 0.002 + 30 * 0.014
    )


def test_static_gives_every_kth_sample_to_an_instance_and_pull_the_next_to_the_first_free() -> None:
    lengths = samples(100, 10, 100, 10, 100, 10)
    static = simulate(lengths, setup(2, 1), None, binding="static")
    assert static.busy_s == pytest.approx([3.0, 0.3])
    pull = simulate(lengths, setup(2, 1), None, binding="pull")
    # 100 | 10, 100 ; then 10 beside it when the first ends, 100 when that has ended, 10
    assert pull.finish_s == pytest.approx(2.1)


def test_pull_equals_static_for_balanced_lengths() -> None:
    lengths = np.repeat(drawn_lengths("long_tail", 16, 1, max_new_tokens=256, seed=0), 2)
    results = [
        simulate(samples_of(lengths), setup(2, slots), None, binding=binding).finish_s
        for slots in (4, 16)
        for binding in ("static", "pull")
    ]
    assert results[0] == pytest.approx(results[1])
    assert results[2] == pytest.approx(results[3])


def test_a_migrated_sample_decodes_at_its_source_until_it_is_there() -> None:
    # poll at 0.14 s: ten tokens of both are done; 10 MB take 20 ms and 100 ms for opening the channel
    policy = OneMove(0, 0, 1, MoveMode.MIGRATE)
    result = simulate(samples(110, 1, 110), setup(2, 2, poll_interval_s=0.14), policy)
    assert (result.num_migrated, result.num_recomputed, result.num_void) == (1, 0, 0)
    handed_over_s = 0.14 + 0.12
    tokens = handed_over_s / 0.014
    assert result.finish_s == pytest.approx(handed_over_s + (110 - tokens) * 0.010)
    # while it is on its way it runs there, may not be moved, and has a slot here
    source, destination = (
        simulate_views(110, 1, 110, interval_s=0.07)[1].instances[0],
        simulate_views(110, 1, 110, interval_s=0.07)[1].instances[1],
    )
    assert (len(source.keys), source.num_leaving, source.num_running) == (1, 1, 2)
    assert (destination.num_arriving, destination.num_free_slots) == (1, 1)


def simulate_views(*lengths: int, interval_s: float) -> list[PoolView]:
    policy = OneMove(0, 0, 1, MoveMode.MIGRATE)
    simulate(samples(*lengths), setup(2, 2, poll_interval_s=interval_s), policy)
    return policy.views


def test_downtime_delays_a_migrated_sample() -> None:
    ends = []
    for downtime_s in (0.0, 0.5):
        moves = MoveTruth(kv_bytes_per_token=1.0, downtime_s=downtime_s)
        policy = OneMove(0, 0, 1, MoveMode.MIGRATE)
        ends.append(simulate(samples(110, 1, 10), setup(2, 2, moves=moves), policy).finish_s)
    assert ends[1] - ends[0] == pytest.approx(0.5)


def test_a_recomputed_sample_stands_still_and_holds_its_destination_up() -> None:
    # poll at 0.14 s: 10 tokens each; computing them anew takes 15 ms
    policy = OneMove(0, 0, 1, MoveMode.RECOMPUTE)
    result = simulate(samples(30, 60, 10), setup(2, 2, poll_interval_s=0.14), policy)
    assert result.num_recomputed == 1
    # gen-1 has 14 tokens of its own by then, stands 15 ms, decodes two, then one
    assert result.finish_s == pytest.approx(0.14 + 0.015 + 20 * 0.014 + (60 - 14 - 20) * 0.010)


def test_a_migration_whose_sample_ends_first_is_void() -> None:
    policy = OneMove(0, 0, 1, MoveMode.MIGRATE)
    result = simulate(samples(15, 10, 200), setup(2, 2, poll_interval_s=0.14), policy)
    assert (result.num_moves, result.num_migrated, result.num_void) == (1, 0, 1)
    assert policy.views[-1].instances[1].num_free_slots == 2


def test_views_show_lengths_so_far_and_never_the_true_ones() -> None:
    policy = OneMove(0, 0, 1, MoveMode.MIGRATE)
    simulate(samples_of(np.array([110, 1, 90]), prompt_tokens=7), setup(2, 2, poll_interval_s=0.14), policy)
    first = policy.views[0].instances[0]
    assert first.response_tokens.tolist() == [10, 10]
    assert first.context_tokens.tolist() == [17, 17]
    assert policy.views[0].max_new_tokens == 256


def test_perfect_reallocation_by_hand() -> None:
    # two each; then 40, 20 and 20 left over: the longest alone, until the others end at the same time
    made = perfect_finish_s(samples(60, 40, 40, 20), setup(2, 4))
    shared_s = 20 * 0.014
    pair_s = 20 * 0.014
    alone_left = 40 - pair_s / 0.010
    assert made == pytest.approx(shared_s + pair_s + alone_left * 0.010)


def test_perfect_reallocation_is_no_slower_than_static_or_pull_when_all_are_resident() -> None:
    for seed in range(5):
        lengths = samples_of(drawn_lengths("skewed", 32, 2, max_new_tokens=256, seed=seed))
        best = perfect_finish_s(lengths, setup(2, 16))
        assert best < simulate(lengths, setup(2, 16), None, binding="static").finish_s
        assert best < simulate(lengths, setup(2, 16), None).finish_s


def test_nothing_beats_the_bound() -> None:
    for seed in range(5):
        for slots in (4, 16):
            lengths = samples_of(drawn_lengths("long_tail", 32, 2, max_new_tokens=256, seed=seed))
            bound = least_finish_s(lengths, setup(2, slots))
            assert bound <= perfect_finish_s(lengths, setup(2, slots))
            assert bound <= simulate(lengths, setup(2, slots), None).finish_s


def test_the_bound_is_reached_where_all_lengths_are_equal_and_where_one_is_alone() -> None:
    even = samples(*[50] * 8)
    assert least_finish_s(even, setup(2, 4)) == pytest.approx(50 * 0.022)
    assert least_finish_s(samples(50), setup(2, 4)) == pytest.approx(50 * 0.010)
    assert simulate(even, setup(2, 4), None).finish_s == pytest.approx(50 * 0.022)


def test_equal_input_gives_equal_output() -> None:
    lengths = samples_of(
        drawn_lengths("long_tail", 24, 2, max_new_tokens=256, seed=1), speed_sigma=0.1, seed=1
    )
    one, two = (simulate(lengths, setup(2, 8), None) for _ in range(2))
    assert (one.finish_s, one.busy_s.tolist()) == (two.finish_s, two.busy_s.tolist())


def test_skewed_lengths_put_the_longest_on_the_first_instance() -> None:
    lengths = drawn_lengths("skewed", 32, 4, max_new_tokens=256, seed=0)
    assert lengths[::4].min() >= lengths[np.arange(32) % 4 != 0].max()
