"""The free schedule: whatever ends when, no token is too old, no sample is lost, none is learned from twice."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlhfspec.cluster.resume.in_flight_files import read_in_flight, write_in_flight
from rlhfspec.core.config import Config
from rlhfspec.core.errors import WeightsError
from rlhfspec.core.records import (
    Completion,
    FinishReason,
    Prompt,
    Rollout,
    SampleKey,
    SampleRequest,
    SamplingParams,
    Unscored,
    WeightSpan,
)
from rlhfspec.policies.staleness.free import Free, FreeAdmission
from tests.cluster.run.test_recorded import DataSet, scored

LONGEST = 12


class Cursor:
    """Hands out groups of `size` samples."""

    def __init__(self, size: int) -> None:
        self.size, self.sampling, self.groups = size, SamplingParams(max_new_tokens=LONGEST), 0

    def __call__(self, count: int) -> list[SampleRequest]:
        first, self.groups = self.groups, self.groups + count
        return [
            SampleRequest(
                key=SampleKey(run_seed=1, sample_index=group * self.size + number),
                prompt=Prompt(prompt_id=group, token_ids=np.array([group + 1])),
                sampling=self.sampling,
                group_id=group,
            )
            for group in range(first, self.groups)
            for number in range(self.size)
        ]


def decoded(request: SampleRequest, *, count: int, version: int, is_whole: bool) -> Completion:
    before = request.history
    done = 0 if before is None else len(before.token_ids)
    spans = () if before is None else before.weight_spans
    if count > done:
        spans = (*spans, WeightSpan(weight_version=version, first_position=done))
    at_limit = FinishReason.LENGTH if count == LONGEST else FinishReason.STOP
    return Completion(
        key=request.key,
        prompt_id=request.prompt.prompt_id,
        group_id=request.group_id,
        epoch=0,
        token_ids=np.arange(count) + request.key.sample_index,
        policy_logprobs=np.full(count, -0.5, dtype=np.float32),
        sampling_logprobs=np.full(count, -0.25, dtype=np.float32),
        finish_reason=at_limit if is_whole else FinishReason.CUT,
        weight_spans=spans,
        instance="gen-0",
        num_decode_steps=count,
        num_accepted_tokens=0,
    )


class Clock:
    """Plays phases: samples end in any order; once the batch is there, the update ends after any number of them."""

    def __init__(
        self, schedule: Free, lengths: list[int], seed: int, *, rewards_are_late: bool = False
    ) -> None:
        self.rewards_are_late = rewards_are_late
        self.schedule, self.lengths, self.chance = schedule, lengths, random.Random(seed)
        self.late: list[Completion] = []

    def score(self) -> None:
        """Let a late reward come."""
        completion = self.late.pop(self.chance.randrange(len(self.late)))
        self.schedule.ended(completion.key, scored(completion))

    def end(self, request: SampleRequest, version: int, *, cut: bool) -> None:
        length = self.lengths[request.key.sample_index]
        done = 0 if request.history is None else len(request.history.token_ids)
        count = self.chance.randint(done, length - 1) if cut else length
        one = self.schedule.whole(decoded(request, count=count, version=version, is_whole=not cut))
        assert (one is None) == cut
        if one is not None:
            assert one[1].num_tokens == length and one[1].key == one[0].key
            self.late.append(one[1])
            if not self.rewards_are_late or self.chance.random() < 0.5:
                self.score()

    def phase(self, version: int) -> list[Rollout]:
        asked = self.schedule.begin(version)
        assert len({request.key for request in asked}) == len(asked)
        open_samples, learned = self.chance.sample(asked, len(asked)), None
        left = 0
        while True:
            if learned is None and self.schedule.has(version):
                learned, left = self.schedule.take(version), self.chance.randint(0, 4)
                continue
            if learned is not None and (not left or not open_samples):
                break
            left -= 1
            if self.late and (not open_samples or self.chance.random() < 0.5):
                self.score()
                continue
            assert open_samples, "a batch is whole when everything is"
            self.end(open_samples.pop(), version, cut=False)
        for request in open_samples:
            self.end(request, version, cut=True)
        return learned


def admission(chance: random.Random) -> FreeAdmission:
    staleness = chance.randint(1, 4)
    return FreeAdmission(
        max_staleness=staleness,
        over_provisioning=chance.choice([0.3, 0.5, 1.0, float(staleness)]),
        groups_per_batch=chance.randint(1, 4),
        num_iterations=chance.randint(1, 6),
    )


def test_random_schedules_keep_every_promise() -> None:
    chance, carried, late = random.Random(0), 0, 0
    for seed in range(2_000):
        plan, size = admission(chance), chance.randint(1, 3)
        groups, batch_size = plan.num_iterations * plan.groups_per_batch, plan.groups_per_batch * size
        cursor = Cursor(size)
        schedule = Free(plan, cursor)
        lengths = [chance.randint(1, LONGEST) for _ in range(groups * size)]
        clock, learned = Clock(schedule, lengths, seed, rewards_are_late=seed % 2 > 0), []
        for update in range(plan.num_iterations):
            batch = clock.phase(update)
            indices = [rollout.completion.key.sample_index for rollout in batch]
            assert indices == sorted(indices) and len(batch) == batch_size
            learned += indices
            for rollout in batch:
                versions = [span.weight_version for span in rollout.completion.weight_spans]
                assert versions == sorted(set(versions)) and update - versions[0] <= plan.max_staleness
                carried += len(versions) > 1
            held = schedule.in_flight()
            assert held.unscored.keys() == {completion.key for completion in clock.late}
            late += len(held.unscored)
            in_flight = len(held.open_samples) + len(held.unscored)
            in_flight += sum(len(ready) for ready in held.ready.values())
            assert in_flight <= plan.max_staleness * batch_size
        assert sorted(learned) == list(range(groups * size)), "each once, none lost"
        assert cursor.groups == groups and not schedule.num_open and not schedule.num_unscored
    assert carried > 2_000 and late > 1_000


def test_who_ends_first_is_learned_from_and_the_rest_is_carried_over_whole() -> None:
    plan = FreeAdmission(max_staleness=2, over_provisioning=0.5, groups_per_batch=2, num_iterations=4)
    schedule = Free(plan, Cursor(2))
    asked = schedule.begin(0)
    assert [request.group_id for request in asked] == [0, 0, 1, 1, 2, 2]
    clock = Clock(schedule, [LONGEST] * 16, 0)
    for request in (asked[4], asked[2], asked[5], asked[0]):
        assert not schedule.has(0)
        clock.end(request, 0, cut=False)
    clock.end(asked[3], 0, cut=False)
    assert [rollout.completion.group_id for rollout in schedule.take(0)] == [1, 1, 2, 2]
    clock.end(asked[1], 0, cut=True)
    again = schedule.begin(1)
    assert [request.group_id for request in again] == [0, 3, 3, 4, 4]
    assert again[0].key.turn == 1 and schedule.in_flight().open_samples[again[0].key.sample].batch == 0
    for request in again[1:]:
        clock.end(request, 1, cut=False)
    # the group of version 0 may still wait a version, but not two
    assert [rollout.completion.group_id for rollout in schedule.take(1)] == [3, 3, 4, 4]
    clock.end(again[0], 1, cut=True)
    third = schedule.begin(2)
    for request in third[1:]:
        clock.end(request, 2, cut=False)
    assert not schedule.has(2), "it is waited for"
    with pytest.raises(WeightsError, match="batch 2 is to be learned from"):
        schedule.take(2)
    clock.end(third[0], 2, cut=False)
    assert [rollout.completion.group_id for rollout in schedule.take(2)] == [0, 0, 5, 5]


def test_a_group_in_line_ages_from_its_first_token_on() -> None:
    plan = FreeAdmission(max_staleness=1, over_provisioning=1.0, groups_per_batch=1, num_iterations=3)
    schedule = Free(plan, Cursor(2))
    clock = Clock(schedule, [LONGEST] * 6, 0)
    asked = schedule.begin(0)
    for request in asked[:2]:
        clock.end(request, 0, cut=False)
    schedule.take(0)
    for request in asked[2:]:
        schedule.whole(decoded(request, count=0, version=0, is_whole=False))
    again = schedule.begin(1)
    assert {one.batch for one in schedule.in_flight().open_samples.values()} == {1}
    # so the one behind it may go first
    for request in again[2:]:
        clock.end(request, 1, cut=False)
    assert [rollout.completion.group_id for rollout in schedule.take(1)] == [2, 2]
    schedule.whole(decoded(again[0], count=3, version=1, is_whole=False))
    schedule.whole(decoded(again[1], count=0, version=1, is_whole=False))
    schedule.begin(2)
    assert {one.batch for one in schedule.in_flight().open_samples.values()} == {1}


def test_a_group_without_any_reward_counts_as_ended() -> None:
    plan = FreeAdmission(max_staleness=1, over_provisioning=1.0, groups_per_batch=1, num_iterations=2)
    schedule = Free(plan, Cursor(1))
    first, second = schedule.begin(0)
    schedule.ended(first.key, Unscored(reason="too long"))
    again = Free(plan, Cursor(1))
    again.restore(schedule.in_flight())
    assert again.has(0) and not again.has(1), "after a resume, too"
    with pytest.raises(Exception, match="none of the samples of iteration 1 could be scored"):
        schedule.take(0)
    schedule.ended(second.key, scored(decoded(second, count=3, version=0, is_whole=True)))
    assert len(schedule.take(1)) == 1


def test_what_is_in_flight_is_read_back_with_samples_that_have_not_begun(tmp_path: Path) -> None:
    plan = FreeAdmission(max_staleness=2, over_provisioning=2.0, groups_per_batch=2, num_iterations=5)
    cursor = Cursor(2)
    schedule = Free(plan, cursor)
    lengths = [1 + (7 * number) % LONGEST for number in range(20)]
    clock = Clock(schedule, lengths, 5, rewards_are_late=True)
    clock.phase(0)
    clock.phase(1)
    before = schedule.in_flight()
    assert before.unscored
    assert any(one.so_far is None for one in before.open_samples.values())
    assert any(one.so_far is not None for one in before.open_samples.values())
    write_in_flight(tmp_path / "in_flight", before)
    after = read_in_flight(
        tmp_path / "in_flight",
        DataSet([Prompt(prompt_id=i, token_ids=np.array([i + 1])) for i in range(10)]),
        cursor.sampling,
    )  # type: ignore[arg-type]
    assert after.ready.keys() == before.ready.keys() and after.ended == before.ended
    assert after.open_samples.keys() == before.open_samples.keys()
    assert after.unscored.keys() == before.unscored.keys()
    for key, one in (before.open_samples | before.unscored).items():
        again = (after.open_samples | after.unscored)[key]
        assert (again.batch, str(again.so_far)) == (one.batch, str(one.so_far))
    other = Cursor(2)
    other.groups = cursor.groups
    resumed = Free(plan, other)
    resumed.restore(after)
    learned = []
    later = Clock(resumed, lengths, 4, rewards_are_late=True)
    later.late = [completion for _, completion in resumed.unsent()]
    for update in (2, 3, 4):
        learned += [one.completion.key.sample_index for one in later.phase(update)]
    assert len(learned) == len(set(learned)) == 12 and other.groups == 10


def settings(**rollout: object) -> Config:
    return Config.model_validate(
        {
            "models": {"target": "t", "draft": "d"},
            "data": {"task": "chain"},
            "rollout": rollout,
            "algorithm": {"correction": {"kind": "tis"}},
        }
    )


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"schedule": "free"}, "max_staleness to 1 or more"),
        (
            {"schedule": "free", "max_staleness": 1, "weight_load": "drain"},
            "weight_load to reprefill",
        ),
        ({"max_staleness": 1, "over_provisioning": 0.5}, "set schedule: free and max_staleness to 1"),
        ({"schedule": "free", "max_staleness": 1, "over_provisioning": 1.5}, "raise max_staleness"),
    ],
)
def test_settings_without_effect_are_refused(rollout: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(**rollout)
    assert settings(schedule="free", max_staleness=2, over_provisioning=0.5).rollout.schedule == "free"


def test_what_cannot_go_together_is_one_error_that_says_what_can() -> None:
    tree = settings(max_staleness=1).model_dump()
    tree["environment"]["kind"] = "calculator"
    tree["reward"]["kind"] = "environment"
    for schedule, load in (("free", "reprefill"), ("free", "drain"), ("recorded", "reprefill")):
        tree["rollout"] |= {"schedule": schedule, "weight_load": load}
        with pytest.raises(ValueError, match="set schedule: recorded and weight_load: drain"):
            Config.model_validate(tree)
    tree["rollout"] |= {"schedule": "recorded", "weight_load": "drain"}
    assert Config.model_validate(tree).environment.kind == "calculator"


def test_a_choice_leaves_no_more_behind_than_later_updates_can_take() -> None:
    plan = FreeAdmission(max_staleness=2, over_provisioning=2.0, groups_per_batch=2, num_iterations=9)
    assert [plan.most_begun(version) for version in (0, 1, 7, 8)] == [6, 8, 18, 18]
    assert replace(plan, over_provisioning=0.4).most_begun(0) == 3
    # of six that began at 0 two go with each of the updates 0, 1 and 2
    assert plan.choose([0, 1, 1], [0, 0, 0], 0) == [0, 1], "four at 0 may wait: two more updates come"
    assert plan.choose([1, 1, 0, 0], [0, 0, 0], 0) == [0, 2]
    assert plan.choose([1, 1, 0], [0, 0, 0, 0, 0], 0) is None
    assert plan.choose([1, 0, 1], [0, 0], 1) == [0, 1] and plan.choose([1, 1], [0, 0], 1) == [0, 1]
    assert plan.choose([1, 1], [0, 0, 0], 1) is None and plan.choose([1], [], 1) is None
