"""Plays the episodes of an iteration: turns from the instances to the environments, answers back as the next turns.

Only what has ended leaves: one completion a sample, with everything that was said, for rewards and learner.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ...actors.remote.remote import Handle
from ...actors.workers.environment_actors import Answer, EnvironmentActor, EnvironmentPool, describe
from ...core.config import DataConfig, EnvironmentConfig
from ...core.errors import EpisodeError
from ...core.records import (
    Completion,
    FinishReason,
    Prompt,
    Reward,
    SampleKey,
    SampleRequest,
    Stream,
    Unscored,
)
from ...learning.data.chat.messages import Messages
from ...learning.data.chat.written_text import response_text, written_text
from ...learning.data.prompt_tokens import read_template
from ...learning.environments.environment_protocol import (
    Step,
    closed,
    environment_maker,
    is_raw,
    scores_cut,
    stop_texts,
)
from ...learning.environments.episode import Episode, EpisodeLimits
from ...learning.environments.observations import Given, ObservationRenderer, ending_with
from ...learning.environments.tools import call_parser
from ..plan.run_plan import RunPlan
from ..plan.topology import PlacementContext, actor_options

Ended = tuple[SampleRequest, Completion, str]
"An episode that is over: its request, the whole completion, the text of it."
Asked = tuple[Episode, Completion | None]
"What an environment is asked about: the turn that has ended, or None to begin."


class Episodes:
    """All episodes of a run; those of one iteration end before the next begins."""

    def __init__(
        self,
        settings: EnvironmentConfig,
        tokenizer: PreTrainedTokenizerBase,
        pool: EnvironmentPool[Asked],
        data: DataConfig,
        evaluation_data: DataConfig | None = None,
        *,
        note: Callable[[str], None] = lambda text: None,
        gives_rewards: bool = True,
    ) -> None:
        """The prompts are of `data`, those of evaluations of data of their own, if any.

        `gives_rewards`: what steps give is the reward; else `note` hears, once, of steps that give any.

        Raises ConfigError: there is no such environment.
        """
        self._tokenizer, self._pool, self._note = tokenizer, pool, note
        self._settings, self._may_give = settings, gives_rewards
        example = environment_maker(settings)()
        self._scores_cut = scores_cut(example)
        self._renderers = {
            stream: ObservationRenderer(
                tokenizer,
                max_tokens=settings.max_observation_tokens,
                raw=is_raw(example),
                chat_template=read_template(source.chat_template, tokenizer),
                chat_template_kwargs=source.chat_template_kwargs,
            )
            for stream, source in {
                **dict.fromkeys(Stream, data),
                Stream.EVAL: evaluation_data or data,
            }.items()
        }
        self._limits = EpisodeLimits(
            max_turns=settings.max_turns,
            max_turn_tokens=settings.max_turn_tokens,
            stop_token_ids=ending_with(tokenizer, stop_texts(example)),
        )
        closed(example)
        self._cut: dict[SampleKey, Completion] = {}
        "whole completions that wait for their last score"
        self._open: dict[SampleKey, Episode] = {}
        self._rewards: dict[SampleKey, Reward] = {}
        self._spoken: dict[SampleKey, tuple[str, Messages]] = {}
        self._skipped: list[tuple[SampleRequest, Unscored]] = []
        self._num_ended = self._num_turns = self._num_failed = self._num_given = self._num_tokens = 0
        self._counts = Counter[str]()

    @property
    def num_asked(self) -> int:
        """Turns that environments are at."""
        return self._pool.num_asked

    def check(self, *, timeout_s: float) -> None:
        """Let every actor make an environment. Raises what that raises."""
        self._pool.check(timeout_s=timeout_s)

    def begin(self, requests: Sequence[SampleRequest]) -> None:
        """Begin an iteration's episodes: their first turns are asked for as environments are reset."""
        self._rewards.clear()
        self._spoken.clear()
        self._num_ended = self._num_turns = self._num_failed = self._num_given = self._num_tokens = 0
        self._counts.clear()
        for renderer in self._renderers.values():
            renderer.num_cut = 0
        self.add(requests)

    def add(self, requests: Sequence[SampleRequest]) -> None:
        """Begin further episodes of the same iteration."""
        for request in requests:
            episode = self._open[request.key] = Episode(request, self._limits)
            self._pool.ask((episode, None), request.key, request.prompt, ())

    def advance(
        self, completions: Sequence[Completion], enqueue: Callable[[tuple[SampleRequest, ...]], None]
    ) -> list[Ended]:
        """Take turns that have ended, enqueue those that follow; return the episodes that are over.

        Waits for nothing. Raises EpisodeError where `environment.on_error` is fail, and
        what the pool raises.
        """
        for completion in completions:
            episode = self._open[completion.key.sample]
            stopped = completion.finish_reason is FinishReason.STOP
            episode.say(written_text(self._tokenizer, episode.new_tokens(completion), stopped=stopped))
            request = episode.request
            self._pool.ask((episode, completion), request.key, episode.prompt, tuple(episode.responses))
        ended: list[Ended] = []
        following: list[SampleRequest] = []
        for (episode, completion), answer in self._pool.collect(wait_s=0.0):
            try:
                then = self._then(episode, completion, answer)
            except EpisodeError as error:
                if self._settings.on_error != "skip":
                    raise
                self._skip(episode, error)
                continue
            if isinstance(then, SampleRequest):
                following.append(then)
            elif then is not None:
                ended.append(self._end(episode, then))
        if following:
            enqueue(tuple(following))
        return ended

    def skipped(self) -> list[tuple[SampleRequest, Unscored]]:
        """Return what has been left out since the last call (`environment.on_error: skip`), and why."""
        skipped, self._skipped = self._skipped, []
        return skipped

    def reward(self, key: SampleKey) -> Reward:
        """Return what an ended episode's environment gave: the sum over its steps."""
        return self._rewards[key]

    def spoken(self, key: SampleKey) -> tuple[str, Messages]:
        """Return the policy's own words in an ended episode, and who said what since the prompt."""
        return self._spoken[key]

    def metrics(self) -> dict[str, float]:
        """For `metrics.jsonl`, of the iteration that `begin` began."""
        return {
            "environment/turns_mean": self._num_turns / max(self._num_ended, 1),
            "environment/given_token_share": self._num_given / max(self._num_tokens, 1),
            "environment/num_cut_observations": float(sum(one.num_cut for one in self._renderers.values())),
            "environment/num_failed": float(self._num_failed),
            **{f"rollout/{name}": count for name, count in self._counts.items()},
        }

    def _then(
        self, episode: Episode, completion: Completion | None, answer: Answer | EpisodeError
    ) -> SampleRequest | Completion | None:
        """What follows an answer: a turn, the whole episode, or None: a further answer, which scores what was cut."""
        if completion is None:
            return self._first(episode, answer)
        key = episode.request.key
        whole = self._cut.pop(key, None)
        if whole is None:
            then = self._after(episode, completion, answer)
            is_cut = isinstance(answer, Step) and not answer.done and self._scores_cut
            if isinstance(then, SampleRequest) or not is_cut:
                return then
            self._cut[key] = then
            self._pool.ask((episode, completion), key, episode.prompt, tuple(episode.responses), is_cut=True)
            return None
        if isinstance(answer, EpisodeError):
            return self._failed(episode, whole, answer)
        assert isinstance(answer, Step)
        self._take(episode, answer)
        episode.rewards[-1] += answer.reward
        return whole

    def _skip(self, episode: Episode, error: EpisodeError) -> None:
        key = episode.request.key
        del self._open[key]
        self._pool.forget(key)
        self._num_failed += 1
        self._skipped.append((episode.request, Unscored(reason=str(error))))

    def _first(self, episode: Episode, answer: Answer | EpisodeError) -> SampleRequest:
        if isinstance(answer, EpisodeError):
            # without a beginning there is nothing that could end as it is
            raise answer
        prompt: Prompt | None = None
        if isinstance(answer, str) and answer:
            prompt = self._renderers[episode.request.key.stream].with_text(episode.request.prompt, answer)
        return episode.first(prompt)

    def _after(
        self, episode: Episode, completion: Completion, answer: Answer | EpisodeError
    ) -> SampleRequest | Completion:
        try:
            if isinstance(answer, EpisodeError):
                raise answer
            assert isinstance(answer, Step)
            given = self._given(episode, completion, answer)
        except EpisodeError as error:
            return self._failed(episode, completion, error)
        self._take(episode, answer)
        return episode.goes_on(
            completion, given.token_ids, reward=answer.reward, done=answer.done, messages=given.messages
        )

    def _failed(self, episode: Episode, completion: Completion, error: EpisodeError) -> Completion:
        """The episode as it is. Raises the error where that is not to be."""
        if self._settings.on_error != "end":
            raise error
        self._num_failed += 1
        self._note(f"{error}; the episode ends there")
        return episode.whole(completion, FinishReason.LENGTH)

    def _take(self, episode: Episode, answer: Step) -> None:
        """Add a step's parts."""
        episode.add_parts(answer.parts)
        self._counts.update(answer.counts)
        if not self._may_give and (answer.reward or answer.parts):
            self._may_give = True  # told
            self._note(
                f"environment {self._settings.kind} gives rewards or parts of them, and they are dropped: rewards are "
                "what reward.kind or reward.parts name; set reward.kind: environment, or let steps give 0"
            )

    def _given(self, episode: Episode, completion: Completion, answer: Step) -> Given:
        request = episode.request
        try:
            return self._renderers[request.key.stream].give(
                answer.observation, prompt=request.prompt, last_token=int(completion.token_ids[-1])
            )
        except EpisodeError as error:
            where = describe(self._settings, request.key, len(episode.responses))
            raise EpisodeError(f"{where}: {error}") from error

    def _end(self, episode: Episode, completion: Completion) -> Ended:
        key = completion.key
        del self._open[key]
        self._pool.forget(key)
        self._num_ended += 1
        self._num_turns += episode.num_turns
        self._num_tokens += completion.num_tokens
        self._num_given += int((~completion.is_sampled).sum())
        self._spoken[key] = episode.spoken, tuple(episode.turns)
        self._rewards[key] = Reward(
            value=float(sum(episode.rewards)),
            parts=episode.parts | {"num_turns": float(episode.num_turns)},
            tokens=episode.token_rewards(completion.num_sampled_tokens),
        )
        return episode.request, completion, response_text(self._tokenizer, completion)


def start_episodes(plan: RunPlan, context: PlacementContext, note: Callable[[str], None]) -> Episodes | None:
    """Start the actors that the plan's environment asks for; None where it names no environment."""
    settings, cluster, places = plan.config.environment, plan.config.cluster, plan.topology.environment
    if settings.kind is None:
        return None
    parser = call_parser(settings, plan.config.data, plan.inputs.tokenizer)

    def make(actor: int, number: int) -> Handle:
        where = places[actor]
        name = f"{where.name}-r{number}" if number else where.name
        own = {"name": name, "max_concurrency": settings.concurrency}
        options = actor_options(where, context) | own
        return EnvironmentActor.options(**options).remote(name, settings, os.getcwd(), parser)

    pool: EnvironmentPool[Asked] = EnvironmentPool(
        [make(actor, 0) for actor in range(len(places))],
        settings,
        order_timeout_s=cluster.order_timeout_s,
        heartbeat_timeout_s=cluster.silence_limit_s(settings.timeout_s),
        make=make,
        max_restarts=cluster.max_instance_restarts,
        note=note,
    )
    data, evaluation = plan.config.data, plan.config.evaluation.data
    gives = plan.config.reward.kind == "environment"
    return Episodes(settings, plan.inputs.tokenizer, pool, data, evaluation, note=note, gives_rewards=gives)
