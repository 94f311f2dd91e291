"""Responses that are cut between any two decode steps and go on later have the bits of those that were not."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import tiny_pool

from rlhfspec.core.records import Completion, FinishReason, SampleKey, SampleRequest
from rlhfspec.engine.engine import Engine


def go_on(request: SampleRequest, so_far: Completion, *, turn: int, keeps: bool) -> SampleRequest:
    """Ask for the rest, as a pipeline does."""
    history = so_far.as_history() if so_far.num_tokens else None
    return replace(
        request,
        key=replace(request.key, turn=turn),
        history=history,
        keeps_caches=keeps,
    )


def play(
    engine: Engine, asked: list[SampleRequest], chance: random.Random, *, keeps: bool
) -> dict[SampleKey, Completion]:
    """Cut everything after a few steps, again and again, until all is whole."""
    done: dict[SampleKey, Completion] = {}
    for request in asked:
        engine.submit(replace(request, keeps_caches=keeps))
    turns, by_key = 0, {request.key: request for request in asked}
    open_keys = set(by_key)
    while len(done) < len(asked):
        ended: list[Completion] = []
        for _ in range(chance.randint(0, 6)):
            ended += engine.step()
        assert all(one.finish_reason is not FinishReason.CUT for one in ended)
        open_keys -= {one.key for one in ended}
        # what the order does not name goes on, as where it comes late
        some = {key for key in sorted(open_keys, key=str) if chance.random() < 0.7}
        ended += engine.cut(some)
        assert not engine.cut(some)
        open_keys -= {one.key for one in ended}
        turns += 1
        for completion in ended:
            key = completion.key.sample
            if completion.finish_reason is FinishReason.CUT:
                engine.submit(again := go_on(by_key[key], completion, turn=turns, keeps=keeps))
                open_keys.add(again.key)
            else:
                done[key] = replace(completion, key=key, sampled=None)
    return done


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("plan", ["off", "tree8", "suffix", "chain4"])
def test_bits_do_not_depend_on_where_a_response_is_cut(plan, keeps):
    asked = tiny_pool.requests(8, group_size=2)
    expected = tiny_pool.reference(asked)
    engine = tiny_pool.engine(plan, slots=3)
    done = play(engine, asked, random.Random(1), keeps=keeps)
    assert {key: tiny_pool.bits(one) for key, one in done.items()} == {
        key: tiny_pool.bits(one) for key, one in expected.items()
    }
    assert all(len(one.weight_spans) == 1 for one in done.values())
    # caches of cut responses were kept, and taken again
    assert (engine.stats.num_kept_tokens > 0) == keeps


def test_what_has_not_begun_comes_back_as_it_was_asked_for():
    first, second = tiny_pool.requests(2)
    engine = tiny_pool.engine("off", slots=1)
    engine.submit(first)
    engine.submit(second)
    engine.step()
    assert not engine.cut({replace(first.key, turn=7)})
    begun, waiting = engine.cut({first.key, second.key})
    assert (begun.key, begun.num_tokens, begun.finish_reason) == (first.key, 1, FinishReason.CUT)
    assert (waiting.key, waiting.num_tokens, waiting.weight_spans) == (second.key, 0, ())
    engine.submit(go_on(first, begun, turn=1, keeps=False))
    (again,) = engine.cut({replace(first.key, turn=1)})
    assert again.token_ids.tolist() == begun.token_ids.tolist() and again.weight_spans == begun.weight_spans
