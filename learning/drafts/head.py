"""A draft head that learns: as a module of EAGLE-3's names, made fresh for a target, and what it reads of that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ...core.errors import ModelError
from ...engine.drafters.head.config_keys import ROPE_NEEDS, rope_of
from ...engine.drafters.head.feature_recorder import FeatureSequence
from ...engine.drafters.head.head_weights import (
    LAYER,
    HeadConfig,
    HeadWeights,
    default_taps,
    vocabulary_tensors,
)
from ...engine.model.llama_model import LlamaModel
from ...engine.weights.causal_lm import CausalLM
from ...engine.weights.llama_config import MODEL_TYPES
from .stoppable import fastest_dtype


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


DRAFT_VOCABULARY = 8192


def draft_vocabulary(
    size: int,
    vocab_size: int,
    *,
    counts: Tensor | None = None,
    responses: Iterable[np.ndarray] = (),
    prompts: Iterable[np.ndarray] = (),
    always: Sequence[int] = (),
) -> Int[Tensor, " D"]:
    """Return the target's ids that a head may draft, ascending: `size` of them, of the lowest `vocab_size`.

    First `always` (the stop tokens); then the most frequent of the target's own responses, by `counts` [V] where they
    are given (`token_shares.expected_counts`), else in `responses`; then those of the prompts, and the lowest ids. Of
    equally frequent ones the lower id.
    """
    size = min(size, vocab_size)
    chosen = dict.fromkeys(token for token in always if 0 <= token < vocab_size)
    for found in (
        _counted(responses, vocab_size) if counts is None else counts,
        _counted(prompts, vocab_size),
    ):
        by_count = torch.sort(found[:vocab_size], descending=True, stable=True)
        chosen |= dict.fromkeys(by_count.indices[by_count.values > 0].tolist())
    chosen |= dict.fromkeys(range(vocab_size))
    return torch.tensor(sorted(list(chosen)[:size]), dtype=torch.int64)


def _counted(texts: Iterable[np.ndarray], vocab_size: int) -> Tensor:
    joined = [*texts, np.zeros(0, dtype=np.int64)]
    return torch.bincount(torch.from_numpy(np.concatenate(joined).astype(np.int64)), minlength=vocab_size)


def fresh_head(
    target: CausalLM, token_ids: Int[Tensor, " D"], *, taps: Sequence[int] | None = None, seed: int = 0
) -> HeadWeights:
    """Return a head for a target, over a draft vocabulary.

    Output rows and norm are the target's. The layer begins as the target's last one, which reads hidden states alone;
    what reads the token's embedding begins small and random; `fc` passes the highest tapped state through.
    Raises ModelError for a target whose layers are not Llama's or its kin's.
    """
    config = head_config(target, len(token_ids), taps=taps)
    module: Any = target
    base: Any = module.base_model
    hidden = config.hidden_size
    random = torch.Generator().manual_seed(seed)
    layer = base.layers[-1]
    tensors: dict[str, Tensor] = {}
    fc = torch.zeros(hidden, len(config.tapped_layers) * hidden)
    fc[:, -hidden:] = torch.eye(hidden)
    tensors["fc.weight"] = fc
    tensors[LAYER + "input_layernorm.weight"] = torch.ones(hidden)
    tensors[LAYER + "hidden_norm.weight"] = layer.input_layernorm.weight
    for name in ("q", "k", "v"):
        own: Tensor = getattr(layer.self_attn, f"{name}_proj").weight
        of_embedding = torch.randn(own.shape, generator=random) * 0.02
        tensors[LAYER + f"self_attn.{name}_proj.weight"] = torch.cat([of_embedding, own.cpu().float()], dim=1)
    tensors[LAYER + "self_attn.o_proj.weight"] = layer.self_attn.o_proj.weight
    tensors[LAYER + "post_attention_layernorm.weight"] = layer.post_attention_layernorm.weight
    for name in ("gate", "up", "down"):
        tensors[LAYER + f"mlp.{name}_proj.weight"] = getattr(layer.mlp, f"{name}_proj").weight
    tensors["norm.weight"] = base.norm.weight
    tensors["lm_head.weight"] = module.get_output_embeddings().weight[token_ids]
    made = {name: tensor.detach().cpu().float().clone() for name, tensor in tensors.items()}
    return HeadWeights(config=config, tensors=made | vocabulary_tensors(token_ids, config.vocab_size))


def head_config(target: CausalLM, draft_vocab_size: int, *, taps: Sequence[int] | None = None) -> HeadConfig:
    """Sizes of a head with a layer like the target's. Raises ModelError as `fresh_head`."""
    module: Any = target
    base: Any = module.base_model
    config: Any = target.config.get_text_config()
    layers, norm = getattr(base, "layers", None), getattr(base, "norm", None)
    if (
        layers is None
        or norm is None
        or not hasattr(layers[-1], "mlp")
        or not hasattr(layers[-1].mlp, "gate_proj")
    ):
        raise ModelError(
            f"no draft head can be made for a {type(target).__name__}: expected layers as Llama, Mistral and Qwen have "
            "them (layers, norm, gated mlp); draft with speculation.drafter=suffix"
        )
    attention = layers[-1].self_attn
    size: int = attention.head_dim
    return HeadConfig(
        hidden_size=config.hidden_size,
        intermediate_size=layers[-1].mlp.gate_proj.weight.shape[0],
        num_heads=attention.q_proj.weight.shape[0] // size,
        num_kv_heads=attention.k_proj.weight.shape[0] // size,
        head_size=size,
        vocab_size=config.vocab_size,
        draft_vocab_size=draft_vocab_size,
        tapped_layers=tuple(taps) if taps is not None else default_taps(len(layers)),
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=_rope_of(config),
        max_position_embeddings=config.max_position_embeddings,
        num_target_layers=len(layers),
    )


def require_kin(target: CausalLM) -> None:
    """Raise ModelError for a target whose distribution is not `softmax(lm_head(norm(last)))`, or is not known to be.

    Names alone do not tell: Gemma's norm adds 1 to its gain, and its logits are capped; Granite's are divided.
    """
    kind = target.config.get_text_config().model_type
    if kind not in MODEL_TYPES:
        raise ModelError(
            f"no draft head can be made or trained for a '{kind}' model: expected one of {', '.join(MODEL_TYPES)}, "
            "whose last norm and output a head can learn from; draft with speculation.drafter=suffix, or take a head "
            "that others trained and set drafter_training.spot: off"
        )


def _rope_of(config: Any) -> dict[str, Any]:
    """The target's where its frequencies are the same at every length, else plain ones of the same base."""
    rope = rope_of(config.rope_parameters or {})
    return rope if rope.get("rope_type", "default") in ROPE_NEEDS else {"rope_theta": rope["rope_theta"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetParts:
    """What a head's training reads of a target."""

    taps: tuple[int, ...]
    embedding: Float[Tensor, "V H"]
    output_weight: Float[Tensor, "V H"]
    final_norm_gain: Float[Tensor, " H"]
    final_norm_eps: float

    @staticmethod
    def of(target: CausalLM, taps: Sequence[int] | None = None) -> TargetParts:
        """Of a model of Llama's kin. Raises ModelError for another."""
        require_kin(target)
        config: Any = target.config.get_text_config()
        if isinstance(target, LlamaModel):
            embedding, output, gain = target.embedding, target.output_weight, target.final_norm
        else:
            module: Any = target
            base: Any = module.base_model
            embedding, output, gain = (
                part.weight.detach()
                for part in (base.get_input_embeddings(), module.get_output_embeddings(), base.norm)
            )
        return TargetParts(
            taps=tuple(taps) if taps is not None else default_taps(config.num_hidden_layers),
            embedding=embedding,
            output_weight=output,
            final_norm_gain=gain,
            final_norm_eps=config.rms_norm_eps,
        )


MAX_POSITIONS = 8192
ROWS = 256


@torch.no_grad()
def expected_counts(
    sequences: Sequence[FeatureSequence],
    target: TargetParts,
    *,
    temperature: float,
    max_positions: int = MAX_POSITIONS,
) -> Float[Tensor, " V"]:
    """Return the expected number of every token over response positions, at most `max_positions` evenly taken.

    Measured on SmolLM2-135M-Instruct at T = 1: of the tokens of unseen responses, a vocabulary of 8,192 by these
    counts over 4,600 positions has 95.5%, one by the tokens that 37,000 positions sampled 93.3%.
    """
    counts = torch.zeros(len(target.output_weight))
    total = sum(len(sequence.last) for sequence in sequences)
    if not total:
        return counts
    every = -(-total // max_positions)
    last = torch.cat([sequence.last for sequence in sequences])[::every]
    device = target.output_weight.device
    dtype = fastest_dtype() if device.type == "cpu" else torch.bfloat16
    weight, gain = target.output_weight.to(dtype), target.final_norm_gain.float()
    for rows in last.split(ROWS):
        states = F.rms_norm(rows.to(device).float(), gain.shape, gain, target.final_norm_eps)
        logits = (states.to(dtype) @ weight.t()).float() / (temperature or 1.0)
        counts += logits.softmax(-1).sum(0).cpu()
    return counts * every
