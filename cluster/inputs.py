"""What a run reads before it starts: tokenizer and prompts; read by the check, used by the loop.

Tokenising a large data set takes minutes, so it is done once.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from core.config import Config
from engine.models import load_tokenizer
from learning.data import PromptDataset, load_prompts
from profiles.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """All in this process; actors get prompts with the requests and never the data set."""

    tokenizer: PreTrainedTokenizerBase
    dataset: PromptDataset
    profile: Profile | None = None
    "what the policy `goodput` goes by"


def read_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """Load the run's tokenizer: the target's unless the config names another. Raises ModelError."""
    name = config.models.tokenizer or config.models.target
    return load_tokenizer(name, trust_remote_code=config.models.trust_remote_code)


def read_inputs(config: Config, tokenizer: PreTrainedTokenizerBase | None = None) -> Inputs:
    """Read and tokenise the prompts. Raises ModelError and DataError."""
    tokenizer = tokenizer or read_tokenizer(config)
    dataset = load_prompts(config.data, tokenizer, seed=config.run.seed)
    return Inputs(tokenizer=tokenizer, dataset=dataset)
