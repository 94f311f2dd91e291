"""The bookkeeping of one episode: turns in, requests for the next turn or the whole completion out.

A turn is a sample of its own for scheduler and instances, with the key of the episode and a number. Its request holds
the first prompt and everything since, so noise, which depends on key, first prompt and absolute position, is that of
one long response: tokens are a pure function of weights, first prompt, key and what the environment says (design 3.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Int

from ...core.records import Completion, FinishReason, History, Prompt, SampleRequest
from ..data.chat.messages import Messages


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """When turns and episodes end, besides by what is said in them."""

    max_turns: int
    max_turn_tokens: int | None
    stop_token_ids: tuple[int, ...] = ()
    "that end a turn, besides the sampling's own"


class Episode:
    """One sample's turns."""

    def __init__(self, request: SampleRequest, limits: EpisodeLimits) -> None:
        self.request = request
        "as asked for: turn 0, its sampling over the whole episode"
        self.prompt = request.prompt
        "the data set's, which an environment is reset with; that of `request` holds what its reset added"
        self.responses: list[str] = []
        "the text of each turn so far"
        self.turns: list[tuple[str, str]] = []
        "(role, content) since the prompt, the assistant's and the environment's"
        self.rewards: list[float] = []
        self._paid_at: list[int] = []
        "the last sampled token of the turn that each is of"
        self.parts: dict[str, float] = {}
        "sums over the steps"
        self._spoken: list[str] = []
        self._limits = limits
        self._begins = 0
        self._was_given = False

    @property
    def num_turns(self) -> int:
        """Turns that the policy has taken."""
        return len(self.responses)

    @property
    def spoken(self) -> str:
        """The policy's own words: a line of its own behind each observation."""
        return "\n".join(self._spoken)

    def say(self, text: str) -> None:
        """Take the text of a turn."""
        # nothing was given in between: the policy went on where it stopped
        if self._spoken and not self._was_given:
            self._spoken[-1] += text
        else:
            self._spoken.append(text)
        self.responses.append(text)
        self._add("assistant", text)

    def add_parts(self, parts: Mapping[str, float]) -> None:
        """Add a step's parts of the reward to those so far."""
        for name, value in parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + value

    def token_rewards(self, num_tokens: int) -> tuple[float, ...]:
        """Each turn's reward on its last sampled token, of so many; empty: all is paid at the end."""
        paid = [0.0] * num_tokens
        for place, reward in zip(self._paid_at, self.rewards, strict=True):
            paid[place] += reward
        return tuple(paid) if any(paid[:-1]) else ()

    def first(self, prompt: Prompt | None = None) -> SampleRequest:
        """Return the request of the first turn; `prompt` takes the place of the one asked for."""
        if prompt is not None:
            self.request = replace(self.request, prompt=prompt)
        return self._turn(0, None)

    def new_tokens(self, completion: Completion) -> Int[np.ndarray, " T"]:
        """Return what the policy has sampled in the turn that a completion ends."""
        return completion.token_ids[self._begins :]

    def goes_on(
        self,
        completion: Completion,
        observation: Int[np.ndarray, " T"],
        *,
        reward: float,
        done: bool,
        messages: Messages = (),
    ) -> SampleRequest | Completion:
        """Take the environment's answer to a turn; return the next turn's request, or the episode's completion.

        One that is not done ends as LENGTH where turns or tokens are used up; the last answer is not shown then. So
        does one whose last turn was cut: an environment cannot tell that from an end.
        """
        self.rewards.append(reward)
        self._paid_at.append(completion.num_sampled_tokens - 1)
        most = self.request.sampling.max_new_tokens
        num_tokens = completion.num_tokens + len(observation)
        if done or self.num_turns >= self._limits.max_turns or num_tokens >= most:
            is_cut = not done or completion.finish_reason is not FinishReason.STOP
            return self.whole(completion, FinishReason.LENGTH if is_cut else FinishReason.STOP)
        self._begins = num_tokens
        self._was_given = len(observation) > 0
        for role, content in messages:
            self._add(role, content)
        nothing = np.zeros(len(observation), dtype=np.float32)
        depths = completion.draft_depths
        history = replace(
            completion.as_history(),
            token_ids=np.concatenate([completion.token_ids, observation]),
            sampled=np.concatenate([completion.is_sampled, np.zeros(len(observation), dtype=bool)]),
            policy_logprobs=np.concatenate([completion.policy_logprobs, nothing]),
            sampling_logprobs=np.concatenate([completion.sampling_logprobs, nothing]),
            draft_depths=None if depths is None else np.pad(depths, (0, len(observation))),
        )
        return self._turn(self.num_turns, history)

    def whole(self, completion: Completion, reason: FinishReason) -> Completion:
        """Return the completion of the episode, from that of its last turn."""
        return replace(completion, key=self.request.key, sampled=completion.is_sampled, finish_reason=reason)

    def _add(self, role: str, content: str) -> None:
        if self.turns and self.turns[-1][0] == role == "assistant":
            content = self.turns.pop()[1] + content
        self.turns.append((role, content))

    def _turn(self, number: int, history: History | None) -> SampleRequest:
        sampling, limits = self.request.sampling, self._limits
        most = sampling.max_new_tokens
        if limits.max_turn_tokens is not None:
            before = len(history.token_ids) if history is not None else 0
            most = min(most, before + limits.max_turn_tokens)
        stops = dict.fromkeys((*sampling.stop_token_ids, *limits.stop_token_ids))
        return replace(
            self.request,
            key=replace(self.request.key, turn=number),
            sampling=replace(sampling, max_new_tokens=most, stop_token_ids=tuple(stops)),
            history=history,
            keeps_caches=number + 1 < limits.max_turns,
        )
