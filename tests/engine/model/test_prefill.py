"""Prompts are computed once for each text, whoever shares it, and batching them changes no bit."""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from importlib import import_module

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhfspec.core.records import SampleRequest, SamplingParams
from rlhfspec.engine.attention import backends
from rlhfspec.engine.attention.backends import ATTENTION
from rlhfspec.engine.cache.kv_pool import KVPool, KVShape
from rlhfspec.engine.model.prefill import share_prompts
from rlhfspec.engine.model.prefill_plan import PrefillPiece, PrefillPlan
from rlhfspec.engine.model.runner import ModelRunner
from tests.helpers.backends import own_backend
from tests.helpers.devices import DEVICES
from tests.helpers.variable_length import as_documented


def piece(slot: int, start: int, length: int) -> PrefillPiece:
    return PrefillPiece(slot=slot, start=start, length=length)


def test_equal_runs_are_computed_once_by_hand() -> None:
    tokens = np.array([[1, 2, 3, 4, 9], [1, 2, 3, 0, 0], [5, 6, 7, 0, 0], [5, 6, 7, 8, 0], [5, 6, 7, 0, 0]])
    pieces = [piece(1, 0, 3), piece(2, 0, 3), piece(3, 0, 4), piece(4, 0, 3)]
    computed, copies = share_prompts(tokens, pieces, np.array([4, 0, 0, 0, 0]))
    # slot 1 is a prefix of what slot 0 holds; slot 3 is longer than slot 2; slot 4 equals slot 2
    assert computed == [pieces[1], pieces[2]]
    assert copies == [(0, pieces[0]), (2, pieces[3])]


def test_a_slot_that_does_not_hold_enough_lends_nothing() -> None:
    tokens = np.array([[1, 2, 3, 4], [1, 2, 3, 0]])
    computed, copies = share_prompts(tokens, [piece(1, 0, 3)], np.array([2, 0]))
    assert computed == [piece(1, 0, 3)] and copies == []


def test_later_runs_are_not_shared() -> None:
    tokens = np.array([[1, 2, 3, 4], [1, 2, 3, 4]])
    computed, copies = share_prompts(tokens, [piece(1, 2, 2)], np.array([4, 2]))
    assert computed == [piece(1, 2, 2)] and copies == []


def group(make_requests: Callable, size: int) -> list[SampleRequest]:
    """Members of one group: the same prompt under different keys."""
    requests = make_requests([37] * size, SamplingParams(max_new_tokens=24, temperature=1.0))
    return [replace(request, prompt=requests[0].prompt) for request in requests]


@pytest.mark.parametrize("plan", ["off", "chain4", "tree8"])
def test_a_group_of_eight_prefills_its_prompt_once(
    make_engine: Callable, make_requests: Callable, plan: str
) -> None:
    requests = group(make_requests, 8)
    grouped = make_engine(plan, batch=8)
    together = grouped.generate(requests)
    assert grouped.stats.num_prefill_tokens == len(requests[0].prompt.token_ids) - 1
    apart = [make_engine("off", batch=1).generate([request])[0] for request in requests]
    for ours, alone in zip(together, apart, strict=True):
        assert ours.token_ids.tolist() == alone.token_ids.tolist()
        assert ours.policy_logprobs.tobytes() == alone.policy_logprobs.tobytes()


def test_late_members_copy_from_running_ones(make_engine: Callable, make_requests: Callable) -> None:
    """Two slots, five members: each late one finds the prompt in the slot that still runs, or computes it."""
    requests = group(make_requests, 5)
    engine = make_engine("chain4", batch=2)
    done = engine.generate(requests)
    prompt = len(requests[0].prompt.token_ids) - 1
    assert prompt <= engine.stats.num_prefill_tokens < 5 * prompt
    alone = [make_engine("off", batch=1).generate([request])[0] for request in requests]
    assert [c.token_ids.tolist() for c in done] == [c.token_ids.tolist() for c in alone]


@pytest.mark.parametrize("stock", [False, True])
def test_prompts_of_all_lengths_prefilled_together_equal_each_alone(new_model, stock: bool) -> None:
    model = new_model(1, "float32")
    lengths = [3, 40, 1, 17, 129, 64, 5]
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(64, (length,), generator=generator) for length in lengths]

    def new_runner() -> ModelRunner:
        return ModelRunner(
            model, num_slots=8, capacity=160, backend=own_backend(), vocab_size=64, stock=stock
        )

    def cells(runner: ModelRunner, slot: int, length: int) -> Tensor:
        return runner.pool.range_of(slot, 0, length)

    together = new_runner()
    plan = PrefillPlan(
        pool=together.pool,
        attention=together.attention,
        pieces=[piece(slot, 0, length) for slot, length in enumerate(lengths)],
    )
    together.fill(torch.cat(prompts), torch.cat([torch.arange(length) for length in lengths]), plan)
    alone = new_runner()
    for slot, prompt in enumerate(prompts):
        plan = PrefillPlan(pool=alone.pool, attention=alone.attention, pieces=[piece(slot, 0, len(prompt))])
        alone.fill(prompt, torch.arange(len(prompt)), plan)
    for slot, length in enumerate(lengths):
        assert torch.equal(cells(together, slot, length), cells(alone, slot, length))


def attended(device: str, window: int | None, softcap: float | None, num_padding: int = 0) -> Tensor:
    """What a packed prefill in 16 bits attends to: a stretch with cached tokens, then fresh ones."""
    heads, shared, size = 2, 3, 16
    shape = KVShape(num_layers=1, num_kv_heads=heads, num_heads=heads * shared, head_size=size)
    where = torch.device(device)
    pool = KVPool(shape, num_slots=6, capacity=128, dtype=torch.bfloat16, device=where)
    generator = torch.Generator().manual_seed(3)
    pool.cells.copy_(torch.randn(pool.cells.shape, generator=generator))
    pieces = [piece(3, 0, 9), piece(0, 21, 30), piece(1, 0, 40), piece(4, 0, 1), piece(2, 0, 17)]
    num_tokens = sum(p.length for p in pieces)
    qkv = torch.randn(num_tokens + num_padding, heads, shared + 2, size, generator=generator).to(where)
    plan = PrefillPlan(pool=pool, attention=ATTENTION["sdpa"], pieces=pieces)
    how = {"scaling": 0.3, "softcap": softcap, "sliding_window": window}
    out = plan.attend(0, qkv, **how)  # pyright: ignore[reportArgumentType]
    assert out.shape == (len(qkv), heads * shared * size) and not out[num_tokens:].any()
    return out.float().cpu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [None, 5])
def test_fresh_prompts_attend_without_a_mask_to_what_they_see_with_one(
    monkeypatch: pytest.MonkeyPatch, device: str, window: int | None
) -> None:
    calls = []

    def counted(*args, **kwargs) -> Tensor:
        calls.append(len(args[0]))
        return flash(*args, **kwargs)

    flash = as_documented if device == "cpu" else import_module("torch.nn.attention.varlen").varlen_attn
    backends._variable_length.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr("torch.nn.attention.varlen.varlen_attn", wraps(flash)(counted))
        found = attended(device, window, None, num_padding=2)
        assert calls == [40 + 1 + 17]
        # scores bounded by a softcap are the reference's
        attended(device, window, 20.0)
        assert len(calls) == 1
    backends._variable_length.cache_clear()
    monkeypatch.setattr(backends, "_variable_length", lambda: None)
    torch.testing.assert_close(found, attended(device, window, None, num_padding=2), atol=0.03, rtol=0.03)
