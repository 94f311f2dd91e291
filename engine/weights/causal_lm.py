"""What the engine asks of a model that it decodes: a Hugging Face module, or its weights alone (`bare_llama`).

Nothing here, and nothing that an instance loads for a model that it knows, imports `transformers.modeling_utils`: that
takes longer than the rest of an instance's start.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

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
    """A model with named weights; `config` is Hugging Face's, or answers like it."""

    config: Any

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        ...

    @property
    def device(self) -> torch.device:
        """Where they are."""
        ...

    @property
    def base_model(self) -> Any:
        """The decoder below the head."""
        ...

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """All weights."""
        ...

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """All weights, as the checkpoint names them."""
        ...

    def state_dict(self, *, prefix: str = "", keep_vars: bool = False) -> dict[str, Tensor]:
        """Weights and persistent buffers by name."""
        ...

    def get_output_embeddings(self) -> Any:
        """The head."""
        ...


def max_context_tokens(config: Any) -> int | None:
    """Return the longest context the model's positions allow, None when it has no limit."""
    text = config.get_text_config()
    for name in POSITION_LIMITS:
        limit = getattr(text, name, None)
        if isinstance(limit, int) and limit > 0:
            return limit
    return None
