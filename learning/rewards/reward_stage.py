"""The whole reward of a run: a mixture of parts, each kept under its name, then shaping."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from ...core.config import RewardConfig
from ...core.errors import ConfigError, RewardError
from ...core.records import FinishReason, Prompt, ResponseFacts, Reward, Unscored
from ...core.settings.reward import RewardPart, Scorer, ShapingConfig
from .score_request import RewardSource, ScoreRequest, groups, score_requests


class RewardStage:
    """Scores responses with every part of the config and sums them with their weights.

    Source: `reward_funcs` and `reward_weights` of TRL. A mixture keeps each part's value under the part's name, before
    its weight, and what the part itself reports under NAME/PART.
    """

    def __init__(
        self,
        config: RewardConfig,
        sources: Sequence[RewardSource],
        *,
        template_time: datetime | None = None,
    ) -> None:
        """`sources` belong to `config.scorers`, in their order; `template_time` is told to their chat templates."""
        self._config = config
        self._time = template_time
        self._parts = list(zip(config.scorers, sources, strict=True))
        self.in_groups = any(getattr(source, "in_groups", False) for source in sources)
        "whether a part looks at all samples of a prompt: they are given together, and left out together"

    @property
    def described(self) -> list[str]:
        """A line for each function of the user's: its file, and how it is called."""
        lines = [getattr(source, "described", "") for _, source in self._parts]
        return [line for line in lines if line]

    def score(
        self,
        prompts: Sequence[Prompt],
        responses: Sequence[str],
        facts: Sequence[ResponseFacts] | None = None,
    ) -> list[Reward]:
        """Score one response a prompt, in order. Raises RewardError naming the first sample that cannot be scored."""
        outcomes = self._outcomes(score_requests(prompts, responses, facts, self._time), fail=True)
        return [outcome for outcome in outcomes if isinstance(outcome, Reward)]

    def score_each(
        self,
        prompts: Sequence[Prompt],
        responses: Sequence[str],
        facts: Sequence[ResponseFacts] | None = None,
    ) -> list[Reward | Unscored]:
        """As `score`; with `reward.on_error: skip` a sample that cannot be scored has its reason instead."""
        return self.outcomes(score_requests(prompts, responses, facts, self._time))

    def outcomes(self, requests: Sequence[ScoreRequest]) -> list[Reward | Unscored]:
        """As `score_each`."""
        return self._outcomes(requests, fail=self._config.on_error == "fail")

    def _outcomes(self, requests: Sequence[ScoreRequest], *, fail: bool) -> list[Reward | Unscored]:
        if self._config.shaping.is_on and any(request.facts is None for request in requests):
            raise ConfigError(
                "reward.shaping needs each response's length and ending, and got texts alone; pass `facts`"
            )
        found: list[list[Reward | None]] = [[] for _ in requests]
        faults: dict[int, Unscored] = {}
        for scorer, source in self._parts:
            # what one part cannot score needs no other
            asked = [index for index in range(len(requests)) if index not in faults]
            num_answers = 0
            for index, outcome in zip(asked, source.outcomes([requests[i] for i in asked]), strict=False):
                num_answers += 1
                outcome = _fitting(outcome, requests[index])
                if isinstance(outcome, Reward):
                    found[index].append(_scaled(outcome, scorer))
                elif outcome.is_none and isinstance(scorer, RewardPart) and scorer.optional:
                    found[index].append(None)
                else:
                    if outcome.is_none and isinstance(scorer, RewardPart):
                        advice = f", or set optional: true in reward.parts '{scorer.name}', which then does not apply"
                        outcome = replace(outcome, reason=outcome.reason + advice)
                    if fail:
                        raise RewardError(outcome.reason + self._advice)
                    faults[index] = outcome
            if num_answers != len(asked):
                raise RewardError(
                    f"the reward function '{scorer.kind}' was given {len(asked)} responses and returned "
                    f"{num_answers} rewards; it must return one for each"
                )
        for index, request in enumerate(requests):
            if index not in faults and not any(found[index]):
                faults[index] = Unscored(
                    reason=f"no part of reward.parts applies to {request.where}: all gave None, which would count as a "
                    f"reward of 0; expected a number of one; {request.shown}; fix a function",
                    is_none=True,
                )
                if fail:
                    raise RewardError(faults[index].reason + self._advice)
        for places in groups(requests) if self.in_groups else ():
            # what was compared with the others is what the run's files hold
            first = next((faults[place] for place in places if place in faults), None)
            faults |= {} if first is None else {place: faults.get(place, first) for place in places}
        return [
            faults.get(index) or self._whole(request, found[index]) for index, request in enumerate(requests)
        ]

    @property
    def _advice(self) -> str:
        """What else helps, where it is not done already."""
        skips = self._config.on_error == "skip"
        return "" if skips else "; reward.on_error: skip leaves such a sample out of the batch"

    def _whole(self, request: ScoreRequest, rewards: list[Reward | None]) -> Reward:
        alone = None if self._config.parts else rewards[0]
        reward = alone or self._mixed(rewards)
        if request.facts is None or not self._config.shaping.is_on:
            return reward
        return shape(reward, request.facts, self._config.shaping)

    def _mixed(self, rewards: list[Reward | None]) -> Reward:
        value: list[float] = []
        parts: dict[str, float] = {}
        for part, reward in zip(self._config.parts, rewards, strict=True):
            if reward is None:  # does not apply
                continue
            value.append(part.weight * reward.value)
            parts[part.name] = reward.value
            parts |= {f"{part.name}/{name}": number for name, number in reward.parts.items()}
        pairs = zip(self._config.parts, rewards, strict=True)
        paying = [(part.weight, reward.tokens) for part, reward in pairs if reward and reward.tokens]
        columns = zip(*(tokens for _, tokens in paying), strict=True)
        weights = [weight for weight, _ in paying]
        tokens = tuple(math.fsum(map(operator.mul, weights, column)) for column in columns)
        unread = next((reward.unread for reward in rewards if reward and reward.unread), "")
        return Reward(value=math.fsum(value), parts=parts, tokens=tokens, unread=unread)


def _fitting(outcome: Reward | Unscored, request: ScoreRequest) -> Reward | Unscored:
    """The outcome; Unscored where it pays other tokens than the response has."""
    facts = request.facts
    if facts is None or isinstance(outcome, Unscored) or len(outcome.tokens) in (0, facts.num_tokens):
        return outcome
    return Unscored(
        reason=f"{request.where} has {facts.num_tokens} sampled tokens (num_tokens, the end token counts), and its "
        f"reward {len(outcome.tokens)} numbers under 'tokens'; expected one for each; {request.shown}; fix the function"
    )


def _scaled(reward: Reward, scorer: Scorer) -> Reward:
    """The part's reward by the config's mean, std and clip; untouched where they say nothing."""
    value = standardise(reward.value, scorer)
    if value == reward.value and (scorer.std == 1.0 or not reward.tokens):
        return reward
    tokens = tuple(token / scorer.std for token in reward.tokens)
    return replace(reward, value=value, parts=reward.parts | {"unscaled": reward.value}, tokens=tokens)


def soft_overlong_punishment(num_tokens: int, *, max_tokens: int, buffer_tokens: int) -> float:
    """0 up to max_tokens - buffer_tokens, from there in a line to -1 at max_tokens, -1 beyond.

    Source: Yu et al. 2025 (DAPO), equation 13.
    """
    over = num_tokens - (max_tokens - buffer_tokens)
    return -min(max(over / buffer_tokens, 0.0), 1.0)


def standardise(value: float, scorer: Scorer) -> float:
    """(value - mean) / std with the constants of the config, then kept inside `clip`."""
    value = (value - scorer.mean) / scorer.std
    if scorer.clip is not None:
        value = min(max(value, scorer.clip[0]), scorer.clip[1])
    return value


def shape(reward: Reward, facts: ResponseFacts, config: ShapingConfig) -> Reward:
    """Add what `reward.shaping` says; the terms and the value before them are parts.

    `overlong.max_tokens` must be known by now. The value stays finite where the reward was.
    """
    terms: dict[str, float] = {}
    if config.overlong is not None:
        assert config.overlong.max_tokens is not None
        punishment = soft_overlong_punishment(
            # the limit counts an environment's tokens too
            facts.num_tokens + facts.num_given_tokens,
            max_tokens=config.overlong.max_tokens,
            buffer_tokens=config.overlong.buffer_tokens,
        )
        terms["overlong"] = config.overlong.factor * punishment
    if config.length_penalty:
        terms["length"] = -config.length_penalty * facts.num_tokens
    if config.missing_eos_penalty:
        # as `missing_eos_penalty` of TRL's PPO and RLOO
        was_cut = facts.finish_reason is FinishReason.LENGTH
        terms["missing_eos"] = -config.missing_eos_penalty if was_cut else 0.0
    if config.turn_penalty:
        num_turns = sum(role == "assistant" for role, _ in facts.turns)
        terms["turns"] = -config.turn_penalty * max(0, num_turns - 1)
    if not terms:
        return reward
    value = math.fsum([reward.value, *terms.values()])
    return replace(reward, value=value, parts=reward.parts | {"unshaped": reward.value} | terms)
