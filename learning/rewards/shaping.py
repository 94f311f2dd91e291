"""Shaping: what is taken off a reward for a response's length and ending. Pure functions of numbers."""

from __future__ import annotations

import math
from dataclasses import replace

from rlhfspec.core.records import FinishReason, ResponseFacts, Reward
from rlhfspec.core.settings.reward import Scorer, ShapingConfig


def soft_overlong_punishment(num_tokens: int, *, max_tokens: int, buffer_tokens: int) -> float:
    """0 up to max_tokens - buffer_tokens, from there in a line to -1 at max_tokens, -1 beyond.

    Source: Yu et al. 2025 (DAPO), equation 13.
    """
    over = num_tokens - (max_tokens - buffer_tokens)
    return -min(max(over / buffer_tokens, 0.0), 1.0)


def length_penalty(num_tokens: int, *, per_token: float) -> float:
    """Minus `per_token` for each response token."""
    return -per_token * num_tokens


def missing_eos(finish_reason: FinishReason, *, penalty: float) -> float:
    """Minus `penalty` for a response that was cut. As `missing_eos_penalty` of TRL's PPO and RLOO."""
    return -penalty if finish_reason is FinishReason.LENGTH else 0.0


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
        terms["length"] = length_penalty(facts.num_tokens, per_token=config.length_penalty)
    if config.missing_eos_penalty:
        terms["missing_eos"] = missing_eos(facts.finish_reason, penalty=config.missing_eos_penalty)
    if not terms:
        return reward
    value = math.fsum([reward.value, *terms.values()])
    return replace(reward, value=value, parts=reward.parts | {"unshaped": reward.value} | terms)
