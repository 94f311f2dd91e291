"""Responses that are cut between any two decode steps and go on later have the bits of those that were not."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
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
        caches_outlive_weights=keeps,
    )


def play(
    engine: Engine, asked: list[SampleRequest], chance: random.Random, *, keeps: bool
) -> dict[SampleKey, Completion]:
    """Cut everything after a few steps, again and again, until all is whole."""
    done: dict[SampleKey, Completion] = {}
    for request in asked:
        engine.submit(replace(request, keeps_caches=keeps, caches_outlive_weights=keeps))
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


def test_caches_wait_for_cut_responses_with_tokens_and_for_no_others():
    first, second = (
        replace(one, keeps_caches=True, caches_outlive_weights=True) for one in tiny_pool.requests(2)
    )
    engine = tiny_pool.engine("off", slots=2)
    short = replace(second, sampling=replace(second.sampling, max_new_tokens=1, stop_token_ids=()))
    engine.submit(first)
    engine.submit(short)
    (whole,) = engine.step()
    assert whole.finish_reason is FinishReason.LENGTH and not len(engine.exchange.kept)
    (begun,) = engine.cut({first.key})
    assert len(engine.exchange.kept) == 1
    # taken up, computed anew, and cut before its next token: no token says whose caches these are
    engine.exchange.kept._drop(first.key)
    engine.submit(go_on(first, begun, turn=1, keeps=True))
    engine._admit()
    (again,) = engine.cut({replace(first.key, turn=1)})
    assert again.num_tokens == begun.num_tokens and not len(engine.exchange.kept)


def test_caches_that_another_instance_computed_anew_are_not_taken_for_the_older_ones():
    """A response that moved, its caches computed at the destination, is cut before its next token."""
    (request,) = (
        replace(one, keeps_caches=True, caches_outlive_weights=True) for one in tiny_pool.requests(1)
    )
    source, destination = tiny_pool.engine("off", slots=2), tiny_pool.engine("off", slots=2)
    source.submit(request)
    source.step()
    (begun,) = source.cut({request.key})
    assert len(source.exchange.kept) == 1
    for engine in (source, destination):
        engine.weight_version = 1
    again = go_on(request, begun, turn=1, keeps=True)
    source.submit(again)
    source.step()
    assert [span.keeps_caches for span in source._batch.state(0, weight_version=1).weight_spans] == [
        False,
        True,
    ]
    state, _ = source.exchange.detach(again.key, weight_version=1)
    destination.exchange.attach(state, ())
    (cut,) = destination.cut({again.key})
    assert cut.num_tokens == 2 and not len(destination.exchange.kept)
    # and what an instance kept before is not there for a copy that comes back to it
    source.exchange.kept.put(again.key, np.arange(3), (), outlives_weights=True)
    assert len(source.exchange.kept) == 1
    source.exchange.attach(state, ())
    assert not len(source.exchange.kept)
