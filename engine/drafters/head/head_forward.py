"""The forward of a draft head: one decoder layer over tokens and hidden states (EAGLE-3, arXiv 2503.01840, 3.1).

    x  = input_layernorm(embedding of token i + 1)  |  hidden_norm(h)
    h <- h + attention(x)      h <- h + mlp(post_attention_layernorm(h))      logits = lm_head(norm(h))

h is `fc` of the target's hidden states at position i for committed tokens, and the layer's own output for drafted
ones. Keys and values need no more than x: committed tokens are filled in without attention.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from core.errors import WeightsError
from engine.cache.kv_pool import KVShape, cell_size
from engine.drafters.head.head_weights import LAYER, HeadConfig, HeadWeights, require_whole
from engine.model.compute_backend import ComputeBackend
from engine.model.forward_plan import ForwardPlan
from engine.model.linears import Linear
from engine.model.llama_layout import by_head
from engine.weights.bare_llama import BareConfig, Rotary


class HeadForward:
    """A head's weights laid out, and its arithmetic."""

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
        config = head.config
        self._rope = _rotations(config, capacity, backend.device)
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
        """Take over trained weights by EAGLE-3's names. Raises WeightsError when names do not fit."""
        own = self.head.trained.keys()
        trained = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
        if trained.keys() != own:
            raise WeightsError(
                f"a draft head of {len(own)} tensors got others: {sorted(own ^ trained.keys())[:4]} differ; publish "
                "the weights of this very head"
            )
        head = self.head.with_trained(trained)
        require_whole(head, "that was published")
        self.head = head
        self._lay_out()

    def mix(self, taps: Float[Tensor, "M kH"]) -> Float[Tensor, "M H"]:
        """Return the hidden states that stand for the target's."""
        return self._linears["fc"](taps.to(self.dtype))

    def fill(
        self,
        ids: Int[Tensor, " M"],
        hidden: Float[Tensor, "M H"],
        positions: Int[Tensor, " M"],
        plan: ForwardPlan,
    ) -> None:
        """Write keys and values of tokens only."""
        plan.store(0, self._qkv(ids, hidden, positions))

    def __call__(
        self,
        ids: Int[Tensor, " M"],
        hidden: Float[Tensor, "M H"],
        positions: Int[Tensor, " M"],
        plan: ForwardPlan,
    ) -> tuple[Float[Tensor, "M D"], Float[Tensor, "M H"]]:
        """Return logits over the draft vocabulary, and the layer's output."""
        attended = plan.attend(
            0,
            self._qkv(ids, hidden, positions),
            scaling=self.config.head_size**-0.5,
            softcap=None,
            sliding_window=None,
        )
        h = self._linears["o_proj"].add_to(hidden.clone(), attended.to(self.dtype))
        gate, up = self._linears["gate_up"](self._norm(h, LAYER + "post_attention_layernorm")).chunk(
            2, dim=-1
        )
        h = self._linears["down_proj"].add_to(h, F.silu(gate).mul_(up))
        return self._linears["lm_head"](self._norm(h, "norm")), h

    def _qkv(self, ids: Tensor, hidden: Tensor, positions: Tensor) -> Float[Tensor, "M Hkv G E"]:
        """Rotated queries and key, and the value, of every token and KV head."""
        config = self.config
        embedded = F.embedding(ids, self._embedding).to(self.dtype)
        both = [
            self._norm(embedded, LAYER + "input_layernorm"),
            self._norm(hidden, LAYER + "hidden_norm"),
        ]
        packed = self._linears["qkv"](torch.cat(both, dim=-1)).float()
        lanes = config.num_heads // config.num_kv_heads + 2
        qkv = packed.reshape(len(ids), config.num_kv_heads, lanes, config.head_size)
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
        part = LAYER + "self_attn.{}_proj.weight"
        query, key, value, out = (tensors[part.format(each)] for each in "qkvo")
        mlp = LAYER + "mlp.{}_proj.weight"
        gate, up, down = (tensors[mlp.format(each)] for each in ("gate", "up", "down"))
        weights = {
            "fc": tensors["fc.weight"],
            "qkv": by_head(query, key, value, config.num_kv_heads, config.head_size),
            "o_proj": out,
            "gate_up": torch.cat([gate, up]),
            "down_proj": down,
            "lm_head": tensors["lm_head.weight"],
        }
        with torch.inference_mode():
            self._linears = {
                name: self._backend.linear(weight, None, self.dtype) for name, weight in weights.items()
            }
        self._gains = {
            name.removesuffix(".weight"): tensor for name, tensor in tensors.items() if tensor.dim() == 1
        }


def _rotations(config: HeadConfig, capacity: int, device: torch.device) -> Tensor:
    """Complex [capacity, E/2]: every position's rotation."""
    rotary = Rotary(
        BareConfig(
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
