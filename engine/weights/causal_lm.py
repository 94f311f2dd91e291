"""What the engine asks of a model that it decodes: a Hugging Face module, or one of ours (`engine.model.llama_model`).

Nothing here, and nothing that an instance loads for a model that it knows, imports `transformers.modeling_utils`: that
takes longer than the rest of an instance's start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel as PreTrainedModel
else:
    # for annotations: modules that name it are imported by whoever has no model
    PreTrainedModel = torch.nn.Module

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


@runtime_checkable
class CausalLM(Protocol):
    """A model of either kind; `config` is Hugging Face's, or answers like it."""

    config: Any

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        ...

    @property
    def device(self) -> torch.device:
        """Where they are."""
        ...

    def num_parameters(self) -> int:
        """Numbers that are its weights, tied ones once."""
        ...


def max_context_tokens(config: Any) -> int | None:
    """Return the longest context the model's positions allow, None when it has no limit."""
    limits = (getattr(config.get_text_config(), name, None) for name in POSITION_LIMITS)
    return next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)
