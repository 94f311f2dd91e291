"""The reward of a run before it starts: what is wrong with it, what it needs, what other sections tell it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase

from cluster.preflight.param_count import count_params
from core.config import Config, RewardConfig
from core.records import Prompt
from engine.weights.loading import load_hf_config, load_tokenizer
from learning.rewards.format_note import format_notes
from learning.rewards.reward_function import build_reward
from learning.rewards.reward_model import require_one_output

_LOOKED_AT = 4096
"Prompts of which it is seen what they begin the turn with."


@dataclass(frozen=True, slots=True)
class CheckedReward:
    """What is known of a reward before it scores."""

    num_params: int | None
    "of all reward models in the pool; None: there are only rules"
    functions: tuple[str, ...]
    "a line for each of the user's: its file, and how it is called"


def check_reward(reward: RewardConfig, fields: Sequence[str] | None = ()) -> CheckedReward:
    """Look at every part of a reward; `fields` are the columns that a function may ask for by name, None: any.

    Raises ModelError for a model, ConfigError for a function that cannot be used. A reward server is asked at the
    start of the run, from where it is used.
    """
    num_params, functions = None, []
    for scorer in reward.scorers:
        if scorer.kind == "model" and scorer.model is not None:
            name = scorer.model
            config = load_hf_config(name)
            require_one_output(name, config)
            load_tokenizer(name)
            params = count_params(config, AutoModelForSequenceClassification, name)
            num_params = (num_params or 0) + params
        elif scorer.kind not in ("serve", "environment"):
            alone = RewardConfig(kind=scorer.kind, pattern=scorer.pattern)
            functions += build_reward(alone, fields=fields).described
    return CheckedReward(num_params, tuple(functions))


def pattern_notes(
    reward: RewardConfig, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase
) -> list[str]:
    """Why a pattern of kind format can never match behind these prompts; of many, the first are looked at."""
    patterns = [scorer.pattern for scorer in reward.scorers if scorer.kind == "format" and scorer.pattern]
    if not patterns:
        return []
    prefills = {prompt.prefill for prompt in prompts[:_LOOKED_AT]}
    return [note for pattern in patterns for note in format_notes(pattern, prefills, tokenizer)]


def reward_columns(config: Config) -> tuple[str, ...]:
    """The columns that every prompt of a run has for reward functions."""
    sources = [*config.data.each_source()]
    if config.evaluation.every and config.evaluation.data is not None:
        sources += config.evaluation.data.each_source()
    named = [source.reward_fields for source in sources]
    return tuple(name for name in named[0] if all(name in other for other in named))


def resolved_reward(config: Config) -> RewardConfig:
    """The reward section with what it takes from others: the longest response."""
    shaping = config.reward.shaping
    if shaping.overlong is None or shaping.overlong.max_tokens is not None:
        return config.reward
    overlong = shaping.overlong.model_copy(update={"max_tokens": config.sampling.max_new_tokens})
    return config.reward.model_copy(update={"shaping": shaping.model_copy(update={"overlong": overlong})})


def scoring_timeout_s(config: Config) -> float:
    """How long one batch may take: functions may hang at every call, a server is asked again and again."""
    reward, limit = config.reward, config.cluster.order_timeout_s
    if reward.calls_functions:
        # `async` ones are awaited together first, then one by one where one of them hung
        limit += (1 + reward.batch_size) * reward.timeout_s
    if any(scorer.kind == "serve" for scorer in reward.scorers):
        server = reward.server
        limit += (server.retries + 1) * server.timeout_s + server.backoff_s * 2**server.retries
    return limit
