"""Nothing depends on how attention's result lies in memory: CUDA's kernels lay heads behind rows.

All tests of the engine and of learning run so (`conftest.py`); these take the ways where library attention serves.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from rlhfspec.core.config import EngineConfig
from rlhfspec.core.records import SampleRequest, SamplingParams
from rlhfspec.engine.attention.packing import unpack_queries
from rlhfspec.engine.build import build_engine
from tests.engine.conftest import PLANS, Pair
from tests.helpers.backends import rows_backend, torch_backend
from tests.helpers.cuda_layouts import heads_behind_rows
from tests.helpers.random_heads import random_head


def test_results_lie_as_on_cuda() -> None:
    """A single sample's too, which a view of other sizes could take for contiguous."""
    for samples, rows in ((1, 5), (3, 1), (3, 5)):
        x = torch.randn(samples, 2, rows, 8)
        out = F.scaled_dot_product_attention(x, x, x)
        assert out.transpose(1, 2).is_contiguous() and (rows == 1 or not out.is_contiguous())


@pytest.mark.parametrize("shared", [1, 2, 4])
@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("samples", [1, 3, 8, 16])
def test_outputs_are_unpacked_from_any_layout(samples: int, n: int, shared: int) -> None:
    heads, size = 2, 8
    out = torch.randn(samples, heads, n * shared, size)
    packed = unpack_queries(out.flatten(0, 1), samples, n, samples * n + 3)
    by_token = out.unflatten(2, (n, shared)).permute(0, 2, 1, 3, 4).reshape(samples * n, -1)
    assert torch.equal(packed[: samples * n], by_token) and not packed[samples * n :].any()
    assert torch.equal(
        unpack_queries(heads_behind_rows(out).flatten(0, 1), samples, n, samples * n + 3), packed
    )


@pytest.mark.parametrize("forward", ["own", "fused rows", "stock"])
@pytest.mark.parametrize("lengths", [(17,), (5, 40, 17)], ids=str)
@pytest.mark.parametrize("plan", ["off", "chain4", "tree8", "suffix", "head tree", "bandit"])
def test_library_attention_serves_every_way_to_draft(
    pairs: dict[str, Pair],
    make_requests: Callable[..., list[SampleRequest]],
    dense_logits: Callable[..., torch.Tensor],
    plan: str,
    lengths: tuple[int, ...],
    forward: str,
) -> None:
    pair = pairs["float32"]
    engine = build_engine(
        pair.target,
        random_head(pair.target, draft_vocab_size=48) if PLANS[plan].drafter == "head" else pair.draft,
        engine=EngineConfig.model_validate(
            {"device": "cpu", "attention": "sdpa", "numerics": "fast", "probe": False}
            | ({"forward": "stock"} if forward == "stock" else {})
        ),
        speculation=PLANS[plan],
        max_total_tokens=192,
        backend=rows_backend() if forward == "fused rows" else torch_backend(),
    )
    requests = make_requests(lengths, SamplingParams(max_new_tokens=12, temperature=0.8))
    for request, done in zip(requests, engine.generate(requests), strict=True):
        prompt = request.prompt.token_ids
        logits = dense_logits(pair.target, np.concatenate([prompt, done.token_ids]))[len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits / 0.8, -1).gather(1, torch.from_numpy(done.token_ids)[:, None])
        np.testing.assert_allclose(done.policy_logprobs, expected[:, 0].numpy(), atol=2e-4)
