"""The stream of rollouts, over a scheduler and a reward pool made by hand. No Ray, no torch models."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from made_moves import move

from rlhfspec.actors.actor_messages import LostInstance, Taken
from rlhfspec.cluster.run.stream import RolloutStream
from rlhfspec.cluster.system.system import GeneratingSystem
from rlhfspec.core.decode_records import GenerationStats
from rlhfspec.core.errors import RewardError, RlhfSpecError, WeightsError
from rlhfspec.core.records import (
    Completion,
    FinishReason,
    Prompt,
    ResponseFacts,
    Reward,
    SampleKey,
    SampleRequest,
    SamplingParams,
    Unscored,
    WeightSpan,
)
from rlhfspec.learning.models.tokenization import character_tokenizer
from rlhfspec.policies.scheduling.events import Alarm

LETTERS = "abcde"
TOKENIZER = character_tokenizer(LETTERS)


def request(index: int) -> SampleRequest:
    return SampleRequest(
        key=SampleKey(run_seed=0, sample_index=index),
        prompt=Prompt(prompt_id=index, token_ids=np.array([7]), text=f"p{index}"),
        sampling=SamplingParams(),
    )


def done(index: int, *, version: int = 2) -> Completion:
    logprobs = np.zeros(1, dtype=np.float32)
    return Completion(
        key=SampleKey(run_seed=0, sample_index=index),
        prompt_id=index,
        group_id=0,
        epoch=0,
        token_ids=np.array(TOKENIZER.encode(LETTERS[index], add_special_tokens=False)),
        policy_logprobs=logprobs,
        sampling_logprobs=logprobs,
        finish_reason=FinishReason.STOP,
        weight_spans=(WeightSpan(weight_version=version, first_position=0),),
        instance="gen-0",
        num_decode_steps=1,
        num_accepted_tokens=0,
    )


class Scheduler:
    """Gives out a script of answers; every answer adds ten decode steps and a quarter of a second of planning."""

    def __init__(self, *script: Taken) -> None:
        self.script = [Taken(), *script]
        self.asked: list[int] = []
        self.num_taken = 0
        self.told: list[str] = []

    def enqueue(self, requests: tuple[SampleRequest, ...]) -> None:
        self.asked += [r.key.sample_index for r in requests]

    def take(self, wait_s: float, gathers: bool = False) -> Taken:
        self.num_taken += 1
        return self.script[self.num_taken - 1] if self.num_taken <= len(self.script) else Taken()

    def updates(self) -> list[str]:
        told, self.told = self.told, []
        return told

    @property
    def stats(self) -> GenerationStats:
        return GenerationStats(num_decode_steps=10 * self.num_taken)

    @property
    def planning_s(self) -> float:
        return 0.25 * self.num_taken


class Rewards:
    """One actor: busy from a batch until the next collection, which scores the newest batch first."""

    def __init__(self, refused: Sequence[int] = ()) -> None:
        self.refused = refused
        self.unscored: list = []
        self.sent: list[list[int]] = []
        self.sent_after: list[int] = []
        self.num_collections = 0
        self.waiting: list[list] = []

    @property
    def num_idle(self) -> int:
        return 0 if self.waiting else 1

    def submit(self, items: list, prompts: list, responses: list[str], facts: list[ResponseFacts]) -> None:
        assert [item[0].prompt for item in items] == prompts and [item[2] for item in items] == responses
        assert [item[1].key.sample_index for item in items] == [fact.sample_index for fact in facts]
        self.sent_after.append(self.num_collections)
        self.sent.append([item[1].key.sample_index for item in items])
        self.waiting.append(list(items))

    def collect(self, *, wait_s: float) -> list:
        self.num_collections += 1
        batch = self.waiting.pop() if self.waiting else []
        indices = [item[1].key.sample_index for item in batch]
        self.unscored += [
            (item, Unscored(reason=f"sample {i} is refused"))
            for i, item in zip(indices, batch, strict=True)
            if i in self.refused
        ]
        return [
            (item, Reward(value=float(i)))
            for i, item in zip(indices, batch, strict=True)
            if i not in self.refused
        ]

    def skipped(self) -> list:
        unscored, self.unscored = self.unscored, []
        return unscored


class Report:
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.seen: list[tuple[int, int]] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def progress(self, phase: str, number: int, total: int) -> None:
        self.seen.append((number, total))


class Generation:
    def __init__(self) -> None:
        self.replaced: list[str] = []
        self.instances = {"gen-1": None}

    def replace(self, lost: LostInstance) -> str | None:
        self.replaced.append(lost.instance)
        return None if lost.instance == "known" else f"{lost.instance}-r1"

    def look(self, taken: Taken, *, may_fetch: bool = True) -> None:
        """The size stays."""


def system(*script: Taken, batch_size: int = 2) -> Any:
    made = SimpleNamespace(
        scheduler=Scheduler(*script),
        rewards=Rewards(),
        episodes=None,
        generation=Generation(),
        tokenizer=TOKENIZER,
        target=SimpleNamespace(manifest=SimpleNamespace(weight_version=2)),
        is_learning=False,
        plan=SimpleNamespace(scores_groups=False),
        config=SimpleNamespace(
            rollout=SimpleNamespace(max_staleness=0),
            reward=SimpleNamespace(batch_size=batch_size),
            cluster=SimpleNamespace(order_timeout_s=300.0),
        ),
    )
    made.take = partial(GeneratingSystem.take, cast(GeneratingSystem, made))
    return made


def taken(*indices: int, **fields: Any) -> Taken:
    return Taken(completions=tuple(done(i) for i in indices), **fields)


def collected(made: Any, *indices: int, report: Any = None) -> Any:
    return RolloutStream(made, report or Report()).collect([request(i) for i in indices])


def test_rollouts_come_by_sample_index_with_their_own_prompt_text_and_reward():
    made = system(taken(3), taken(1, 4), taken(0, 2))
    rollouts = collected(made, 0, 1, 2, 3, 4).rollouts
    assert made.scheduler.asked == [0, 1, 2, 3, 4]
    found = [
        (r.completion.key.sample_index, r.prompt.text, r.response_text, r.reward.value) for r in rollouts
    ]
    assert found == [(i, f"p{i}", LETTERS[i], float(i)) for i in range(5)]


def test_a_group_is_scored_together_when_its_last_sample_is_whole_and_in_the_order_of_the_index():
    made = system(taken(3, 2), taken(4), taken(1), taken(0))
    made.plan.scores_groups = True
    # 0, 3 and 4 share a prompt, 1 and 2 another one
    requests = [replace(request(i), group_id=int(i in (0, 3, 4))) for i in range(5)]
    rollouts = RolloutStream(made, cast(Any, Report())).collect(requests).rollouts
    assert [rollout.completion.key.sample_index for rollout in rollouts] == [0, 1, 2, 3, 4]
    assert made.rewards.sent == [[1, 2], [0, 3, 4]], (
        "whole, though the second is larger than reward.batch_size"
    )


def test_scoring_starts_with_the_first_completion_and_every_response_is_scored_once():
    made = system(taken(0), taken(1), taken(2, 3, 4))
    collected(made, 0, 1, 2, 3, 4)
    assert made.rewards.sent[0] == [0], "an idle actor gets a partial batch"
    assert sorted(i for batch in made.rewards.sent for i in batch) == [0, 1, 2, 3, 4]


def test_a_busy_pool_gets_full_batches_and_the_rest_at_the_end():
    # all five come at once: two full batches, and the last one because nothing follows it
    made = system(taken(0, 1, 2, 3, 4))
    collected(made, 0, 1, 2, 3, 4)
    assert made.rewards.sent == [[0, 1], [2, 3], [4]] and made.rewards.sent_after == [0, 0, 0]
    # three of five: a full batch makes the actor busy, and the third waits for its fellow
    made = system(taken(0, 1, 2), taken(3, 4))
    collected(made, 0, 1, 2, 3, 4)
    assert made.rewards.sent == [[0, 1], [2, 3], [4]]


def test_the_statistics_are_those_of_this_iteration():
    # one answer before the samples are handed over, three with them
    assert collected(system(taken(0), taken(1), taken(2)), 0, 1, 2).stats.num_decode_steps == 30


def test_moves_and_planning_are_those_of_this_iteration():
    # moves that ended since the last iteration come with the first answer
    made = system(taken(0, moves=(move("0-1"),)), taken(1, moves=(move("0-2", "kept"), move("0-3"))))
    made.scheduler.script[0] = Taken(moves=(move("0-0"),))
    found = collected(made, 0, 1)
    assert [record.order.move_id for record in found.moves] == ["0-0", "0-1", "0-2", "0-3"]
    assert found.planning_s == 0.5, "of two answers, the first one having come before the samples"


def test_what_is_told_between_two_rollouts_is_kept_and_a_completion_then_is_a_fault():
    made = system()
    made.scheduler.script = [Taken(moves=(move("0-0"),)), Taken(moves=(move("0-1"),)), taken(0), taken(1)]
    stream: Any = RolloutStream(made, Report())  # pyright: ignore[reportArgumentType]
    stream.poll_pool()
    found = stream.collect([request(0)])
    assert [record.order.move_id for record in found.moves] == ["0-0", "0-1"]
    with pytest.raises(RlhfSpecError, match="1 samples were completed while the loop waited"):
        stream.poll_pool()


def test_a_lost_instance_is_replaced_once():
    lost = tuple(
        LostInstance(instance=name, reason="died", num_requeued=n) for name, n in (("gen-0", 2), ("known", 0))
    )
    made, report = system(taken(lost=lost), taken(0)), Report()
    made.scheduler.told = ["the scheduler is new"]
    collected(made, 0, report=report)
    assert made.generation.replaced == ["gen-0", "known"]
    assert report.notes == ["the scheduler is new"], "the pool itself tells of its instances"


def test_an_alarm_is_said_and_its_report_is_no_rollout():
    alarm = Alarm(key=request(0).key, instance="gen-9", epoch=1, what="tokens differ")
    made, report = system(taken(0, alarms=(alarm,))), Report()
    assert len(collected(made, 0, report=report).rollouts) == 1
    (note,) = report.notes
    assert "sample 0 from gen-9 under epoch 1: tokens differ" in note


def test_a_drafter_alarm_is_said():
    made, report = system(taken(0, drafter_alarms=("gen-1: decode step 7: ...",))), Report()
    assert len(collected(made, 0, report=report).rollouts) == 1
    assert report.notes == ["drafter alarm, drafting suspended on gen-1: decode step 7: ..."]


def test_progress_counts_completions_up_to_the_whole():
    report = Report()
    collected(system(taken(0), taken(1, 2)), 0, 1, 2, report=report)
    counts = [number for number, _ in report.seen]
    assert counts[0] == 1 and counts[-1] == 3 and counts == sorted(counts)
    assert {total for _, total in report.seen} == {3}


def test_a_response_of_older_weights_ends_the_iteration():
    stale = Taken(completions=(done(0, version=1),))
    with pytest.raises(WeightsError, match="sample 0 holds tokens of weight version 1"):
        collected(system(stale), 0)


def test_samples_without_a_reward_leave_the_iteration_with_a_count_and_their_reason():
    made, report = system(taken(3), taken(1, 4), taken(0, 2)), Report()
    made.rewards = Rewards(refused=[1, 4])
    gathered = collected(made, 0, 1, 2, 3, 4, report=report)
    assert [r.completion.key.sample_index for r in gathered.rollouts] == [0, 2, 3]
    assert gathered.num_skipped == 2
    assert sorted(report.notes) == ["skipped: sample 1 is refused", "skipped: sample 4 is refused"]


def test_an_iteration_without_any_reward_is_an_error():
    made = system(taken(0, 1))
    made.rewards = Rewards(refused=[0, 1])
    with pytest.raises(
        RewardError, match="none of the 2 samples could be scored; the last: sample 1 is refused"
    ):
        collected(made, 0, 1, report=(report := Report()))
    assert report.notes == ["skipped: sample 0 is refused", "skipped: sample 1 is refused"]


def test_an_episode_is_scored_by_the_policys_own_words():
    made = system(taken(0))
    turns = (("assistant", "said"), ("user", "told"), ("assistant", "more"))
    sent = []
    made.rewards.submit = lambda items, prompts, responses, facts: (
        sent.append((responses, facts)),
        made.rewards.waiting.append(items),
    )
    made.episodes = SimpleNamespace(
        num_asked=0,
        begin=made.scheduler.enqueue,
        advance=lambda completions, queue: [(request(0), done(0), "said told more") for _ in completions],
        skipped=list,
        spoken=lambda key: ("said\nmore", turns),
        metrics=dict,
    )
    (rollout,) = collected(made, 0).rollouts
    ((responses, (facts,)),) = sent
    assert responses == ["said\nmore"] and facts.turns == turns
    assert rollout.response_text == "said told more", "the record shows the whole conversation"


def test_an_episode_that_is_left_out_counts_as_skipped():
    made, report = system(taken(0)), Report()
    refused = [(request(1), Unscored(reason="environment broke"))]
    made.episodes = SimpleNamespace(
        num_asked=0,
        begin=made.scheduler.enqueue,
        advance=lambda completions, queue: [(request(0), done(0), "said") for _ in completions],
        skipped=lambda: [refused.pop()] if refused else [],
        spoken=lambda key: ("said", ()),
        metrics=dict,
    )
    found = collected(made, 0, 1, report=report)
    assert len(found.rollouts) == 1 and found.num_skipped == 1
    assert report.notes == ["skipped: environment broke"]
