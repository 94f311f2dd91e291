"""Rewards that come late: a phase ends without them, and nothing but the update that needs them waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from rlhfspec.actors.actor_messages import Taken
from rlhfspec.cluster.run.evaluate import Evaluator
from rlhfspec.cluster.run.stream import RolloutStream
from rlhfspec.cluster.system.system import GeneratingSystem
from rlhfspec.core.errors import NodeDied, RewardError
from rlhfspec.core.records import (
    Completion,
    FinishReason,
    Prompt,
    Reward,
    SampleKey,
    SampleRequest,
    SamplingParams,
    Stream,
    Unscored,
)
from rlhfspec.policies.staleness.recorded import PhasePlan, Recorded
from tests.cluster.run import test_stream as made

_ENDLESS = 50


class SlowRewards(made.Rewards):
    """Scores what it is told to, batch by batch, and else nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.items: list[Any] = []
        self.due: list[int] = []
        self.fails, self.error = False, RewardError("sample 1 cannot be scored")

    @property
    def num_idle(self) -> int:
        return 1

    def submit(self, items: list, prompts: list, responses: list[str], facts: list) -> None:
        self.sent.append([item[1].key.sample_index for item in items])
        self.items += items

    def collect(self, *, wait_s: float) -> list:
        self.num_collections += 1
        assert self.num_collections < _ENDLESS, "a phase waits for rewards that nobody needs"
        if self.fails:
            raise self.error
        due = [item for item in self.items if item[1].key.sample_index in self.due]
        self.items = [item for item in self.items if item not in due]
        self.unscored += [
            (item, Unscored(reason=f"sample {item[1].key.sample_index} is refused"))
            for item in due
            if item[1].key.sample_index in self.refused
        ]
        return [
            (item, Reward(value=float(item[1].key.sample_index)))
            for item in due
            if item[1].key.sample_index not in self.refused
        ]


def schedule_of(size: int, *, iterations: int = 9) -> Recorded:
    """One prompt a sample; phase p brings the samples of batch p + 1."""
    given = iter(range(99))
    plan = PhasePlan(max_staleness=1, weight_load="reprefill", max_new_tokens=4, num_iterations=iterations)
    return Recorded(plan, lambda: [request(next(given)) for _ in range(size)])


def request(index: int, stream: Stream = Stream.TRAIN) -> SampleRequest:
    return SampleRequest(
        key=SampleKey(run_seed=0, sample_index=index, stream=stream),
        prompt=Prompt(prompt_id=index, token_ids=made.request(index).prompt.token_ids, text=f"p{index}"),
        sampling=SamplingParams(max_new_tokens=4),
    )


def taken(*indices: int) -> Taken:
    return Taken(completions=tuple(made.done(index, version=0) for index in indices))


def system(*script: Taken) -> Any:
    """Of a run whose weights are its first."""
    one = made.system(*script)
    one.rewards, one.stream = SlowRewards(), RolloutStream(one, made.Report())  # pyright: ignore[reportArgumentType]
    one.target.manifest.weight_version, one.config.rollout.max_staleness = 0, 1
    return one


def phase(
    one: Any,
    schedule: Recorded,
    number: int,
    meanwhile: Callable[[], None] = lambda: None,
    awaits_rewards: Callable[[], bool] = lambda: False,
) -> Any:
    beside = SimpleNamespace(look=meanwhile, awaits_rewards=awaits_rewards)
    return one.stream.phase(schedule, number, beside=beside)


def indices(rollouts: list) -> list[int]:
    return [rollout.completion.key.sample_index for rollout in rollouts]


def test_a_phase_ends_while_rewards_are_computed_and_the_next_one_receives_them() -> None:
    one, schedule = system(taken(1), taken(0)), schedule_of(2)
    assert phase(one, schedule, -1).rollouts == []
    assert one.rewards.sent == [[1], [0]], "all of them are with the reward pool"
    assert schedule.num_unscored == 2 and not schedule.has(0)
    one.scheduler = made.Scheduler(taken(2), taken(3))
    one.rewards.due = [0, 1]
    assert indices(phase(one, schedule, 0).rollouts) == [0, 1]
    assert indices(schedule.take(0)) == [0, 1] and schedule.num_unscored == 2


def test_the_rewards_of_the_update_to_come_are_waited_for_and_no_others() -> None:
    one, schedule = system(taken(0, 1)), schedule_of(2)
    phase(one, schedule, -1)
    one.scheduler = made.Scheduler(taken(2, 3))
    looks, begun = [], []

    def meanwhile() -> None:
        looks.append(schedule.num_open)
        # the rewards of the first batch come when nothing is open any more
        one.rewards.due = [0] if schedule.num_open else [0, 1]
        if schedule.has(0):
            begun.append(schedule.take(0))

    collected = phase(one, schedule, 0, meanwhile=meanwhile, awaits_rewards=lambda: not begun)
    assert looks[-1] == 0 and [indices(batch) for batch in begun] == [[0, 1]]
    assert indices(collected.rollouts) == [0, 1] and schedule.num_unscored == 2


def test_a_phase_without_samples_waits_for_the_rewards_of_its_update() -> None:
    one, schedule = system(taken(0, 1)), schedule_of(2, iterations=1)
    phase(one, schedule, -1)
    collections = one.rewards.num_collections

    def awaits_rewards() -> bool:
        if one.rewards.num_collections == collections + 3:
            one.rewards.due = [0, 1]
        return not schedule.has(0)

    phase(one, schedule, 0, awaits_rewards=awaits_rewards)
    assert indices(schedule.take(0)) == [0, 1] and not schedule.num_unscored


def test_what_was_restored_without_a_reward_is_scored_again() -> None:
    one, schedule = system(taken(0, 1)), schedule_of(2)
    phase(one, schedule, -1)
    resumed, again = system(taken(2, 3)), schedule_of(2)
    again._next_requests()
    again.restore(schedule.in_flight())
    resumed.rewards.due = [0, 1]
    phase(resumed, again, 0, awaits_rewards=lambda: not again.has(0))
    assert sorted(index for batch in resumed.rewards.sent for index in batch) == [0, 1, 2, 3]
    assert indices(again.take(0)) == [0, 1]
    # also by a phase that asks for nothing and waits for nothing
    resumed, again = system(), schedule_of(2, iterations=1)
    again.restore(schedule.in_flight())
    phase(resumed, again, 0)
    assert resumed.rewards.sent == [[0, 1]]


def test_an_evaluation_leaves_late_rewards_to_the_next_phase() -> None:
    one, schedule = system(taken(0, 1)), schedule_of(2)
    one.rewards.refused = [1]
    phase(one, schedule, -1)
    held_out = [request(index, Stream.EVAL) for index in (7, 8)]
    one.rewards.due = [0, 1, 7, 8]
    done = tuple(replace(made.done(place, version=0), key=asked.key) for place, asked in enumerate(held_out))
    one.scheduler = made.Scheduler(Taken(completions=done))
    evaluated = one.stream.collect(held_out, label="evaluate")
    assert indices(evaluated.rollouts) == [7, 8] and not evaluated.num_skipped
    assert schedule.num_unscored == 2
    one.scheduler = made.Scheduler(taken(2, 3))
    collected = phase(one, schedule, 0)
    assert indices(collected.rollouts) == [0] and collected.num_skipped == 1
    assert indices(schedule.take(0)) == [0], "the one that was refused is left out"


def test_episodes_wait_for_the_rewards_of_their_phase() -> None:
    one, schedule = system(taken(0, 1)), schedule_of(2)
    one.episodes = SimpleNamespace(
        num_asked=0,
        begin=one.scheduler.enqueue,
        advance=lambda completions, queue: [(request(c.key.sample_index), c, "said") for c in completions],
        skipped=list,
        spoken=lambda key: ("said", ()),
        metrics=dict,
    )

    def meanwhile() -> None:
        one.rewards.due = [0, 1] if one.rewards.num_collections > 3 else []

    assert indices(phase(one, schedule, -1, meanwhile=meanwhile).rollouts) == [0, 1]
    assert schedule.has(0) and not schedule.num_open


def test_a_late_reward_that_fails_ends_the_phase_that_receives_it() -> None:
    one, schedule = system(taken(0, 1)), schedule_of(2)
    phase(one, schedule, -1)
    one.rewards.fails = True
    with pytest.raises(RewardError, match="sample 1 cannot be scored"):
        phase(one, schedule, 0)
    assert schedule.num_unscored == 2, "a state that is kept has both"


def test_rewards_that_fail_beside_an_update_end_the_run_after_its_phase() -> None:
    one, schedule = system(taken(0)), schedule_of(1)
    one.rewards.due = [0]
    phase(one, schedule, -1)
    schedule.take(0)
    one.is_learning, one.rewards.fails = True, True
    one.scheduler = made.Scheduler(taken(1))
    phase(one, schedule, 0)
    (note,) = one.stream._report.notes
    assert note.startswith("no more rewards: sample 1 cannot be scored; the run ends after this iteration")
    assert schedule.num_unscored == 1 and not schedule.num_open, "the phase is whole: a state can be taken"
    one.is_learning, one.rewards.fails = False, False
    one.scheduler = made.Scheduler(taken(2))
    with pytest.raises(RewardError, match="sample 1 cannot be scored"):
        phase(one, schedule, 1)


def test_what_was_scored_by_the_end_of_an_iteration_is_in_its_state() -> None:
    one, schedule = system(taken(0, 1, 2)), schedule_of(3)
    one.rewards.refused = [2]
    phase(one, schedule, -1)
    one.rewards.due = [1, 2]
    scored, num_refused = one.stream.receive(schedule)
    assert indices(scored) == [1] and num_refused == 1
    kept = schedule.in_flight()
    assert [key.sample_index for key in kept.unscored] == [0]
    assert [key.sample_index for key in kept.ready[0]] == [1]
    one.rewards.fails = True
    assert one.stream.receive(schedule) == ([], 0)
    with pytest.raises(RewardError, match="sample 1 cannot be scored"):
        phase(one, schedule, 0)


def test_the_loss_of_the_machine_itself_waits_for_nothing() -> None:
    one, schedule = system(taken(0)), schedule_of(1)
    one.is_learning, one.rewards.fails, one.rewards.error = True, True, NodeDied("this machine is gone")
    with pytest.raises(NodeDied):
        phase(one, schedule, -1)
    assert one.stream.failure is None


def test_no_evaluation_asks_for_rewards_that_cannot_be_had() -> None:
    settings = SimpleNamespace(every=1, metric="reward", fresh_keys=False)
    report = made.Report()
    one: Any = SimpleNamespace(
        config=SimpleNamespace(evaluation=settings, run=SimpleNamespace(iterations=3)),
        evaluation=object(),
    )
    stream: Any = SimpleNamespace(failure=RewardError("sample 1 cannot be scored"))
    evaluator = Evaluator(one, stream, None, report, None)  # pyright: ignore[reportArgumentType]
    assert evaluator.after(1) == {}
    # the next one has the samples that it would have had
    assert evaluator.marks.num_done == 1
    assert [note.split(":")[0] for note in report.notes] == ["no evaluation"]


def test_no_call_has_samples_that_are_learned_from_later() -> None:
    given = iter(range(99))
    plan = PhasePlan(max_staleness=2, weight_load="reprefill", max_new_tokens=8, num_iterations=9)
    schedule = Recorded(plan, lambda: [request(next(given)) for _ in range(2)])
    one = system(taken(2, 0, 3, 1))
    one.config.reward.batch_size, one.config.rollout.max_staleness = 4, 2
    phase(one, schedule, 0)
    # the batch of the next update first
    assert one.rewards.sent == [[0, 1], [2, 3]]


def in_groups(size: int) -> Recorded:
    """Two samples a prompt, in batches of `size`."""
    given = iter(range(99))
    plan = PhasePlan(max_staleness=2, weight_load="reprefill", max_new_tokens=4, num_iterations=2)

    def batch() -> list[SampleRequest]:
        numbers = [next(given) for _ in range(size)]
        return [replace(request(number), group_id=number // 2) for number in numbers]

    return Recorded(plan, batch)


def cut(*asked: SampleRequest) -> tuple[Completion, ...]:
    """What there is of samples that go on in the next phase."""
    return tuple(
        replace(
            made.done(one.key.sample_index, version=0),
            key=one.key,
            group_id=one.group_id,
            finish_reason=FinishReason.CUT,
        )
        for one in asked
    )


def whole(*asked: SampleRequest) -> tuple[Completion, ...]:
    return tuple(replace(one, finish_reason=FinishReason.STOP) for one in cut(*asked))


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_response_waits_for_the_rest_of_its_group_over_phases_and_a_resumed_run(is_resumed: bool) -> None:
    schedule = in_groups(2)
    asked: list[SampleRequest] = []
    begin = schedule.begin

    def watched(number: int) -> list[SampleRequest]:
        asked[:] = begin(number)
        return asked

    schedule.begin = watched  # type: ignore[method-assign]
    one = system()
    one.plan.scores_groups = True
    answers: list[Callable[[], Taken]] = [
        # the first batch, and of the next one a sample that was short
        lambda: Taken(completions=(*whole(asked[3], asked[0], asked[1]), *cut(asked[2]))),
        lambda: Taken(completions=(*whole(*asked),)),
    ]
    one.scheduler.take = lambda wait_s, gathers=False: answers.pop(0)() if answers and asked else Taken()
    one.take = partial(GeneratingSystem.take, one)
    assert phase(one, schedule, -1).rollouts == [] and one.rewards.sent == [[0, 1]]
    one.rewards.due = [0, 1, 2, 3]
    if is_resumed:
        assert indices(one.stream.receive(schedule)[0]) == [0, 1]
        kept, schedule = schedule.in_flight(), in_groups(2)
        schedule.restore(kept)
        begin = schedule.begin
        schedule.begin = watched  # type: ignore[method-assign]
        one.stream = RolloutStream(one, made.Report())  # pyright: ignore[reportArgumentType]
    asked.clear()
    phase(one, schedule, 0, awaits_rewards=lambda: not (schedule.has(0) and schedule.has(1)))
    assert one.rewards.sent[1] == [2, 3] and indices(schedule.take(1)) == [2, 3]
