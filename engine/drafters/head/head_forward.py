"""The forward of an EAGLE-3 head (arXiv 2503.01840, 3.1): `engine.drafters.head.layer_forward` with its inputs.

    x  = input_layernorm(embedding of token i + 1)  |  hidden_norm(h)      logits = lm_head(norm(h))

h is `fc` of the target's hidden states at position i for committed tokens, and the layer's own output for drafted
ones.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from rlhfspec.engine.drafters.head.head_weights import LAYER
from rlhfspec.engine.drafters.head.layer_forward import LayerForward


class HeadForward(LayerForward):
    """An EAGLE-3 head's arithmetic."""

    def mix(self, taps: Float[Tensor, "M kH"]) -> Float[Tensor, "M H"]:
        """Return the hidden states that stand for the target's."""
        return self._linears["fc"](taps.to(self.dtype))

    def _own_linears(self) -> tuple[str, ...]:
        return "fc", "lm_head"

    def _inputs(self, embedded: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        both = [
            self._norm(embedded, LAYER + "input_layernorm"),
            self._norm(hidden, LAYER + "hidden_norm"),
        ]
        return torch.cat(both, dim=-1), hidden

    def _outputs(self, h: Tensor) -> tuple[Tensor, Tensor]:
        return self._linears["lm_head"](self._norm(h, "norm")), h
