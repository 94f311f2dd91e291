"""A draft head as a module whose state dict has EAGLE-3's names (`engine.drafters.head.head_weights`)."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rlhfspec.engine.drafters.head.head_weights import HeadConfig, HeadWeights


class Rotation:
    """Rotary embedding of a head's queries and keys: halves turned against each other, as in the checkpoints."""

    def __init__(self, config: HeadConfig) -> None:
        rope: dict[str, Any] = {"rope_type": "default", **config.rope_parameters}
        rotary: Any = LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=config.hidden_size,
                num_attention_heads=config.num_heads,
                head_dim=config.head_size,
                max_position_embeddings=config.max_position_embeddings,
                rope_parameters=rope,
            )
        )
        self._frequencies: Tensor = rotary.inv_freq.float()
        self._scale: float = rotary.attention_scaling

    def table(self, positions: Int[Tensor, " N"]) -> tuple[Float[Tensor, "N 1 E"], Float[Tensor, "N 1 E"]]:
        """Cosine and sine of every position, the same for all heads."""
        angles = positions[:, None].float() * self._frequencies.to(positions.device)
        both = torch.cat([angles, angles], dim=-1)[:, None]
        return both.cos() * self._scale, both.sin() * self._scale

    @staticmethod
    def turn(
        x: Float[Tensor, "N heads E"], table: tuple[Float[Tensor, "N 1 E"], Float[Tensor, "N 1 E"]]
    ) -> Float[Tensor, "N heads E"]:
        """Turn every head by its token's position."""
        cos, sin = table
        low, high = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-high, low], dim=-1) * sin


class _Attention(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        double, kv = 2 * config.hidden_size, config.num_kv_heads * config.head_size
        self.q_proj = nn.Linear(double, config.attended_size, bias=False)
        self.k_proj = nn.Linear(double, kv, bias=False)
        self.v_proj = nn.Linear(double, kv, bias=False)
        self.o_proj = nn.Linear(config.attended_size, config.hidden_size, bias=False)


class _Mlp(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)


class _Layer(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(hidden, eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)
        self.mlp = _Mlp(config)


class HeadModule(nn.Module):
    """Weights of a head, float32; what is computed with them stands in `learning.drafts.unrolled`."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, head: HeadWeights) -> None:
        super().__init__()
        config = self.config = head.config
        self.rotation = Rotation(config)
        # weights come from `head`: to draw them first would take time
        with torch.device("meta"):
            self.fc = nn.Linear(
                len(config.tapped_layers) * config.hidden_size, config.hidden_size, bias=False
            )
            self.midlayer = _Layer(config)
            self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", head.tensors["d2t"].clone())
        self.register_buffer("t2d", head.tensors["t2d"].clone())
        floats = {
            name: value.detach().float() for name, value in head.tensors.items() if value.is_floating_point()
        }
        self.load_state_dict(
            {**{n: v.contiguous().clone() for n, v in floats.items()}, "d2t": self.d2t, "t2d": self.t2d},
            assign=True,
        )
        self.requires_grad_(True)

    @property
    def token_ids(self) -> Int[Tensor, " D"]:
        """The target's id of every draft id, ascending."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def weights(self) -> dict[str, Tensor]:
        """Copies of the trained tensors by EAGLE-3's names, on the CPU."""
        return {
            name: parameter.detach().cpu().clone(memory_format=torch.contiguous_format)
            for name, parameter in self.named_parameters()
        }
