"""The start-up probe of a group: a layer of the model's shape, dealt to the ranks, gives the bits of one rank.

A leader has its own share of the weights alone, so it cannot compare the model itself with what one rank computes. It
compares one layer of the same heads and widths, of drawn weights and a small vocabulary: its sums, choices and shares.
`engine.model.invariance_probe` then compares the group with itself in other company.
"""

from __future__ import annotations

import json

import torch

from rlhfspec.core.errors import NumericsError
from rlhfspec.engine.cache.shared_memory import SharedFile
from rlhfspec.engine.model.compute_backend import ComputeBackend
from rlhfspec.engine.model.invariance_probe import PATH_TOKENS, PROBE_SEED, plain_logits
from rlhfspec.engine.model.linears import Ranks
from rlhfspec.engine.model.llama_model import LlamaModel
from rlhfspec.engine.model.runner import ModelRunner
from rlhfspec.engine.weights.causal_lm import DTYPES
from rlhfspec.engine.weights.llama_config import LlamaConfig, weight_shapes

IDS = 512
CONTEXT = 5


def require_bits_of_one_rank(
    hf_config_json: str, dtype: str, *, backend: ComputeBackend, ranks: Ranks
) -> None:
    """Compare logits of a layer, decoded by all ranks and by this one alone. Raises NumericsError: a bit differs."""
    small = json.loads(hf_config_json) | {"num_hidden_layers": 1, "vocab_size": IDS, "num_outputs": IDS}
    text, kind = json.dumps(small), DTYPES[dtype]
    config, generator = LlamaConfig.of(text), torch.Generator().manual_seed(PROBE_SEED)
    tensors = {
        name: (torch.randn(shape, generator=generator) * 0.1).to(kind)
        for name, shape in weight_shapes(config).items()
    }
    ids = torch.randint(IDS, (CONTEXT + PATH_TOKENS,), generator=generator)
    alone, together = (
        plain_logits(_runner(config, text, dtype, tensors, backend, each), ids, CONTEXT)
        for each in (None, ranks)
    )
    if not torch.equal(alone, together):
        raise NumericsError(
            f"a layer that {ranks.share.ranks} ranks compute differs from one rank's by up to "
            f"{float((alone - together).abs().max()):.2e}, expected the same bits; set "
            "cluster.generation.tensor_parallel=1"
        )


def _runner(
    config: LlamaConfig,
    text: str,
    dtype: str,
    tensors: dict[str, torch.Tensor],
    backend: ComputeBackend,
    ranks: Ranks | None,
) -> ModelRunner:
    if ranks is not None:
        ranks.order("model", hf_config_json=text, dtype=dtype, vocab_size=IDS)
    model = LlamaModel(config, DTYPES[dtype], backend, ranks=ranks, vocab_size=IDS)
    model.load(tensors, [tensors])
    return ModelRunner(
        model,
        num_slots=1,
        capacity=CONTEXT + PATH_TOKENS + 1,
        backend=backend,
        vocab_size=IDS,
        who="the probe of a group",
        cells=None if ranks is None else SharedFile.new("rlhfspec-probe"),
    )
