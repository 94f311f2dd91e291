"""What a run reads before it starts: tokenizer and prompts; read by the check, used by the loop.

Tokenising a large data set takes minutes, so it is done once.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from rlhfspec.cluster.placement.machine import num_cores
from rlhfspec.cluster.preflight.evaluation_prompts import EvaluationPrompts, split_evaluation
from rlhfspec.core.config import Config
from rlhfspec.core.errors import ConfigError
from rlhfspec.core.settings.cluster import ClusterConfig
from rlhfspec.core.settings.run import ModelsConfig
from rlhfspec.engine.weights.loading import load_tokenizer, num_token_ids
from rlhfspec.learning.data.end_tokens import EndTokens, find_end_tokens
from rlhfspec.learning.data.prompts import PromptDataset, load_prompts
from rlhfspec.learning.data.template_time import keep_time
from rlhfspec.profiles.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """All in this process; actors get prompts with the requests and never the data set."""

    tokenizer: PreTrainedTokenizerBase
    dataset: PromptDataset
    evaluation: EvaluationPrompts | None = None
    "what is held out of `dataset` or stands beside it; None where nothing is evaluated"
    ends: EndTokens | None = None
    "of responses, where they were looked for"
    profile: Profile | None = None
    "what the policy `goodput` goes by"
    object_store_bytes: int | None = None
    "of a local cluster, where the check has reckoned it"
    gpu_bytes: int = 0
    "what an instance takes of its GPU, where the check has reckoned it; 0: it is not asked"
    trainer_gpu_bytes: int = 0
    "the same of a trainer"

    def ending(self, config: Config) -> Config:
        """The config with the end tokens that were found."""
        return config if self.ends is None else _ending(config, self.ends)

    def notes(self) -> list[str]:
        """What a user should know of prompts and responses before a run."""
        line = self.ends.line if self.ends is not None else None
        return [*self.dataset.notes(), *([line] if line is not None else [])]

    def max_total_tokens(self, config: Config) -> int:
        """Tokens of prompt and response that an instance must hold for any sample, those of evaluations too."""
        trained = self.dataset.max_prompt_tokens + config.sampling.max_new_tokens
        evaluated = self.evaluation.max_total_tokens if self.evaluation else 0
        return max(trained, evaluated) + config.max_first_words_tokens


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
    dataset = load_prompts(config.data, tokenizer, seed=config.run.seed)
    ends = end_tokens(config, dataset, tokenizer)
    # other data may have another chat format
    asked = config if config.evaluation.data is not None else _ending(config, ends)
    dataset, evaluation = split_evaluation(asked, dataset, tokenizer)
    return Inputs(tokenizer=tokenizer, dataset=dataset, evaluation=evaluation, ends=ends)


def end_tokens(config: Config, dataset: PromptDataset, tokenizer: PreTrainedTokenizerBase) -> EndTokens:
    """What ends responses: as the config says, or found for its prompts. Raises DataError, ModelError."""
    sampling = config.sampling
    if sampling.end_token_ids is not None:
        return EndTokens(sampling.end_token_ids)
    return find_end_tokens(
        config.data,
        tokenizer,
        model=config.models.target,
        is_chat=dataset.has_conversations,
        stop_token_ids=sampling.stop_token_ids,
    )


def _ending(config: Config, ends: EndTokens) -> Config:
    sampling = config.sampling.model_copy(update={"end_token_ids": ends.token_ids})
    return config.model_copy(update={"sampling": sampling})
