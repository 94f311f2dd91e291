"""Episodes of several turns on one engine, environments beside it in the same thread: nothing waits for an actor.

The bookkeeping is that of our own runs (`learning.environments.episode`), so a sample has the same tokens in both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..core.config import EnvironmentConfig
from ..core.records import Completion, FinishReason, SampleKey, SampleRequest
from ..engine.engine import Engine
from ..learning.data.chat.tool_calls import CallParser
from ..learning.data.chat.written_text import written_text
from ..learning.environments.environment_protocol import (
    Environment,
    begun,
    checked_step,
    closed,
    environment_maker,
    is_raw,
    scores_cut,
    stop_texts,
)
from ..learning.environments.episode import Episode, EpisodeLimits
from ..learning.environments.observations import ObservationRenderer, ending_with

Ended = tuple[np.ndarray, Completion, float]
"Prompt ids with what the environment's reset added, the whole completion, the sum of the steps' rewards."


class EngineEpisodes:
    """Runs episodes; one environment an episode."""

    def __init__(
        self,
        settings: EnvironmentConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: dict | None = None,
    ) -> None:
        """Raises ConfigError: there is no such environment."""
        parser = CallParser(tokenizer, chat_template=chat_template) if settings.kind == "tools" else None
        self._make, self._tokenizer = environment_maker(settings, parser), tokenizer
        example = self._make()
        self._renderer = ObservationRenderer(
            tokenizer,
            max_tokens=settings.max_observation_tokens,
            raw=is_raw(example),
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
        )
        self._limits = EpisodeLimits(
            max_turns=settings.max_turns,
            max_turn_tokens=settings.max_turn_tokens,
            stop_token_ids=ending_with(tokenizer, stop_texts(example)),
        )

    def run(self, engine: Engine, requests: Sequence[SampleRequest]) -> list[Ended]:
        """Return the episodes' ends in the order of the requests; whatever an environment raises leaves no sample.

        Raises EpisodeError for a step or an observation that is none, and as `Engine.submit` and `Engine.step`.
        """
        open_now: dict[SampleKey, tuple[Episode, Environment]] = {}
        ended: dict[SampleKey, Ended] = {}
        try:
            for request in requests:
                episode, environment = Episode(request, self._limits), self._make()
                open_now[request.key] = episode, environment
                added = begun(environment, request.prompt, request.key)
                longer = self._renderer.with_text(request.prompt, added) if added else None
                engine.submit(episode.first(longer))
            for completion in _steps(engine):
                episode, environment = open_now[completion.key.sample]
                then = self._after(episode, environment, completion)
                if isinstance(then, SampleRequest):
                    engine.submit(then)
                else:
                    closed(environment)
                    ended[then.key] = episode.request.prompt.token_ids, then, float(sum(episode.rewards))
        except BaseException:
            engine.cancel_all()
            raise
        return [ended[request.key] for request in requests]

    def _after(
        self, episode: Episode, environment: Environment, completion: Completion
    ) -> SampleRequest | Completion:
        """What follows a turn: the next one's request, or the whole completion."""
        stopped = completion.finish_reason is FinishReason.STOP
        text = written_text(self._tokenizer, episode.new_tokens(completion), stopped=stopped)
        episode.say(text)
        step = checked_step(environment.step(text))
        given = self._renderer.give(
            step.observation, prompt=episode.request.prompt, last_token=int(completion.token_ids[-1])
        )
        then = episode.goes_on(
            completion, given.token_ids, reward=step.reward, done=step.done, messages=given.messages
        )
        if isinstance(then, Completion) and not step.done and scores_cut(environment):
            ending: Any = environment
            episode.rewards[-1] += checked_step(ending.score_cut()).reward
        return then


def _steps(engine: Engine) -> Iterator[Completion]:
    while engine.has_work:
        yield from engine.step()
