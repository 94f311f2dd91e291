"""What a draft head's training and evaluation read of a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from rlhfspec.engine.drafters.head.head_weights import default_taps
from rlhfspec.learning.drafts.fresh_head import require_kin


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetParts:
    """What a head's training reads of a target."""

    taps: tuple[int, ...]
    embedding: Float[Tensor, "V H"]
    output_weight: Float[Tensor, "V H"]
    final_norm_gain: Float[Tensor, " H"]
    final_norm_eps: float

    @staticmethod
    def of(target: PreTrainedModel, taps: Sequence[int] | None = None) -> TargetParts:
        """Of a model of Llama's kin. Raises ModelError for another."""
        require_kin(target)
        base: Any = target.base_model
        inputs: Any = target.get_input_embeddings()
        outputs: Any = target.get_output_embeddings()
        config: Any = target.config.get_text_config()
        return TargetParts(
            taps=tuple(taps) if taps is not None else default_taps(len(base.layers)),
            embedding=inputs.weight.detach(),
            output_weight=outputs.weight.detach(),
            final_norm_gain=base.norm.weight.detach(),
            final_norm_eps=config.rms_norm_eps,
        )
