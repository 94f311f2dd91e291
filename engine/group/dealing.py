"""Which models can be dealt to how many ranks."""

from __future__ import annotations

import json

from rlhfspec.core.errors import ModelError
from rlhfspec.engine.cache.kv_pool import CELL_STEP
from rlhfspec.engine.model.llama_model import INNER_STEP
from rlhfspec.engine.parts import PARTS, Share
from rlhfspec.engine.weights.llama_config import LlamaConfig

LEAST_IDS = CELL_STEP
"Token ids of a rank: a vector of them is chosen from at once."


def require_dealt(
    hf_config_json: str, config: LlamaConfig | None, ranks: int, vocab_size: int | None
) -> None:
    """Raise ModelError where a model has no share for each of so many ranks.

    Args:
        hf_config_json: of the model.
        config: the same where our own forward serves it.
        ranks: 2 or 4.
        vocab_size: token ids that are dealt; all by default.
    """
    if config is None:
        family = json.loads(hf_config_json).get("model_type", "unknown")
        raise ModelError(
            f"cluster.generation.tensor_parallel {ranks} needs a model that our own forward serves (Llama, Mistral, "
            f"Qwen2, Qwen3), got one of type '{family}'; set it to 1, or take such a model"
        )
    if ranks not in (2, PARTS):
        raise ModelError(f"cluster.generation.tensor_parallel must be 1, 2 or {PARTS}, got {ranks}")
    for rank in range(ranks):
        share = Share(rank=rank, ranks=ranks)
        columns = len(share.of(config.intermediate_size, INNER_STEP))
        ids = len(share.of_vocabulary(vocab_size or config.vocab_size))
        if columns == 0 or ids < LEAST_IDS:
            raise ModelError(
                f"the model is too small for {ranks} ranks: rank {rank} would have {columns} inner columns and {ids} "
                f"token ids, expected at least 1 and {LEAST_IDS}; lower cluster.generation.tensor_parallel"
            )
