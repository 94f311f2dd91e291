"""The forward of a target's own MTP layer (`engine.drafters.head.mtp_weights`), in MiMo's form.

    h' = input_proj(hidden_layernorm(h)  |  token_layernorm(embedding of token i + 1))
    x  = input_layernorm(h')      h <- the layer over h'      h <- final_layernorm(h)      logits = output matrix(h)

h is the output of the target's last layer at position i, before its last norm, for committed tokens. For drafted ones
it is the normed output of this layer, as vLLM applies a single layer over and over. As in vLLM and SGLang the
embedding at position 0 is zeros.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from rlhfspec.engine.drafters.head.head_weights import HeadWeights
from rlhfspec.engine.drafters.head.layer_forward import LayerForward
from rlhfspec.engine.model.compute_backend import ComputeBackend


class MtpForward(LayerForward):
    """An MTP layer's arithmetic, over the target's embedding and output matrix."""

    def __init__(
        self,
        head: HeadWeights,
        *,
        embedding: Float[Tensor, "V H"],
        output: Callable[[Tensor], Tensor],
        capacity: int,
        backend: ComputeBackend,
    ) -> None:
        """Lay the weights out.

        Args:
            head: of an `MtpConfig`.
            embedding: as of `LayerForward`.
            output: logits of normed states by the target's output matrix, as it is at the moment.
            capacity: positions.
            backend: of the target.
        """
        super().__init__(head, embedding=embedding, capacity=capacity, backend=backend)
        self._output = output

    def mix(self, taps: Float[Tensor, "M H"]) -> Float[Tensor, "M H"]:
        """Return the output of the target's last layer as it is."""
        return taps.to(self.dtype)

    def _own_linears(self) -> tuple[str, ...]:
        return ("input_proj",)

    def _inputs(self, embedded: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        embedded = embedded.masked_fill((positions == 0)[:, None], 0.0)
        both = [self._norm(hidden, "hidden_layernorm"), self._norm(embedded, "token_layernorm")]
        h = self._linears["input_proj"](torch.cat(both, dim=-1))
        return self._norm(h, "input_layernorm"), h

    def _outputs(self, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self._norm(h, "final_layernorm")
        return self._output(h).to(self.dtype), h
