"""The reward of a run before it starts: what is wrong with it, what it needs, what other sections tell it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase

from ...core.errors import ConfigError, DataError, InputError, one_line
from ...core.records import Prompt
from ...core.settings.data import DataConfig
from ...core.settings.environment import EnvironmentConfig
from ...core.settings.evaluation import EvaluationConfig
from ...core.settings.reward import RewardConfig, Scorer
from ...engine.weights.loading import load_hf_config, load_tokenizer
from ...learning.data.chat.scored_text import format_notes
from ...learning.environments.environment_protocol import Environment, prompt_check
from ...learning.rewards.code_reward import CodeReward, row_tests
from ...learning.rewards.judge import MOST_AT_ONCE, Judge
from ...learning.rewards.reward_function import build_reward
from ...learning.rewards.reward_model import require_one_output
from ...learning.tasks.gsm8k import reference_number
from .model_files import count_params

_LOOKED_AT = 4096
"Prompts of which it is seen what they begin the turn with."


@dataclass(frozen=True, slots=True)
class CheckedReward:
    """What is known of a reward before it scores."""

    num_params: int | None
    "of all reward models in the pool; None: there are only rules"
    functions: tuple[str, ...]
    "a line for each of the user's: its file, and how it is called"
    in_groups: bool = False
    "one of them is given all samples of a prompt together"


def check_reward(
    reward: RewardConfig, fields: Sequence[str] | None = (), first: Prompt | None = None
) -> CheckedReward:
    """Look at every part of a reward; `fields` are the columns that a function may ask for by name, None: any.

    A judge is asked one question of the `first` prompt, a sandbox's server runs one program, another reward server is
    asked at the start of the run, from where it is used. Raises ModelError for a model, ConfigError for a function that
    cannot be used, RewardServerLost for a judge or a sandbox.
    """
    num_params, functions, in_groups = None, [], False
    for scorer in reward.scorers:
        if scorer.kind == "model" and scorer.model is not None:
            name = scorer.model
            config = load_hf_config(name)
            require_one_output(name, config)
            load_tokenizer(name)
            params = count_params(config, AutoModelForSequenceClassification, name)
            num_params = (num_params or 0) + params
        elif scorer.kind not in ("serve", "environment"):
            column = scorer.code.tests_from
            if column is not None and fields is not None and column not in fields:
                raise ConfigError(
                    f"reward.code.tests_from {column} is no column that rows have here; add it to data.reward_fields "
                    "(of the evaluation, too)"
                )
            own = {name: getattr(scorer, name) for name in Scorer.model_fields}
            alone = RewardConfig(**own, cache=reward.cache, timeout_s=reward.timeout_s)
            stage = build_reward(alone, fields=fields)
            functions, in_groups = functions + stage.described, in_groups or stage.in_groups
            if scorer.kind == "judge" and first is not None:
                functions.append(Judge(scorer, reward.server, Path(reward.cache)).tried(first))
            if scorer.url and scorer.kind == "code" and first is not None:
                functions.append(CodeReward(scorer, alone).tried())
    return CheckedReward(num_params, tuple(functions), in_groups)


def pattern_notes(
    reward: RewardConfig, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase
) -> list[str]:
    """Why a pattern of kind format can never match behind these prompts; of many, the first are looked at."""
    patterns = [scorer.pattern for scorer in reward.scorers if scorer.kind == "format" and scorer.pattern]
    if not patterns:
        return []
    prefills = {prompt.prefill for prompt in prompts[:_LOOKED_AT]}
    return [note for pattern in patterns for note in format_notes(pattern, prefills, tokenizer)]


def reward_columns(data: DataConfig, evaluation: EvaluationConfig) -> tuple[str, ...]:
    """The columns that every prompt of a run has for reward functions."""
    sources = [*data.each_source()]
    if evaluation.every and evaluation.data is not None:
        sources += evaluation.data.each_source()
    named = [source.reward_fields for source in sources]
    return tuple(name for name in named[0] if all(name in other for other in named))


def resolved_reward(reward: RewardConfig, max_new_tokens: int) -> RewardConfig:
    """The reward section with the longest response, where shaping leaves that to `sampling`."""
    shaping = reward.shaping
    if shaping.overlong is None or shaping.overlong.max_tokens is not None:
        return reward
    overlong = shaping.overlong.model_copy(update={"max_tokens": max_new_tokens})
    return reward.model_copy(update={"shaping": shaping.model_copy(update={"overlong": overlong})})


def scoring_timeout_s(reward: RewardConfig, order_timeout_s: float, group_size: int = 1) -> float:
    """How long one batch may take: functions may hang at every call, a server is asked again and again.

    `group_size`: the most samples of a prompt, which may be scored together whatever `reward.batch_size` is.
    """
    limit = order_timeout_s
    if reward.calls_functions:
        # `async` ones are awaited together first, then one by one where one of them hung
        limit += (1 + max(reward.batch_size, group_size)) * reward.timeout_s
    asks = any(part.kind == "serve" or (part.kind == "code" and part.url) for part in reward.scorers)
    server, rounds = reward.server, int(asks)
    for judge in (scorer for scorer in reward.scorers if scorer.kind == "judge"):
        questions = max(reward.batch_size, group_size) * (group_size if judge.scope == "group" else 1)
        rounds += -(-questions // MOST_AT_ONCE)
    return limit + rounds * ((server.retries + 1) * server.timeout_s + server.backoff_s * 2**server.retries)


def require_references(
    reward: RewardConfig,
    settings: EnvironmentConfig,
    environment: Environment | None,
    prompts: Iterable[Prompt],
) -> None:
    """Raise InputError for the first prompt that would end the run, saying how many there are.

    Where `reward.on_error` or `environment.on_error` lets the run go on, such prompts are nobody's fault.
    """
    checks: list[Callable[[Prompt], object]] = []
    if environment is not None and settings.on_error == "fail":
        found = prompt_check(environment)
        checks += [] if found is None else [found]
    if reward.on_error == "fail" and any(part.kind == "gsm8k" for part in reward.scorers):
        checks.append(reference_number)
    if reward.on_error == "fail":
        checks += [partial(row_tests, part) for part in reward.scorers if part.kind == "code"]
    faults = [fault for prompt in prompts if (fault := _fault(checks, prompt))] if checks else []
    if not faults:
        return
    first, others = faults[0], len(faults) - 1
    said = str(first)
    if not isinstance(first, InputError):
        said = f"environment {settings.kind}: {type(first).__name__}: {one_line(said)[:200]}; fix the data"
    kind = type(first) if isinstance(first, InputError) else DataError
    raise kind(said + (f" (and {others} more prompts like it)" if others else "")) from first


def _fault(checks: Iterable[Callable[[Prompt], object]], prompt: Prompt) -> Exception | None:
    for check in checks:
        try:
            check(prompt)
        except Exception as error:  # the user's code may raise anything
            return error
    return None
