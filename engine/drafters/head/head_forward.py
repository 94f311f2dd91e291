"""One decoder layer over tokens and hidden states of the target: what every form of draft head computes.

    x, h <- embedding of token i + 1 and hidden state at position i, by the form
    h <- h + attention(x)      h <- h + mlp(post_attention_layernorm(h))      logits <- h, by the form

EAGLE-3 (arXiv 2503.01840, 3.1); h is `fc` of the target's hidden states for committed tokens, and the layer's own
output for drafted ones:

    x  = input_layernorm(embedding)  |  hidden_norm(h)      logits = lm_head(norm(h))

A target's own MTP layer, in MiMo's form; h is the output of the target's last layer, before its last norm, and for
drafted tokens the normed output of this layer, as vLLM applies a single layer over and over. As in vLLM and SGLang
the embedding at position 0 is zeros:

    h' = input_proj(hidden_layernorm(h)  |  token_layernorm(embedding))      x = input_layernorm(h')
    h <- final_layernorm(the layer over h')                                  logits = the target's output matrix(h)

Keys and values need no more than x: committed tokens are filled in without attention.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from ....core.errors import WeightsError
from ...cache.kv_pool import KVShape, cell_size
from ...model.compute_backend import ComputeBackend
from ...model.forward_plan import ForwardPlan
from ...model.linears import Linear, by_head
from ...weights.llama_config import LlamaConfig, Rotary
from .head_weights import LAYER, HeadConfig, HeadWeights, require_whole


class LayerForward(ABC):
    """A head's weights laid out, and the arithmetic of its layer."""

    def __init__(
        self, head: HeadWeights, *, embedding: Float[Tensor, "V H"], capacity: int, backend: ComputeBackend
    ) -> None:
        """Lay the weights out.

        Args:
            head: on any device.
            embedding: the target's, shared with it: follows its updates.
            capacity: positions.
            backend: of the target.
        """
        self.head = head
        self._embedding = embedding
        self._backend = backend
        self.dtype = torch.float32 if backend.device.type == "cpu" else embedding.dtype
        self._rope = _rotations(head.config, capacity, backend.device)
        self._linears: dict[str, Linear] = {}
        self._gains: dict[str, Tensor] = {}
        self._lay_out()

    @property
    def config(self) -> HeadConfig:
        """The head's sizes."""
        return self.head.config

    @property
    def kv_shape(self) -> KVShape:
        """What the layer writes."""
        config = self.config
        return KVShape(
            num_layers=1,
            num_kv_heads=config.num_kv_heads,
            num_heads=config.num_heads,
            head_size=cell_size(config.head_size),
        )

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over trained weights by the form's names. Raises WeightsError when names do not fit."""
        own = self.head.trained.keys()
        trained = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
        if trained.keys() != own:
            raise WeightsError(
                f"the {self.config.what} of {len(own)} tensors got others: {sorted(own ^ trained.keys())[:4]} "
                "differ; publish the weights of this very one"
            )
        head = self.head.with_trained(trained)
        require_whole(head, "that was published")
        self.head = head
        self._lay_out()

    @abstractmethod
    def mix(self, taps: Float[Tensor, "M kH"]) -> Float[Tensor, "M H"]:
        """Return the hidden states that stand for the target's."""

    @abstractmethod
    def _own_linears(self) -> tuple[str, ...]:
        """Names of the matrices outside the layer, without `.weight`."""

    @abstractmethod
    def _inputs(
        self, embedded: Float[Tensor, "M H"], hidden: Float[Tensor, "M H"], positions: Int[Tensor, " M"]
    ) -> tuple[Float[Tensor, "M D"], Float[Tensor, "M H"]]:
        """Return what queries, keys and values are made of, and what attention is added to."""

    @abstractmethod
    def _outputs(self, h: Float[Tensor, "M H"]) -> tuple[Float[Tensor, "M D"], Float[Tensor, "M H"]]:
        """Return the logits behind the layer's output, and the hidden state for the level that follows."""

    def fill(
        self,
        ids: Int[Tensor, " M"],
        hidden: Float[Tensor, "M H"],
        positions: Int[Tensor, " M"],
        plan: ForwardPlan,
    ) -> None:
        """Write keys and values of tokens only."""
        x, _ = self._inputs(self._embedded(ids), hidden, positions)
        plan.store(0, self._qkv(x, positions))

    def __call__(
        self,
        ids: Int[Tensor, " M"],
        hidden: Float[Tensor, "M H"],
        positions: Int[Tensor, " M"],
        plan: ForwardPlan,
    ) -> tuple[Float[Tensor, "M D"], Float[Tensor, "M H"]]:
        """Return logits over the draft vocabulary, and the hidden state for the level that follows."""
        x, h = self._inputs(self._embedded(ids), hidden, positions)
        attended = plan.attend(
            0,
            self._qkv(x, positions),
            scaling=self.config.head_size**-0.5,
            softcap=None,
            sliding_window=None,
        )
        # added to in place: `h` may be the caller's
        h = self._linears["o_proj"].add_to(h.clone(), attended.to(self.dtype))
        gate, up = self._linears["gate_up"](
            self._norm(h, self.config.layer + "post_attention_layernorm")
        ).chunk(2, dim=-1)
        return self._outputs(self._linears["down_proj"].add_to(h, F.silu(gate).mul_(up)))

    def _embedded(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self._embedding).to(self.dtype)

    def _qkv(self, x: Tensor, positions: Tensor) -> Float[Tensor, "M Hkv G E"]:
        """Rotated queries and key, and the value, of every token and KV head."""
        config = self.config
        packed = self._linears["qkv"](x).float()
        lanes = config.num_heads // config.num_kv_heads + 2
        qkv = packed.reshape(len(x), config.num_kv_heads, lanes, config.head_size)
        pairs = torch.view_as_complex(qkv.view(*qkv.shape[:3], -1, 2))
        pairs[:, :, :-1].mul_(self._rope.index_select(0, positions)[:, None, None])
        added = cell_size(config.head_size) - config.head_size
        return F.pad(qkv, (0, added)) if added else qkv

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self._gains[name], self.config.rms_norm_eps)

    def _lay_out(self) -> None:
        """Matrices as products take them, in bfloat16 where that is read: no token depends on their last bits."""
        config, device = self.config, self._backend.device
        halved = torch.bfloat16 if self._backend.widens_bfloat16 or device.type != "cpu" else torch.float32
        tensors = {
            name: tensor.detach().to(device, halved if tensor.dim() == 2 else self.dtype)
            for name, tensor in self.head.tensors.items()
            if tensor.is_floating_point()
        }
        part = config.layer + "self_attn.{}_proj."
        query, key, value, out = (tensors[part.format(each) + "weight"] for each in "qkvo")
        biases = [tensors.get(part.format(each) + "bias") for each in "qkv"]
        heads, size = config.num_kv_heads, config.head_size
        mlp = config.layer + "mlp.{}_proj.weight"
        gate, up, down = (tensors[mlp.format(each)] for each in ("gate", "up", "down"))
        weights = {
            **{name: tensors[name + ".weight"] for name in self._own_linears()},
            "qkv": by_head(query, key, value, heads, size),
            "o_proj": out,
            "gate_up": torch.cat([gate, up]),
            "down_proj": down,
        }
        bias_of: dict[str, Tensor] = {}
        query_bias, key_bias, value_bias = biases
        if query_bias is not None and key_bias is not None and value_bias is not None:
            bias_of["qkv"] = by_head(query_bias, key_bias, value_bias, heads, size)
        with torch.inference_mode():
            self._linears = {
                name: self._backend.linear(weight, bias_of.get(name), self.dtype)
                for name, weight in weights.items()
            }
        self._gains = {
            name.removesuffix(".weight"): tensor for name, tensor in tensors.items() if tensor.dim() == 1
        }


def _rotations(config: HeadConfig, capacity: int, device: torch.device) -> Tensor:
    """Complex [capacity, E/2]: every position's rotation."""
    rotary = Rotary(
        LlamaConfig(
            model_type="llama",
            rope_parameters={"rope_type": "default", **config.rope_parameters},
            head_dim=config.head_size,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_heads,
            max_position_embeddings=config.max_position_embeddings,
        )
    )
    angles = torch.arange(capacity)[:, None].float() * rotary.inv_freq.float()
    scale = rotary.attention_scaling
    return torch.complex(angles.cos() * scale, angles.sin() * scale).to(device)


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
