"""What a decode step asks of a GPU stays within its bars; what counts it sees what it is to see."""

from __future__ import annotations

import pytest
import torch

from rlhfspec.benchmarks.device_ops import (
    META,
    DeviceCalls,
    counted,
    layer_launches,
    level_launches,
    prefill,
    publication,
    update,
)
from rlhfspec.engine.attention import backends

MOST_OUTSIDE = {"plain": 12, "chain8": 20, "tree8": 30, "tree16": 40}
MOST_OF_A_LAYER = 10
"Four are products, whose kernels are the library's."
MOST_OF_A_LEVEL = 12


@pytest.mark.parametrize("plan", MOST_OUTSIDE)
def test_a_step_is_launched_in_few_calls(plan: str) -> None:
    step = counted(plan)
    assert 0 < step["launches"] <= MOST_OUTSIDE[plan] and step["replayed"] > 20
    # a plain step goes on where the one before lies
    assert step["ups"] == (plan != "plain") and step["downs"] == 1 and not step["waits"]


@pytest.mark.parametrize("plan", ["plain", "tree8"])
def test_a_layer_is_few_launches(plan: str) -> None:
    assert 0 < layer_launches(plan, kernels=True) <= MOST_OF_A_LAYER
    assert layer_launches(plan, kernels=False) > MOST_OF_A_LAYER, "with torch's operators alone it is more"


def test_a_level_of_a_tree_is_few_launches_beside_the_drafts_layers() -> None:
    assert 0 < level_launches() <= MOST_OF_A_LEVEL


def test_fresh_prompts_are_one_call_of_attention_without_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prefill() == {"attention_calls_a_layer_prefill": 1, "mask_bytes_prefill": 0}
    monkeypatch.setattr(backends, "_variable_length", lambda: None)
    # 8 samples, rows of 4 query heads for the longest, 32 positions in view, 2 bytes
    assert prefill() == {"attention_calls_a_layer_prefill": 1, "mask_bytes_prefill": 8 * 27 * 4 * 32 * 2}


def test_a_pack_of_an_update_is_sent_in_one_copy_and_a_minibatch_waits_twice_at_most() -> None:
    found = update()
    assert found["copies_up_a_pack_update"] == 1 and found["attention_calls_a_layer_update"] == 1
    assert 0 < found["waits_a_minibatch_update"] <= 2


def test_a_publication_waits_for_no_bucket_and_reads_it_where_it_lies() -> None:
    found = publication()
    assert found["buckets_publication"] > 5
    assert found["waits_publication_trainer"] == 1
    # what came, and what was read back of what is laid out
    assert found["waits_publication_instance"] == 2
    assert 5 < found["bytes_moved_a_byte_publication"] < 6, (
        "summed, laid out, compared; a cut tensor is copied"
    )


@pytest.mark.parametrize("inference", [False, True])
def test_views_are_no_launches_and_parts_are(inference: bool) -> None:
    x = torch.randn(4, 6, device=META)
    with torch.inference_mode(inference), DeviceCalls() as calls:
        x.unflatten(1, (2, 3)).flatten(1).t().to(x.dtype).chunk(2)
        torch.empty_like(x)
        assert not calls.counts["launches"]
        torch.nn.functional.linear(x, x, x[:, 0].contiguous())
        x.add_(1.0)
        assert dict(calls.by_name) == {"clone": 1, "addmm": 1, "add_": 1}
        x.to("cpu", non_blocking=True), x.cpu()
        assert calls.counts["downs"] == 2 and calls.counts["waits"] == 1
        with pytest.raises(AssertionError, match="may not wait"):
            bool((x > 0).any())
