"""In turns: a batch is sampled, then learned from; of dynamic sampling it is the same one, whoever finishes first."""

import random
from dataclasses import replace

import numpy as np
import pytest

from rlhfspec.core.errors import ConfigError, NumericsError
from rlhfspec.core.metrics import require_declared
from rlhfspec.core.records import (
    Completion,
    FinishReason,
    Prompt,
    Reward,
    Rollout,
    SampleKey,
    SampleRequest,
    SamplingParams,
    WeightSpan,
)
from rlhfspec.policies.staleness.in_turns import InTurns, UsefulGroups
from rlhfspec.policies.staleness.rollout_schedule import InFlight

SIZE = 2


def group(number: int) -> list[SampleRequest]:
    return [
        SampleRequest(
            key=SampleKey(run_seed=0, sample_index=number * SIZE + member),
            prompt=Prompt(prompt_id=number, token_ids=np.array([1])),
            sampling=SamplingParams(),
            group_id=number,
        )
        for member in range(SIZE)
    ]


def rollout(request: SampleRequest, reward: float) -> Rollout:
    logprobs = np.zeros(1, dtype=np.float32)
    completion = Completion(
        key=request.key,
        prompt_id=request.prompt.prompt_id,
        group_id=request.group_id,
        epoch=0,
        token_ids=np.array([1]),
        policy_logprobs=logprobs,
        sampling_logprobs=logprobs,
        finish_reason=FinishReason.STOP,
        weight_spans=(WeightSpan(weight_version=0, first_position=0),),
        instance="gen-0",
        num_decode_steps=1,
        num_accepted_tokens=0,
    )
    return Rollout(
        prompt=request.prompt, completion=completion, response_text="", reward=Reward(value=reward)
    )


def run(
    useful: list[bool], *, num_prompts: int, max_extra: int, order: random.Random
) -> tuple[list[int], int]:
    """Finish samples in a random order; the chosen groups, and how many were sampled."""
    numbers = iter(range(num_prompts, len(useful)))
    requests = [one for number in range(num_prompts) for one in group(number)]
    groups = UsefulGroups(lambda: group(next(numbers)), requests, max_extra=max_extra)
    open_requests, finished = list(requests), []
    while open_requests:
        request = open_requests.pop(order.randrange(len(open_requests)))
        reward = float(useful[request.group_id] and request.key.sample_index % SIZE)
        finished.append(rollout(request, reward))
        open_requests += groups.ended(request.group_id, reward)
    require_declared(groups.metrics())
    finished.sort(key=lambda one: one.completion.key.sample_index)
    chosen = sorted({one.completion.group_id for one in groups.batch(finished)})
    return chosen, int(groups.metrics()["rollout/num_groups_sampled"])


@pytest.mark.parametrize("seed", range(20))
def test_the_batch_does_not_depend_on_who_finishes_first(seed):
    draw = random.Random(seed)
    useful = [draw.random() < 0.5 for _ in range(200)]
    results = [run(useful, num_prompts=6, max_extra=100, order=random.Random(other)) for other in range(5)]
    assert all(result == results[0] for result in results)
    expected = [number for number in range(200) if useful[number]][:6]
    assert results[0] == (expected, expected[-1] + 1), "the fewest first prompts that hold enough"


def test_useless_groups_fill_a_batch_when_too_few_are_useful():
    useful = [False, False, True, False, False, False, False]
    chosen, sampled = run(useful, num_prompts=3, max_extra=2, order=random.Random(0))
    assert (chosen, sampled) == ([0, 1, 2], 5)


def test_nothing_useful_at_all_is_an_error_that_says_so():
    with pytest.raises(NumericsError, match=r"of 4 prompts none has samples with different rewards"):
        run([False] * 9, num_prompts=2, max_extra=2, order=random.Random(0))


def test_groups_are_judged_before_shaping_or_by_the_part_that_is_named():
    rewards = [
        Reward(value=0.9, parts={"unshaped": 1.0, "correct": 1.0}),
        Reward(value=1.0, parts={"unshaped": 1.0, "correct": 0.0}),
    ]
    for metric, useful in ((None, False), ("correct", True)):
        groups = UsefulGroups(list, group(0), max_extra=0, metric=metric)
        for request, reward in zip(group(0), rewards, strict=True):
            groups.scored(replace(rollout(request, 0.0), reward=reward))
        assert groups.is_useful(0) is useful
    groups = UsefulGroups(list, group(0), max_extra=0, metric="form")
    with pytest.raises(ConfigError, match="'form' is no part of the reward; its parts are correct, unshaped"):
        groups.scored(replace(rollout(group(0)[0], 0.0), reward=rewards[0]))


def test_a_sample_that_is_left_out_does_not_hold_up_its_group():
    further = group(1)
    groups = UsefulGroups(lambda: further, group(0), max_extra=1)
    assert groups.ended(0, None) == []
    assert groups.ended(0, 1.0) == further, "one reward alone compares with nothing"
    assert groups.ended(1, 0.0) == []
    assert groups.ended(1, 1.0) == []
    assert groups.is_useful(1) and not groups.is_useful(0)


def test_a_batch_is_whole_when_the_groups_that_stand_in_are_scored_too():
    numbers = iter(range(9))
    schedule = InTurns(
        lambda: [*group(next(numbers)), *group(next(numbers))],
        useful_groups=lambda requests: UsefulGroups(lambda: group(next(numbers)), requests, max_extra=1),
    )
    asked = schedule.begin(0)
    assert asked == [*group(0), *group(1)], "as the cursor made them"
    for number, rewards in ((1, (0.0, 1.0)), (0, (1.0, 1.0)), (2, (1.0, 0.0))):
        assert not schedule.has(0)
        for request, reward in zip(group(number), rewards, strict=True):
            done = rollout(request, reward)
            assert schedule.whole(done.completion) is not None
            further = schedule.ended(request.key, done)
        assert further == (group(2) if number == 0 else [])
    assert schedule.has(0)
    assert [one.completion.group_id for one in schedule.take(0)] == [1, 1, 2, 2]
    assert [one.completion.group_id for one in schedule.left_out] == [0, 0], "written, and not learned from"
    assert schedule.in_flight() == InFlight()
