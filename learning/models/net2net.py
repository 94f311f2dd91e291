"""Grow a small Llama into a larger one that computes the same function.

Training narrow and growing afterwards gives a target of realistic cost in a fraction of the time.
Source: Chen et al. 2016 (Net2Net), section 2; zero-initialised blocks as in Zhang et al. 2019 (Fixup).
"""

from __future__ import annotations

import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig

from ...engine.weights.causal_lm import PreTrainedModel


def widen(model: PreTrainedModel, *, factor: int = 2, seed: int = 0) -> PreTrainedModel:
    """Return a model `factor` times as wide (hidden, heads, KV heads, MLP) with the same logits.

    What writes to the residual stream (embedding, o_proj, down_proj) is zero wherever it is new, so the
    new residual channels are zero; what reads is random, so gradients reach the new weights. A norm
    over channels of which the new ones are zero divides by a root mean square sqrt(factor) smaller; its
    weight takes that back, and epsilon shrinks by `factor`.
    """
    old = model.config
    config = LlamaConfig(
        **{
            **old.to_dict(),
            "hidden_size": old.hidden_size * factor,
            "intermediate_size": old.intermediate_size * factor,
            "num_attention_heads": old.num_attention_heads * factor,
            "num_key_value_heads": (old.num_key_value_heads or old.num_attention_heads) * factor,
            "head_dim": old.head_dim,
            "rms_norm_eps": old.rms_norm_eps / factor,
        }
    )
    wide = new_llama(config, seed)
    source = model.state_dict()
    state = {name: _widened(name, new, source[name], factor) for name, new in wide.state_dict().items()}
    wide.load_state_dict(state)
    return wide


def deepen(model: PreTrainedModel, *, num_layers: int, seed: int = 0) -> PreTrainedModel:
    """Return a model with `num_layers` blocks and the same logits.

    The old blocks are spread evenly; new ones have zero output projections, so they add nothing until
    they are trained.
    """
    old = model.config
    config = LlamaConfig(**{**old.to_dict(), "num_hidden_layers": num_layers, "head_dim": old.head_dim})
    deep = new_llama(config, seed)
    place = {(index * num_layers) // old.num_hidden_layers: index for index in range(old.num_hidden_layers)}
    source, state = model.state_dict(), deep.state_dict()
    for name in state:
        if not name.startswith("model.layers."):
            state[name] = source[name]
            continue
        layer, leaf = int(name.split(".")[2]), name.split(".", 3)[3]
        if layer in place:
            state[name] = source[f"model.layers.{place[layer]}.{leaf}"]
        elif leaf in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            state[name] = torch.zeros_like(state[name])
    deep.load_state_dict(state)
    return deep


def new_llama(config: LlamaConfig, seed: int) -> PreTrainedModel:
    """One with weights drawn from the seed; the global random state stays."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return transformers.LlamaForCausalLM(config)


_WRITERS = ("o_proj.weight", "down_proj.weight", "embed_tokens.weight")


def _widened(name: str, new: Tensor, old: Tensor, factor: int) -> Tensor:
    out = torch.zeros_like(new) if name.endswith(_WRITERS) else new.clone()
    if old.ndim == 1:
        out[: len(old)] = old
        return out / factor**0.5
    out[: old.shape[0], : old.shape[1]] = old
    return out
