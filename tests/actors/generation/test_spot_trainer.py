"""Laws of the spot trainer: it computes in spare time alone and stops within an operation. No Ray, no engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from fake_engine import FakeEngine, FakeHost, make_request

from actors.generation.decode_loop import DecodeLoop
from actors.generation.loop_orders import CallOrder, StopOrder, SubmitOrder
from actors.generation.spare_time import SpareTime
from actors.generation.spot_trainer import HELD_OUT_EVERY, SpotTrainer
from tests.helpers.hand_learner import LIMIT_S, HandLearner, ListBuffer, sequence

PASSES = 3


class Bench:
    """A spot trainer with what it works on."""

    def __init__(self, learner: HandLearner) -> None:
        self.learner, self.buffer = learner, ListBuffer()
        self.counted: list[tuple[float, int]] = []
        self.idle = threading.Event()
        self.trainer = SpotTrainer(
            learner,
            self.buffer,
            {"w": torch.zeros(1)},
            name="spot trainer",
            max_bytes=1 << 20,
            max_tokens_per_step=64,
            max_passes=PASSES,
            seed=0,
            count=lambda seconds, tokens: self.counted.append((seconds, tokens)),
        )

    @property
    def spare(self) -> SpareTime:
        return self.trainer.spare

    def until_idle(self) -> None:
        """Wait until there is nothing more to do."""
        with self.spare._changed:
            assert self.spare._changed.wait_for(lambda: not self.spare.is_active, timeout=LIMIT_S)


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(**settings) -> Bench:
        made.append(Bench(HandLearner(**settings)))
        return made[-1]

    yield make
    for one in made:
        one.learner.by_hand = False
        one.learner.let_go.release(100)
        one.spare.close()


def test_it_learns_what_arrived_so_many_times_and_no_more(bench) -> None:
    one = bench()
    one.trainer.take(sequence(10))
    one.trainer.take(sequence(7))
    assert not one.spare.is_active and not one.learner.num_ended, "nobody has allowed it"
    one.spare.allow()
    one.until_idle()
    assert one.learner.num_ended == PASSES
    told, tensors = one.trainer.progress()
    assert (told.num_steps, told.num_tokens) == (PASSES, PASSES * (8 + 5)) and told.train_s > 0.0
    assert tensors["w"] == PASSES
    assert sum(tokens for _, tokens in one.counted) == told.num_tokens


def test_it_stops_within_the_operation_under_way_and_nothing_of_the_step_stays(bench) -> None:
    one = bench(num_operations=5, by_hand=True)
    one.trainer.take(sequence())
    one.spare.allow()
    assert one.learner.began.acquire(timeout=LIMIT_S)
    # returns at once, though the operation is not over
    one.spare.stop_soon()
    assert one.learner.num_ended == 0
    one.learner.let_go.release()
    one.spare.pause()
    assert one.learner.num_ended == 1, "no other operation was begun"
    told, tensors = one.trainer.progress()
    assert told.num_steps == 0 and tensors == {}
    assert not one.learner.began.acquire(blocking=False)


def test_whoever_changes_the_weights_waits_for_the_operation_under_way(bench) -> None:
    one = bench(num_operations=2, by_hand=True)
    one.trainer.take(sequence())
    one.spare.allow()
    assert one.learner.began.acquire(timeout=LIMIT_S)
    changing = threading.Thread(target=one.trainer.target_changes)
    changing.start()
    changing.join(0.05)
    assert changing.is_alive(), "the operation still reads them"
    one.learner.let_go.release()
    changing.join(LIMIT_S)
    assert not changing.is_alive() and one.learner.num_ended == 1


def test_it_goes_on_when_it_is_allowed_again(bench) -> None:
    one = bench()
    one.trainer.take(sequence())
    one.spare.allow()
    one.until_idle()
    one.spare.stop_soon()
    one.trainer.take(sequence())
    assert not one.spare.is_active
    one.spare.allow()
    one.until_idle()
    assert one.learner.num_ended == 2 * PASSES


def test_one_sequence_in_some_is_held_out_and_heads_are_compared_on_it(bench) -> None:
    one = bench()
    for _ in range(2 * HELD_OUT_EVERY):
        one.trainer.take(sequence(6))
    found = one.trainer.compare({"w": torch.full((1,), 8.0)})
    assert (found.present, found.tried, found.num_tokens) == (10.0, 2.0, 2 * 4)
    assert len(one.buffer.sequences) == 2 * (HELD_OUT_EVERY - 1)
    assert one.trainer.progress()[0].held_out_tokens == 8


def test_a_head_that_was_given_up_is_learned_on_from_the_published_one_more_slowly(bench) -> None:
    one = bench()
    one.trainer.take(sequence())
    one.spare.allow()
    one.until_idle()
    one.trainer.give_up()
    told, tensors = one.trainer.progress()
    assert (told.num_steps, tensors) == (0, {}) and float(one.learner.tensors["w"]) == 0.0
    assert one.learner.learning_rate == 0.5
    one.trainer.load({"w": torch.full((1,), 3.0)})
    assert float(one.learner.tensors["w"]) == 3.0 and one.learner.learning_rate == 0.75
    one.trainer.load({"w": torch.full((1,), 4.0)})
    assert one.learner.learning_rate == 1.0, "never above what was configured"


def test_a_failure_ends_training_and_is_told(bench) -> None:
    one = bench()
    one.learner.error = ZeroDivisionError("of a step")
    one.trainer.take(sequence())
    one.spare.allow()
    one.until_idle()
    assert not one.spare.is_active
    told, tensors = one.trainer.progress()
    assert told.failure == "ZeroDivisionError: of a step" and tensors == {}


def test_an_iteration_ends_when_the_target_has_changed(bench) -> None:
    one = bench()
    one.trainer.take(sequence())
    one.trainer.target_changes()
    one.trainer.target_changed()
    assert one.buffer.num_iterations == 1 and len(one.buffer.sequences) == 1


class SpareEngine(FakeEngine):
    """Notes, when it gets a sample, whether somebody may still begin to compute."""

    def __init__(self, bench: Bench) -> None:
        super().__init__("gen-0")
        self.bench, self.was_active = bench, []

    def submit(self, request) -> None:
        self.was_active.append(self.bench.spare.is_active)
        super().submit(request)


def test_the_decode_loop_trains_while_it_has_no_samples_and_never_waits_for_it(bench) -> None:
    one = bench(num_operations=10**6, by_hand=True)
    engine = SpareEngine(one)
    host = FakeHost(engine)
    host.spare = one.spare
    loop = DecodeLoop("gen-0", host, report_interval_s=0.0)
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    one.trainer.take(sequence())
    assert one.learner.began.acquire(timeout=LIMIT_S), "idle: it trains"
    assert loop.poll(acknowledged=0, wait_s=0.0).is_training
    # what is asked of a loop that stays idle does not end it
    assert loop.order(CallOrder(what="answer", call=lambda: 7)).result(timeout=LIMIT_S) == 7
    loop.order(SubmitOrder(requests=(make_request(1),))).result(timeout=LIMIT_S)
    # the sample is done though the operation under way never ended
    reply = loop.poll(acknowledged=0, wait_s=LIMIT_S)
    assert [completion.key.sample_index for completion in reply.completions] == [1]
    assert engine.was_active == [False] and one.learner.num_ended == 0
    loop.order(StopOrder()).result(timeout=LIMIT_S)
    thread.join(LIMIT_S)
    assert not thread.is_alive()
