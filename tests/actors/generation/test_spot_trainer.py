"""Laws of the spot trainer: it computes in idle time alone and stops within an operation. No Ray, no engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from fake_engine import FakeEngine, FakeHost, make_request

from rlhfspec.actors.generation.decode_loop import DecodeLoop
from rlhfspec.actors.generation.idle_work import IdleWork
from rlhfspec.actors.generation.loop_orders import CallOrder, StopOrder, SubmitOrder
from rlhfspec.actors.generation.spot_trainer import SpotTrainer
from rlhfspec.core.config import DrafterTrainingConfig
from rlhfspec.engine.drafters.head.feature_recorder import FeatureSequence
from rlhfspec.learning.drafts.held_out import HOLD_OUT_EVERY
from tests.helpers.hand_learner import LIMIT_S, HandLearner, ListBuffer, sequence

PASSES = 3


class Bench:
    """A spot trainer with what it works on."""

    def __init__(self, learner: HandLearner) -> None:
        self.learner, self.buffer = learner, ListBuffer(PASSES)
        self.counted: list[tuple[float, int]] = []
        self.recorded: list[FeatureSequence] = []
        self.trainer = SpotTrainer(
            learner,
            self.buffer,
            {"w": torch.zeros(1)},
            name="spot trainer",
            training=DrafterTrainingConfig(max_tokens_per_step=256, max_passes=PASSES, buffer_mb=1.0),
            seed=0,
            finished=self.take,
            count=lambda seconds, tokens: self.counted.append((seconds, tokens)),
        )

    def take(self) -> list[FeatureSequence]:
        """As a recorder does."""
        taken, self.recorded = self.recorded, []
        return taken

    def finish(self, *lengths: int) -> None:
        """Samples of so many tokens have finished."""
        self.recorded += [sequence(length) for length in lengths]
        self.trainer.gather()

    def until_idle(self) -> None:
        """Wait until there is nothing more to do."""
        idle = self.trainer._idle
        with idle._changed:
            assert idle._changed.wait_for(lambda: not idle.is_active, timeout=LIMIT_S)


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
        one.trainer.close()


def test_it_learns_what_arrived_so_many_times_and_no_more(bench) -> None:
    one = bench()
    one.finish(10, 7)
    assert not one.trainer.is_active and not one.learner.num_ended, "nobody has allowed it"
    one.trainer.allow()
    one.until_idle()
    assert one.learner.num_ended == PASSES
    told, tensors = one.trainer.progress()
    assert (told.num_steps, told.num_tokens) == (PASSES, PASSES * (8 + 5)) and told.train_s > 0.0
    assert tensors["w"] == PASSES
    assert sum(tokens for _, tokens in one.counted) == told.num_tokens


def test_it_stops_within_the_operation_under_way_and_nothing_of_the_step_stays(bench) -> None:
    one = bench(num_operations=5, by_hand=True)
    one.finish(10)
    one.trainer.allow()
    assert one.learner.began.acquire(timeout=LIMIT_S)
    # returns at once, though the operation is not over
    one.trainer.stop_soon()
    assert one.learner.num_ended == 0
    one.learner.let_go.release()
    one.trainer.target_changes()
    assert one.learner.num_ended == 1, "no other operation was begun"
    told, tensors = one.trainer.progress()
    assert told.num_steps == 0 and tensors == {}
    assert not one.learner.began.acquire(blocking=False)


def test_whoever_changes_the_weights_waits_for_the_operation_under_way(bench) -> None:
    one = bench(num_operations=2, by_hand=True)
    one.finish(10)
    one.trainer.allow()
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
    one.finish(10)
    one.trainer.allow()
    one.until_idle()
    one.trainer.stop_soon()
    one.finish(10)
    assert not one.trainer.is_active
    one.trainer.allow()
    one.until_idle()
    assert one.learner.num_ended == 2 * PASSES


def test_an_order_that_is_over_before_its_step_has_ended_does_not_end_training(bench) -> None:
    one = bench(num_operations=2, by_hand=True)
    told = one.learner.step

    def step(sequences, should_stop):
        report = told(sequences, should_stop)
        if report is None:
            # the order is over, and instances are idle again, before the step returns
            one.trainer.allow()
        return report

    one.learner.step = step
    one.finish(10)
    one.trainer.allow()
    assert one.learner.began.acquire(timeout=LIMIT_S)
    one.trainer.stop_soon()
    one.learner.let_go.release(100)
    idle = one.trainer._idle
    with idle._changed:
        assert idle._changed.wait_for(lambda: idle._allowed and not idle.is_active, timeout=LIMIT_S)
    assert one.trainer.progress()[0].num_steps == PASSES


def test_a_step_that_was_stopped_is_followed_by_a_shorter_one(bench) -> None:
    one = bench(num_operations=2, by_hand=True)
    one.finish(10)
    for _ in range(3):
        one.trainer.allow()
        assert one.learner.began.acquire(timeout=LIMIT_S)
        one.trainer.stop_soon()
        one.learner.let_go.release()
        one.trainer.target_changes()
    one.learner.let_go.release(100)
    one.trainer.allow()
    one.until_idle()
    # and one that ended by a longer one, up to what is configured
    assert one.buffer.asked == [256, 128, 64, 64, 128, 256]


def test_one_sequence_in_some_is_held_out_and_heads_are_compared_on_it(bench) -> None:
    one = bench()
    one.finish(*[6] * 2 * HOLD_OUT_EVERY)
    found = one.trainer.compare({"w": torch.full((1,), 8.0)})
    assert (found.present, found.tried, found.num_tokens) == (10.0, 2.0, 2 * 4)
    assert len(one.buffer.sequences) == 2 * (HOLD_OUT_EVERY - 1)
    assert one.trainer.progress()[0].held_out_tokens == 8


def test_a_head_that_was_given_up_is_learned_on_from_the_published_one_more_slowly(bench) -> None:
    one = bench()
    one.finish(10)
    one.trainer.allow()
    one.until_idle()
    one.trainer.give_up()
    told, tensors = one.trainer.progress()
    assert (told.num_steps, tensors) == (0, {}) and float(one.learner.tensors["w"]) == 0.0
    assert one.learner.learning_rate == 0.5 and one.learner.num_forgotten == 1
    one.trainer.load({"w": torch.full((1,), 3.0)})
    assert float(one.learner.tensors["w"]) == 3.0 and one.learner.learning_rate == 0.75
    one.trainer.load({"w": torch.full((1,), 4.0)})
    assert one.learner.learning_rate == 1.0, "never above what was configured"


def test_between_handing_over_and_the_answer_nothing_is_learned(bench) -> None:
    one = bench(by_hand=True)
    one.finish(10)
    one.trainer.allow()
    assert one.learner.began.acquire(timeout=LIMIT_S)
    one.trainer.stop_soon()
    one.learner.let_go.release()
    # one pass of three
    assert one.trainer.progress()[1]
    one.trainer.allow()
    one.until_idle()
    assert not one.learner.began.acquire(blocking=False)
    one.trainer.load({"w": torch.full((1,), 3.0)})
    one.trainer.allow()
    assert one.learner.began.acquire(timeout=LIMIT_S)
    one.learner.let_go.release(10)
    one.until_idle()
    assert float(one.learner.tensors["w"]) == 3.0 + PASSES - 1


def test_what_nobody_could_compare_is_trained_on(bench) -> None:
    one = bench()
    one.finish(10)
    one.trainer.allow()
    one.until_idle()
    assert one.trainer.progress()[1]
    one.trainer.compare({"w": torch.full((1,), 8.0)})
    one.buffer.max_passes += 1
    one.trainer.train_on()
    one.trainer.allow()
    one.until_idle()
    told, tensors = one.trainer.progress()
    assert told.num_steps == PASSES + 1 and tensors["w"] == PASSES + 1, "from its own weights"


def test_a_step_whose_gradient_is_not_finite_counts_for_nothing_and_its_sequences_go(bench) -> None:
    one = bench()
    one.learner.grad_norm = float("nan")
    one.finish(10)
    one.trainer.allow()
    one.until_idle()
    told, tensors = one.trainer.progress()
    assert (told.num_steps, told.num_tokens, tensors) == (0, 0, {})
    assert one.buffer.sequences == [] and [tokens for _, tokens in one.counted] == [0]


def test_a_failure_ends_training_and_is_told(bench) -> None:
    one = bench()
    one.learner.error = ZeroDivisionError("of a step")
    one.finish(10)
    one.trainer.allow()
    one.until_idle()
    assert not one.trainer.is_active
    told, tensors = one.trainer.progress()
    assert told.failure == "ZeroDivisionError: of a step" and tensors == {}


def test_a_thread_that_cannot_begin_is_told_as_a_failure() -> None:
    def begin() -> None:
        raise OSError("no such core")

    idle = IdleWork(lambda should_stop: True, name="idle", begin=begin)
    idle.more()
    idle.allow()
    idle.pause()
    idle.close()
    assert isinstance(idle.failure, OSError) and not idle.is_active


def test_an_iteration_ends_when_the_target_has_changed(bench) -> None:
    one = bench()
    one.finish(10)
    one.trainer.target_changes()
    one.trainer.target_changed()
    assert one.buffer.num_iterations == 1 and len(one.buffer.sequences) == 1


class SpareEngine(FakeEngine):
    """Notes, when it gets a sample, whether somebody may still begin to compute."""

    def __init__(self, bench: Bench) -> None:
        super().__init__("gen-0")
        self.bench, self.was_active = bench, []

    def submit(self, request) -> None:
        self.was_active.append(self.bench.trainer.is_active)
        super().submit(request)


def test_the_decode_loop_trains_while_it_has_no_samples_and_never_waits_for_it(bench) -> None:
    one = bench(num_operations=10**6, by_hand=True)
    engine = SpareEngine(one)
    host = FakeHost(engine)
    host.spot_trainer = one.trainer
    loop = DecodeLoop("gen-0", host, report_interval_s=0.0)
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    one.finish(10)
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
