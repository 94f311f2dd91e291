"""Generates and scores the samples of one iteration: completions stream into the reward pool.

Scoring starts with the first completion. An instance that is lost on the way is replaced here; the scheduler has
queued its samples again by then. A scheduler that dies is replaced in `take`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace

from rlhfspec.actors.actor_messages import Taken
from rlhfspec.actors.waiting.watch import OpenWait
from rlhfspec.cluster.observe.console import Reporter
from rlhfspec.cluster.run.dynamic_sampling import UsefulGroups
from rlhfspec.cluster.run.pipeline import Pipeline
from rlhfspec.cluster.run.rollout_buffer import RolloutBuffer
from rlhfspec.cluster.system.system import GeneratingSystem, Scored
from rlhfspec.core.decode_records import GenerationStats
from rlhfspec.core.errors import NodeDied, RewardError, RlhfSpecError
from rlhfspec.core.records import ResponseFacts, Reward, Rollout, SampleKey, SampleRequest, Unscored
from rlhfspec.learning.rewards.written_text import response_text
from rlhfspec.policies.scheduling.events import MoveRecord

_WAIT_S = 0.2
"How long one look at the scheduler or the reward pool may take when there is nothing new."
_MAX_SKIP_NOTES = 5
"Samples of an iteration that are named when they are skipped; the rest is counted."
_BESIDE_S = 0.05
"The same beside an update, which may end the rollout."
_ASKING_S = 0.02
"The same while environments are asked, whose answers nobody waits for."


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """The rollouts of an iteration in the order of their sample index, and what they cost."""

    rollouts: list[Rollout]
    stats: GenerationStats
    moves: tuple[MoveRecord, ...]
    "that ended in the iteration"
    planning_s: float
    "seconds the scheduler spent on deciding moves"
    generate_s: float
    "until the last completion"
    score_s: float
    "from there to the last reward that was waited for"
    num_skipped: int = 0
    "samples without a reward (`on_error: skip` of `reward` or `environment`)"
    skipped_groups: tuple[int, ...] = ()
    "the group of each of these"
    environment: dict[str, float] = field(default_factory=dict)
    "figures of its episodes; empty without an environment"


def collect(
    system: GeneratingSystem,
    requests: Sequence[SampleRequest],
    report: Reporter,
    groups: UsefulGroups | None = None,
    *,
    phase: str = "generate",
    pipeline: Pipeline | None = None,
    meanwhile: Callable[[], None] | None = None,
    awaits_rewards: Callable[[], bool] | None = None,
) -> Collected:
    """Generate and score every request; `groups` may ask for more.

    Responses that are no whole ones stay in the `pipeline`, and are not scored; what is scored or left out it is told
    at once. With it the call ends when nothing is open on the instances and `awaits_rewards` says no, and returns what
    was scored meanwhile; a later call receives the other rewards. Episodes wait for all. `meanwhile` is called all
    along.
    Raises RewardError and the like as themselves, with a `pipeline` beside an update in the next call, so that a state
    can be kept between them; InstanceLost or SchedulerLost when replacements are used up.
    """
    if pipeline is not None and system.late_failure is not None:
        raise system.late_failure
    began_s = time.perf_counter()
    moves = [*system.late_moves, *_take(system, wait_s=0.0, report=report).moves]
    system.late_moves.clear()
    before, planned_before_s = system.scheduler.stats, system.scheduler.planning_s
    episodes = system.episodes
    if episodes is None:
        system.scheduler.enqueue(tuple(requests))
    else:
        episodes.begin(requests)
    by_key = {request.key: request for request in requests}
    buffer = RolloutBuffer(max_staleness=system.config.rollout.max_staleness)
    keeps_unscored = pipeline is not None and episodes is None
    unscored: list[Scored] = []
    if pipeline is not None:
        unscored += [(r, c, response_text(system.tokenizer, c)) for r, c in pipeline.unsent()]
    num_completed, num_skipped, stats, generated_s = 0, 0, before, began_s
    skipped_groups: list[int] = []
    wait = OpenWait(
        waiter="the scheduler",
        waited_for="the generation pool",
        order="generate more tokens",
        timeout_s=system.config.cluster.order_timeout_s,
    )

    def misses_rewards() -> bool:
        if not keeps_unscored:
            return len(buffer) + num_skipped < len(by_key)
        return bool(unscored) or (awaits_rewards is not None and awaits_rewards())

    while num_completed < len(by_key) or misses_rewards():
        if meanwhile is not None:
            meanwhile()
        refused: list[tuple[SampleRequest, Unscored]] = []
        if num_completed < len(by_key):
            is_asking = episodes is not None and episodes.num_asked > 0
            soon = _ASKING_S if is_asking else _WAIT_S if meanwhile is None else _BESIDE_S
            taken = _take(system, wait_s=soon, report=report)
            if taken.completions or system.scheduler.stats.num_emitted_tokens != stats.num_emitted_tokens:
                wait.answered()
                wait.restart()
            elif is_asking or not system.generation.instances:
                # environments have limits of their own, and so has a pool without instances
                wait.restart()
            wait.look()
            if pipeline is not None and keeps_unscored:
                whole = [one for c in taken.completions if (one := pipeline.whole(c)) is not None]
                done = [(request, c, response_text(system.tokenizer, c)) for request, c in whole]
                num_completed += len(taken.completions) - len(whole)
            elif episodes is None:
                done = [(by_key[c.key], c, response_text(system.tokenizer, c)) for c in taken.completions]
            else:
                done = episodes.advance(taken.completions, system.scheduler)
                refused = episodes.skipped()
            unscored += done
            moves += taken.moves
            num_completed += len(done) + len(refused)
            stats, generated_s = system.scheduler.stats, time.perf_counter()
            if num_completed == len(by_key):
                wait.rest()
        scored: list[Rollout] = []
        if keeps_unscored and system.late_failure is not None:
            # nothing more is scored; the pipeline has them
            unscored.clear()
        else:
            _send(
                system,
                unscored,
                is_last=num_completed == len(by_key),
                batch_of=pipeline.batch_of if pipeline is not None and keeps_unscored else None,
            )
            waits = num_completed == len(by_key) and misses_rewards()
            answers = _answers(
                system,
                wait_s=_WAIT_S if waits else 0.0,
                may_fail_later=keeps_unscored and system.is_learning,
                report=report,
            )
            scored, unscorable = _receive(system, answers, buffer, by_key if pipeline is None else None)
            refused += unscorable
        # of batches that a phase only goes on with, whoever takes the batch judges (`Pipeline.take`)
        of = len(by_key) if pipeline is None else None
        skipped = _skip(refused, report, before=num_skipped, of=of)
        num_skipped += len(skipped)
        skipped_groups += skipped
        if pipeline is not None:
            _end(pipeline, scored, refused)
        if groups is not None:
            asked = [groups.scored(rollout) for rollout in scored]
            for further in asked + [groups.ended(group_id, None) for group_id in skipped]:
                by_key |= {request.key: request for request in further}
                if further:
                    wait.restart()
                if further and episodes is not None:
                    episodes.add(further)
                elif further:
                    system.scheduler.enqueue(tuple(further))
        report.progress(phase, num_completed, len(by_key))
    return Collected(
        rollouts=buffer.drain(),
        stats=stats - before,
        moves=tuple(moves),
        planning_s=system.scheduler.planning_s - planned_before_s,
        generate_s=generated_s - began_s,
        score_s=time.perf_counter() - generated_s,
        num_skipped=num_skipped,
        skipped_groups=tuple(skipped_groups),
        environment=episodes.figures() if episodes is not None else {},
    )


def receive_late(system: GeneratingSystem, pipeline: Pipeline, report: Reporter) -> tuple[list[Rollout], int]:
    """Give the pipeline the rewards that have come since a phase; these samples, and how many have none.

    Waits for nothing, and keeps a failure for the next phase, as `collect` does beside an update.
    """
    if system.late_failure is not None:
        return [], 0
    answers = _answers(system, wait_s=0.0, may_fail_later=True, report=report)
    buffer = RolloutBuffer(max_staleness=system.config.rollout.max_staleness)
    scored, refused = _receive(system, answers, buffer, None)
    _skip(refused, report, before=0, of=None)
    _end(pipeline, scored, refused)
    return scored, len(refused)


def _end(
    pipeline: Pipeline, scored: Sequence[Rollout], refused: Sequence[tuple[SampleRequest, Unscored]]
) -> None:
    """Tell the pipeline of samples that have a reward, and of those that get none."""
    for rollout in scored:
        pipeline.ended(rollout.completion.key, rollout)
    for request, _ in refused:
        pipeline.ended(request.key.sample, None)


def attend(system: GeneratingSystem, report: Reporter) -> None:
    """Look after the pool while the loop waits for something else and no sample is open; the trainer is busy.

    Raises RlhfSpecError where a sample was open after all: its completion would be lost.
    """
    taken = _take(system, wait_s=0.0, report=report, may_fetch=False)
    system.late_moves.extend(taken.moves)
    if taken.completions:
        raise RlhfSpecError(
            f"{len(taken.completions)} samples were completed while the loop waited for something else; expected none "
            "to be open then: this is a fault of the project, please report it"
        )


def _take(system: GeneratingSystem, *, wait_s: float, report: Reporter, may_fetch: bool = True) -> Taken:
    """Ask the scheduler for news; replace what was lost, let the pool grow and shrink, say what is odd."""
    taken = system.scheduler.take(wait_s)
    for line in system.scheduler.news():
        report.note(line)
    for alarm in taken.alarms:
        report.note(
            f"integrity alarm: sample {alarm.key.sample_index} from {alarm.instance} under epoch "
            f"{alarm.epoch}: {alarm.what}; the report was dropped"
        )
    for text in taken.drafter_alarms:
        report.note(f"drafter alarm, drafting suspended on {text}")
    for lost in taken.lost:
        system.generation.replace(lost)
    system.generation.look(taken, may_fetch=may_fetch)
    return taken


def _send(
    system: GeneratingSystem,
    unscored: list[Scored],
    *,
    is_last: bool,
    batch_of: Callable[[SampleKey], int] | None = None,
) -> None:
    """Send full batches; a partial one only to an idle actor or at the end. Idle actors share what there is.

    Those of the lowest `batch_of` first and by themselves: the update that needs them waits for no others.
    """
    size = system.config.reward.batch_size
    if batch_of is not None:
        unscored.sort(key=lambda one: batch_of(one[0].key))
    while unscored and ((idle := system.rewards.num_idle) or len(unscored) >= size or is_last):
        share = min(size, math.ceil(len(unscored) / max(idle, 1)))
        batch = unscored[:share]
        if batch_of is not None:
            batch = [one for one in batch if batch_of(one[0].key) == batch_of(batch[0][0].key)]
        del unscored[: len(batch)]
        texts = [text for _, _, text in batch]
        facts = [ResponseFacts.of(completion) for _, completion, _ in batch]
        if system.episodes is not None:
            # nobody is paid for what an environment said
            spoken = [system.episodes.spoken(completion.key) for _, completion, _ in batch]
            texts = [text for text, _ in spoken]
            facts = [replace(fact, turns=turns) for fact, (_, turns) in zip(facts, spoken, strict=True)]
        system.rewards.submit(batch, [request.prompt for request, _, _ in batch], texts, facts)


def _skip(
    skipped: Sequence[tuple[SampleRequest, Unscored]], report: Reporter, *, before: int, of: int | None
) -> list[int]:
    """Say why samples got no reward; their groups. Raises RewardError when it is every sample of the iteration."""
    for number, (_, unscored) in enumerate(skipped, start=before + 1):
        if number <= _MAX_SKIP_NOTES:
            report.note(f"skipped: {unscored.reason}")
    if skipped and before + len(skipped) == of:
        raise RewardError(
            f"none of the {of} samples of the iteration could be scored, and nothing is left to learn from; the last: "
            f"{skipped[-1][1].reason}"
        )
    return [request.group_id for request, _ in skipped]


def _answers(
    system: GeneratingSystem, *, wait_s: float, may_fail_later: bool, report: Reporter
) -> list[tuple[Scored, Reward | Unscored]]:
    """What the reward pool has done since the last call; a failure beside an update may be kept for the next phase."""
    try:
        return [*system.rewards.collect(wait_s=wait_s), *system.rewards.skipped()]
    except NodeDied:
        raise
    except RlhfSpecError as error:
        if not may_fail_later:
            raise
        system.late_failure = error
        report.note(
            f"no more rewards: {error}; the run ends after this iteration, so that its state can be kept"
        )
        return []


def _receive(
    system: GeneratingSystem,
    answers: list[tuple[Scored, Reward | Unscored]],
    buffer: RolloutBuffer,
    mine: Container[SampleKey] | None,
) -> tuple[list[Rollout], list[tuple[SampleRequest, Unscored]]]:
    """What was scored, into the buffer too, and what could not be; what is not `mine` is left to who passes None."""
    if mine is None:
        answers, system.late_rewards = system.late_rewards + answers, []
    received: list[Rollout] = []
    refused: list[tuple[SampleRequest, Unscored]] = []
    for answer in answers:
        (request, completion, text), reward = answer
        if mine is not None and request.key not in mine:
            system.late_rewards.append(answer)
        elif isinstance(reward, Unscored):
            refused.append((request, reward))
        else:
            rollout = Rollout(prompt=request.prompt, completion=completion, response_text=text, reward=reward)
            buffer.add(rollout, weight_version=system.target.manifest.weight_version)
            received.append(rollout)
    return received, refused
