"""What a run reads before it starts: tokenizer and prompts; read by the check, used by the loop.

Tokenising a large data set takes minutes, so it is done once.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ...core.config import Config
from ...core.errors import ConfigError
from ...core.settings.cluster import ClusterConfig
from ...core.settings.data import DataConfig
from ...core.settings.generation import SamplingConfig
from ...core.settings.run import ModelsConfig
from ...engine.weights.loading import load_tokenizer, num_token_ids
from ...learning.data.chat.chat_format import plain_note
from ...learning.data.chat.end_tokens import EndTokens, find_end_tokens, stop_strings
from ...learning.data.chat.template_time import keep_time
from ...learning.data.prompts import PromptDataset, load_prompts
from ...learning.environments.tools import tool_schemas
from ..ray_start.machine import num_cores
from .evaluation_prompts import EvaluationPrompts, split_evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """All in this process; actors get prompts with the requests and never the data set."""

    tokenizer: PreTrainedTokenizerBase
    dataset: PromptDataset
    evaluation: EvaluationPrompts | None = None
    "what is held out of `dataset` or stands beside it; None where nothing is evaluated"
    ends: EndTokens | None = None
    "of responses, where they were looked for"
    max_total_tokens: int
    "of prompt and response, that an instance must hold for any sample, those of evaluations too"

    @property
    def end_token_ids(self) -> tuple[int, ...] | None:
        """What ends responses; None where it was not looked for."""
        return None if self.ends is None else self.ends.token_ids

    def notes(self) -> list[str]:
        """What a user should know of prompts and responses before a run."""
        line = self.ends.line if self.ends is not None else None
        is_plain = self.dataset.prompts and not self.dataset.has_conversations
        plain = plain_note(self.tokenizer, self.dataset.prompts[0].token_ids) if is_plain else None
        return [*self.dataset.notes(), *filter(None, (plain, line))]


def read_tokenizer(models: ModelsConfig, template_time: str | None) -> PreTrainedTokenizerBase:
    """The run's tokenizer, which keeps its time: the target's unless the config names another. Raises ModelError."""
    name = models.tokenizer or models.target
    return keep_time(load_tokenizer(name, trust_remote_code=models.trust_remote_code), template_time)


def require_cores(cluster: ClusterConfig, **num_threads: int) -> None:
    """Refuse more threads than this machine has cores, where the run's actors are to run here.

    What nodes of a joined cluster have is known there only. Raises ConfigError.
    """
    if cluster.address or os.environ.get("RAY_ADDRESS"):
        return
    most = max(num_cores(), 2)  # 2 is a default, and slower by little on one core
    for section, wanted in num_threads.items():
        if wanted > most:
            raise ConfigError(
                f"{section}.num_threads is {wanted}, but this machine has {num_cores()} cores; expected at most "
                f"{most}: more only wait for one another"
            )


def read_inputs(config: Config, tokenizer: PreTrainedTokenizerBase | None = None) -> Inputs:
    """Read and tokenise the prompts.

    Raises ModelError, DataError, and ConfigError: more threads than cores, a stop token that is no token.
    """
    require_cores(config.cluster, engine=config.engine.num_threads, trainer=config.trainer.num_threads)
    tokenizer = tokenizer or read_tokenizer(config.models, config.run.template_time)
    num_ids = num_token_ids(tokenizer)
    for name in ("stop_token_ids", "end_token_ids"):
        unknown = [number for number in getattr(config.sampling, name) or () if number >= num_ids]
        if not unknown:
            continue
        raise ConfigError(
            f"sampling.{name} must be ids of the tokenizer, 0 to {num_ids - 1}, got {unknown[0]}; such a "
            "token is never sampled, so it would stop nothing: take it out"
        )
    if config.sampling.stop:
        stop_strings(tokenizer)  # raises where it has no texts as they are sampled
    dataset = load_prompts(
        config.data, tokenizer, seed=config.run.seed, tools=tool_schemas(config.environment)
    )
    ends = end_tokens(config.data, config.sampling, config.models.target, dataset, tokenizer)
    dataset, evaluation = split_evaluation(config, dataset, tokenizer, end_token_ids=ends.token_ids)
    return Inputs(
        tokenizer=tokenizer,
        dataset=dataset,
        evaluation=evaluation,
        ends=ends,
        max_total_tokens=config.max_first_words_tokens
        + longest_sample(dataset, evaluation, max_new_tokens=config.sampling.max_new_tokens),
    )


def longest_sample(
    dataset: PromptDataset, evaluation: EvaluationPrompts | None, *, max_new_tokens: int
) -> int:
    """Most tokens of prompt and response together, of training and evaluation."""
    evaluated = 0 if evaluation is None else evaluation.max_total_tokens
    return max(dataset.max_prompt_tokens + max_new_tokens, evaluated)


def end_tokens(
    data: DataConfig,
    sampling: SamplingConfig,
    model: str,
    dataset: PromptDataset,
    tokenizer: PreTrainedTokenizerBase,
) -> EndTokens:
    """What ends responses: as the config says, or found for its prompts. Raises DataError, ModelError."""
    if sampling.end_token_ids is not None:
        return EndTokens(sampling.end_token_ids)
    return find_end_tokens(
        data,
        tokenizer,
        model=model,
        is_chat=dataset.has_conversations,
        stop_token_ids=sampling.stop_token_ids,
    )
