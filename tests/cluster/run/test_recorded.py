"""Generation ahead of learning: random schedules keep every promise; what is in flight survives a state of the run."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from rlhfspec.cluster.resume.in_flight_files import read_in_flight, write_in_flight
from rlhfspec.core.errors import DataError, RewardError, WeightsError
from rlhfspec.core.records import (
    Completion,
    FinishReason,
    Prompt,
    Reward,
    Rollout,
    SampleKey,
    SampleRequest,
    SamplingParams,
    Unscored,
    WeightSpan,
)
from rlhfspec.policies.scheduling.open_samples import is_whole
from rlhfspec.policies.staleness.in_turns import UsefulGroups
from rlhfspec.policies.staleness.recorded import PhasePlan, Recorded

REFUSED = Unscored(reason="too long")


def plan_of(staleness: int, *, tokens: int, iterations: int, load: str = "reprefill") -> PhasePlan:
    return PhasePlan(
        max_staleness=staleness,
        weight_load=load,  # type: ignore[arg-type]
        max_new_tokens=tokens,
        num_iterations=iterations,
    )


class Cursor:
    """Hands out batches of `size` samples, as the run's cursor does."""

    def __init__(self, size: int, tokens: int) -> None:
        self.size, self.sampling, self.given = size, SamplingParams(max_new_tokens=tokens), 0

    def __call__(self) -> list[SampleRequest]:
        first, self.given = self.given, self.given + self.size
        return [
            SampleRequest(
                key=SampleKey(run_seed=1, sample_index=index),
                prompt=Prompt(prompt_id=index, token_ids=np.array([index + 1])),
                sampling=self.sampling,
                group_id=index,
            )
            for index in range(first, first + self.size)
        ]


def decoded(request: SampleRequest, *, length: int, version: int, longest: int = 99) -> Completion:
    """What an engine makes of a turn of a response that has `length` tokens in the end."""
    before, most = request.history, request.sampling.max_new_tokens
    count = min(length, most)
    done = 0 if before is None else len(before.token_ids)
    assert done < count, "a turn adds at least a token"
    spans = () if before is None else before.weight_spans
    if not spans or spans[-1].weight_version != version:
        spans = (*spans, WeightSpan(weight_version=version, first_position=done))
    return Completion(
        key=request.key,
        prompt_id=request.prompt.prompt_id,
        group_id=request.group_id,
        epoch=0,
        token_ids=np.arange(count) + request.key.sample_index,
        policy_logprobs=np.full(count, -0.5, dtype=np.float32),
        sampling_logprobs=np.full(count, -0.25, dtype=np.float32),
        # of the longest responses some are cut by their limit, and some stop on their last token
        finish_reason=FinishReason.STOP
        if count == length and (length < longest or length % 2)
        else FinishReason.LENGTH,
        weight_spans=spans,
        instance="gen-0",
        num_decode_steps=count,
        num_accepted_tokens=0,
        sampled=None if before is None else np.ones(count, dtype=bool),
    )


def scored(completion: Completion) -> Rollout:
    prompt = Prompt(prompt_id=completion.prompt_id, token_ids=np.array([completion.prompt_id + 1]))
    return Rollout(prompt=prompt, completion=completion, response_text="", reward=Reward(value=1.0))


def play_phase(
    schedule: Recorded,
    phase: int,
    lengths: list[int],
    chance: random.Random,
    late: list[Completion] | None = None,
) -> int:
    """Let the samples of a phase end in any order; how many there were. Some rewards are `late`."""
    requests = schedule.begin(phase)
    assert len({request.key for request in requests}) == len(requests)
    for request in chance.sample(requests, len(requests)):
        length = lengths[request.key.sample_index]
        whole = schedule.whole(
            decoded(
                request,
                length=length,
                version=schedule.plan.weight_version(phase),
                longest=schedule.plan.max_new_tokens,
            )
        )
        if whole is not None:
            asked, completion = whole
            assert completion.num_tokens == length and completion.key == asked.key
            if late is not None and chance.random() < 0.5:
                late.append(completion)
            else:
                schedule.ended(completion.key, scored(completion))
    return len(requests)


def score_until_there(schedule: Recorded, batch: int, late: list[Completion], chance: random.Random) -> None:
    """Let late rewards come, in any order, until a batch is there."""
    chance.shuffle(late)
    while not schedule.has(batch):
        with pytest.raises(WeightsError, match="whole or not scored"):
            schedule.take(batch)
        completion = late.pop()
        schedule.ended(completion.key, scored(completion))


def test_random_schedules_keep_every_promise() -> None:
    """No token is staler than allowed, every sample is learned from once, and only so many are in flight."""
    chance = random.Random(0)
    for _ in range(2_000):
        staleness, iterations, size = chance.randint(1, 4), chance.randint(1, 6), chance.randint(1, 3)
        tokens = chance.randint(1, 12)
        plan = plan_of(
            staleness, tokens=tokens, iterations=iterations, load=chance.choice(["drain", "reprefill"])
        )
        lengths = [chance.randint(1, tokens) for _ in range(iterations * size)]
        cursor, learned, late = Cursor(size, tokens), [], list[Completion]()
        schedule = Recorded(plan, cursor)
        for iteration in range(iterations):
            assert schedule.needs_filling(iteration) == (iteration == 0), "late rewards are no reason to"
            if iteration == 0:
                play_phase(schedule, -1, lengths, chance, late)
            score_until_there(schedule, iteration, late, chance)
            batch = schedule.take(iteration)
            learned += [rollout.completion.key.sample_index for rollout in batch]
            for rollout in batch:
                versions = [span.weight_version for span in rollout.completion.weight_spans]
                assert versions == sorted(set(versions)) and versions[-1] <= iteration
                assert iteration - versions[0] <= staleness
                assert plan.weight_load == "reprefill" or len(versions) == 1
            play_phase(schedule, iteration, lengths, chance, late)
            held = schedule.in_flight()
            assert held.unscored.keys() == {completion.key for completion in late}
            in_flight = len(held.open_samples) + len(late) + sum(len(ready) for ready in held.ready.values())
            assert in_flight <= plan.lag * size
        assert learned == list(range(iterations * size))
        assert cursor.given == iterations * size and not schedule.num_open and not schedule.num_unscored


def test_a_response_is_cut_at_equal_shares_of_the_longest() -> None:
    plan = plan_of(2, tokens=9, iterations=4)
    assert plan.lag == 2 and plan.share == 5
    assert list(plan.batches(-1)) == [0, 1] and list(plan.batches(1)) == [2, 3] and not plan.batches(3)
    assert [plan.limit(0, -1), plan.limit(1, -1), plan.limit(1, 0), plan.limit(2, 0)] == [9, 5, 9, 5]
    schedule = Recorded(plan, Cursor(1, 9))
    play_phase(schedule, -1, [9] * 4, random.Random(0))
    schedule.take(0)
    play_phase(schedule, 0, [9] * 4, random.Random(0))
    schedule.take(1)
    play_phase(schedule, 1, [9] * 4, random.Random(0))
    (third,) = schedule.take(2)
    spans = [(span.weight_version, span.first_position) for span in third.completion.weight_spans]
    assert spans == [(0, 0), (1, 5)]


def test_a_stale_or_missing_sample_is_refused() -> None:
    schedule = Recorded(plan_of(1, tokens=4, iterations=5), Cursor(1, 4))
    (request,) = schedule.begin(-1)
    with pytest.raises(WeightsError, match="1 of its samples are not whole or not scored, sample 0"):
        schedule.take(0)
    schedule.ended(request.key, scored(decoded(request, length=4, version=3)))
    with pytest.raises(WeightsError, match=r"weight version 3 .* trainer is at 0"):
        schedule.take(0)


def test_a_whole_response_that_waits_for_its_reward_is_not_asked_for_again() -> None:
    schedule = Recorded(plan_of(2, tokens=9, iterations=4), Cursor(1, 9))
    for request in schedule.begin(-1):
        schedule.whole(decoded(request, length=3, version=0))
    assert schedule.num_unscored == 2 and not schedule.num_open and not schedule.num_cut
    assert not schedule.has(0) and not schedule.needs_filling(0)
    assert [request.key.sample_index for request in schedule.begin(0)] == [2]
    (first, second) = schedule.in_flight().unscored.values()
    assert first.so_far is not None and second.so_far is not None
    schedule.ended(second.request.key, scored(second.so_far))
    assert not schedule.has(0), "the other batch's reward does not help"
    schedule.ended(first.request.key, scored(first.so_far))
    assert [rollout.completion.key for rollout in schedule.take(0)] == [first.request.key]


@pytest.mark.parametrize("reason", list(FinishReason))
@pytest.mark.parametrize("phase", [-1, 0])
def test_what_is_whole_is_what_the_scheduler_takes_for_whole(reason: FinishReason, phase: int) -> None:
    schedule = Recorded(plan_of(2, tokens=9, iterations=2), Cursor(1, 9))
    schedule.begin(-1)
    request = schedule.begin(phase)[-1]
    assert request.is_cut_at_limit == (phase == -1)
    completion = replace(decoded(request, length=3, version=0), finish_reason=reason)
    assert (schedule.whole(completion) is not None) == is_whole(request, completion)
    assert schedule.num_unscored == is_whole(request, completion)


def test_a_sample_that_is_completed_twice_is_refused() -> None:
    schedule = Recorded(plan_of(1, tokens=4, iterations=1), Cursor(1, 4))
    (request,) = schedule.begin(-1)
    done = decoded(request, length=3, version=0)
    assert schedule.whole(done) is not None
    with pytest.raises(WeightsError, match="sample 0 was completed and is not open"):
        schedule.whole(done)


def test_a_sample_that_is_left_out_is_not_waited_for() -> None:
    schedule = Recorded(plan_of(1, tokens=4, iterations=1), Cursor(2, 4))
    first, second = schedule.begin(-1)
    schedule.ended(first.key, REFUSED)
    schedule.ended(second.key, scored(decoded(second, length=3, version=0)))
    assert [rollout.completion.key for rollout in schedule.take(0)] == [second.key]


def test_a_batch_without_any_reward_is_refused() -> None:
    schedule = Recorded(plan_of(1, tokens=4, iterations=1), Cursor(2, 4))
    for request in schedule.begin(-1):
        schedule.ended(request.key, REFUSED)
    with pytest.raises(
        RewardError, match=r"none of the samples of iteration 1 could be scored.*the last: too long"
    ):
        schedule.take(0)


def test_a_run_that_was_shortened_leaves_later_batches_where_they_are() -> None:
    long, short = (plan_of(3, tokens=9, iterations=n) for n in (9, 2))
    schedule = Recorded(long, Cursor(1, 9))
    play_phase(schedule, -1, [9] * 9, random.Random(0))
    again = Recorded(short, Cursor(1, 9))
    again.restore(schedule.in_flight())
    assert [request.key.sample_index for request in schedule.begin(0)] == [1, 2, 3]
    assert [request.key.sample_index for request in again.begin(0)] == [1]


class DataSet:
    def __init__(self, prompts: list[Prompt]) -> None:
        self.prompts = prompts


def test_what_is_in_flight_is_read_back_as_it_was(tmp_path: Path) -> None:
    plan, lengths = plan_of(3, tokens=9, iterations=6), [9, 2, 7, 9, 5, 9, 9, 1, 4, 9, 9, 9]
    cursor = Cursor(2, 9)
    schedule, late = Recorded(plan, cursor), list[Completion]()
    play_phase(schedule, -1, lengths, random.Random(1))
    schedule.take(0)
    play_phase(schedule, 0, lengths, random.Random(1), late)
    before = schedule.in_flight()
    assert before.open_samples and any(before.ready.values()) and before.unscored
    write_in_flight(tmp_path / "in_flight", before)
    prompts = [Prompt(prompt_id=i, token_ids=np.array([i + 1]), fields={"kept": i}) for i in range(12)]
    data: DataSet = DataSet(prompts)
    after = read_in_flight(tmp_path / "in_flight", data, cursor.sampling)  # type: ignore[arg-type]
    assert after.ready.keys() == before.ready.keys()
    for batch, ready in before.ready.items():
        assert [str(one.completion) for one in after.ready[batch].values()] == [
            str(replace(one.completion)) for one in ready.values()
        ]
    assert after.open_samples.keys() == before.open_samples.keys()
    for key, one in after.open_samples.items():
        assert one.batch == before.open_samples[key].batch
        assert str(one.so_far) == str(before.open_samples[key].so_far)
        assert one.request.prompt.fields == {"kept": key.sample_index}
    assert {key: (one.batch, str(one.so_far)) for key, one in after.unscored.items()} == {
        key: (one.batch, str(one.so_far)) for key, one in before.unscored.items()
    }
    # both go on to the same batches; what was not scored is scored again
    again = Recorded(plan, Cursor(2, 9))
    again.restore(after)
    assert not again.has(1) and not again.needs_filling(1)
    unsent = [completion for _, completion in again.unsent()]
    assert {one.key for one in unsent} == before.unscored.keys() and not again.unsent()
    for each, theirs in ((schedule, late), (again, unsent)):
        for completion in theirs:
            each.ended(completion.key, scored(completion))
        each.take(1)
    play_phase(schedule, 1, lengths, random.Random(2))
    other = Cursor(2, 9)
    other.given = 8
    again._next_requests = other
    play_phase(again, 1, lengths, random.Random(3))
    assert [str(one.completion) for one in again.take(2)] == [str(one.completion) for one in schedule.take(2)]


def test_samples_of_an_unknown_kind_are_not_passed_over(tmp_path: Path) -> None:
    schedule = Recorded(plan_of(2, tokens=4, iterations=4), Cursor(1, 4))
    play_phase(schedule, -1, [4] * 4, random.Random(0))
    write_in_flight(tmp_path / "in_flight", schedule.in_flight())
    known = next((tmp_path / "in_flight").glob("batch_*.parquet"))
    known.rename(known.with_name(f"{known.stem}_judged.parquet"))
    with pytest.raises(
        DataError, match=r"_judged\.parquet holds samples of a kind that this version does not know"
    ):
        read_in_flight(tmp_path / "in_flight", DataSet([]), Cursor(1, 4).sampling)  # type: ignore[arg-type]


def test_samples_of_other_prompts_are_not_gone_on_with(tmp_path: Path) -> None:
    schedule = Recorded(plan_of(2, tokens=4, iterations=4), Cursor(1, 4))
    play_phase(schedule, -1, [4] * 4, random.Random(0))
    write_in_flight(tmp_path / "in_flight", schedule.in_flight())
    data = DataSet([Prompt(prompt_id=i, token_ids=np.array([7])) for i in range(4)])
    with pytest.raises(DataError, match="prompt 1 is another one in the data"):
        read_in_flight(tmp_path / "in_flight", data, SamplingParams(max_new_tokens=4))  # type: ignore[arg-type]
    nothing = read_in_flight(tmp_path / "none", data, SamplingParams(max_new_tokens=4))  # type: ignore[arg-type]
    assert not nothing.ready and not nothing.open_samples


def dynamic_schedule(plan: PhasePlan, cursor: Cursor, *, num_groups: int) -> Recorded:
    """Groups of two; a batch has `num_groups` and gets at most eight times as many further ones."""

    def group() -> list[SampleRequest]:
        one, other = cursor()
        return [
            replace(one, group_id=one.key.sample_index // 2),
            replace(other, group_id=one.key.sample_index // 2),
        ]

    return Recorded(
        plan,
        lambda: [one for _ in range(num_groups) for one in group()],
        useful_groups=partial(UsefulGroups, group, max_extra=8 * num_groups, num_groups=num_groups),
    )


def learned_with_dynamic_sampling(plan: PhasePlan, chance: random.Random, *, resumes: bool) -> list:
    """What each update learns from, its tokens' versions and what is left out; samples end in any order."""
    cursor, learned = Cursor(2, plan.max_new_tokens), []
    schedule = dynamic_schedule(plan, cursor, num_groups=2)
    for phase in range(-1, plan.num_iterations):
        if phase >= 0:
            batch = schedule.take(phase)
            spans = [(one.completion.key.sample_index, one.completion.weight_spans) for one in batch]
            learned.append(
                (spans, [one.completion.key.sample_index for one in schedule.left_out], schedule.metrics())
            )
        requests = schedule.begin(phase)
        while requests:
            request = requests.pop(chance.randrange(len(requests)))
            drawn = random.Random(request.key.sample_index)
            length, reward = drawn.randint(1, plan.max_new_tokens), float(drawn.random() < 0.4)
            done = decoded(
                request, length=length, version=plan.weight_version(phase), longest=plan.max_new_tokens
            )
            if schedule.whole(done) is None:
                continue
            outcome = REFUSED if drawn.random() < 0.1 else replace(scored(done), reward=Reward(value=reward))
            requests += schedule.ended(request.key.sample, outcome)
        if resumes:
            before, schedule = schedule, dynamic_schedule(plan, cursor, num_groups=2)
            schedule.restore(before.in_flight())
    return learned


@pytest.mark.parametrize("load", ["drain", "reprefill"])
@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_useless_groups_of_the_batch_that_is_due_are_replaced_whoever_ends_first(
    staleness: int, load: str
) -> None:
    plan = plan_of(staleness, tokens=7, iterations=6, load=load)
    runs = [
        learned_with_dynamic_sampling(plan, random.Random(seed), resumes=bool(seed % 2)) for seed in range(8)
    ]
    assert all(run == runs[0] for run in runs)
    assert {len(batch) for batch, *_ in runs[0]} <= {2, 3, 4}
    sampled = [metrics["rollout/num_groups_sampled"] for *_, metrics in runs[0]]
    assert max(sampled) > 2 and all(
        left_out for (_, left_out, _), n in zip(runs[0], sampled, strict=True) if n > 2
    )
    oldest = {
        update - spans[0].weight_version for update, (batch, *_) in enumerate(runs[0]) for _, spans in batch
    }
    assert max(oldest) == plan.lag
