"""Prompts are computed once for each text, whoever shares it, and batching them changes no bit."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhfspec.core.records import SampleRequest, SamplingParams
from rlhfspec.engine.model.prefill import share_prompts
from rlhfspec.engine.model.prefill_plan import PrefillPiece, PrefillPlan
from rlhfspec.engine.model.runner import ModelRunner
from tests.helpers.backends import own_backend


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
