"""Draft heads of random weights for tiny targets."""

import torch
from transformers import PreTrainedModel

from rlhfspec.engine.drafters.head.head_weights import (
    HeadConfig,
    HeadWeights,
    default_taps,
    vocabulary_tensors,
)


def random_head(
    target: PreTrainedModel,
    *,
    draft_vocab_size: int | None = None,
    seed: int = 3,
    dtype: torch.dtype = torch.float32,
) -> HeadWeights:
    """A head that fits the target; its output rows are the target's, so that it guesses better than chance."""
    config = target.config
    size = draft_vocab_size or config.vocab_size
    head = HeadConfig(
        hidden_size=config.hidden_size,
        intermediate_size=96,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_size=config.hidden_size // config.num_attention_heads,
        vocab_size=config.vocab_size,
        draft_vocab_size=size,
        tapped_layers=default_taps(config.num_hidden_layers),
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_theta": 10_000.0},
        max_position_embeddings=config.max_position_embeddings,
    )
    maker = torch.Generator().manual_seed(seed)
    ids = torch.randperm(config.vocab_size, generator=maker)[:size].sort().values
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=maker) * 0.03
        for name, shape in head.shapes().items()
        if name not in ("d2t", "t2d")
    }
    tensors["lm_head.weight"] = target.get_output_embeddings().weight.detach().float()[ids]
    tensors["fc.weight"][:, -config.hidden_size :] += torch.eye(config.hidden_size)
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    return HeadWeights(config=head, tensors=tensors | vocabulary_tensors(ids, config.vocab_size))
