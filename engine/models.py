"""Loads Hugging Face causal LMs and tokenizers, and says clearly when it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.configuration_utils import PretrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from core.errors import ModelError

POSITION_LIMITS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
)
"What configs call the number of positions they know; GPT-2 and kin have names of their own."
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load a tokenizer by path or hub name. Raises ModelError."""
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(_cannot_load("tokenizer", name, error)) from error


def load_causal_lm(name: str, dtype: str, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Load a causal LM by path or hub name, in eval mode, without gradients. Raises ModelError."""
    try:
        model = AutoModelForCausalLM.from_pretrained(
            name, dtype=DTYPES[dtype], trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(_cannot_load("model", name, error)) from error
    return freeze(model)


def load_hf_config(name: str, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """Load only a model's config. Raises ModelError."""
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(_cannot_load("model config", name, error)) from error


def build_causal_lm(hf_config_json: str, dtype: str) -> PreTrainedModel:
    """Build the module a manifest describes, weights uninitialised. Raises ModelError."""
    tree = json.loads(hf_config_json)
    try:
        config = AutoConfig.for_model(**tree)
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype])
    except (KeyError, ValueError) as error:
        raise ModelError(
            f"cannot build a '{tree.get('model_type')}' model from its config: {error}"
        ) from error
    return freeze(model)


def freeze(model: PreTrainedModel) -> PreTrainedModel:
    """Put a model into eval mode and switch its gradients off."""
    return model.eval().requires_grad_(False)


def check_compatible(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
    """Require equal id-to-token maps; padded vocabulary sizes of the models may differ.

    Raises ModelError naming the first id that differs.
    """
    ours, theirs = target.get_vocab(), draft.get_vocab()
    if ours == theirs:
        return
    difference = sorted(set(ours.items()) ^ set(theirs.items()), key=lambda item: item[1])
    token, token_id = difference[0]
    raise ModelError(
        f"draft and target need equal tokenizers; they differ first at id {token_id} ({token!r}), "
        f"{len(difference)} entries in all (target {len(ours)}, draft {len(theirs)}); "
        "take a draft model of the same family, or speculation.drafter=ngram"
    )


def num_token_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return how many ids the tokenizer knows; a model's padded ids lie above."""
    return max(tokenizer.get_vocab().values()) + 1


def max_context_tokens(config: PretrainedConfig) -> int | None:
    """Return the longest context the model's positions allow, None when it has no limit."""
    text = config.get_text_config()
    for name in POSITION_LIMITS:
        limit = getattr(text, name, None)
        if isinstance(limit, int) and limit > 0:
            return limit
    return None


def _cannot_load(what: str, name: str, error: Exception) -> str:
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local and not Path(name).expanduser().exists():
        return f"cannot load the {what}: {name} does not exist; expected a folder saved by save_pretrained"
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"cannot load the {what} '{name}' (a local folder or a hub name): {first_line}"
