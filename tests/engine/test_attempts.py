"""Samples made ahead run in slots that nobody else wants, and are drafts for the samples themselves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tiny_pool

from rlhfspec.core.records import ATTEMPT_EPOCH, FinishReason, SampleRequest
from rlhfspec.engine.engine import Engine

REQUESTS = tiny_pool.requests(6, new_tokens=24)


def attempts(requests: list[SampleRequest]) -> list[SampleRequest]:
    return [replace(one, is_attempt=True, epoch=ATTEMPT_EPOCH) for one in requests]


def submitted(requests: list[SampleRequest], *, slots: int = 4, plan: str = "chain4", **settings) -> Engine:
    engine = tiny_pool.engine(plan, slots=slots, **settings)
    for request in requests:
        engine.submit(request)
    return engine


def running(engine: Engine) -> list[tuple[int, bool]]:
    return [(one.key.sample_index, one.is_attempt) for one in engine._batch.requests]


def to_the_end(engine: Engine) -> list:
    done = []
    while engine.has_work:
        done += engine.step()
    return done


@pytest.fixture(scope="module")
def plain() -> dict:
    return tiny_pool.reference(REQUESTS)


def test_samples_have_their_slots_first_and_attempts_what_is_left(plain) -> None:
    engine = submitted([*attempts(REQUESTS[3:]), *REQUESTS[:3]])
    engine.step()
    assert running(engine)[:4] == [(0, False), (1, False), (2, False), (3, True)]
    done = to_the_end(engine)
    made = {c.key: c for c in done if c.epoch != ATTEMPT_EPOCH}
    assert not tiny_pool.mismatches(made, {key: plain[key] for key in made}) and len(made) == 3
    ahead = {c.key: c for c in done if c.epoch == ATTEMPT_EPOCH}
    assert not tiny_pool.mismatches(ahead, {key: plain[key] for key in ahead}) and len(ahead) == 3


def test_who_comes_takes_the_slot_of_the_shortest_attempt(plain) -> None:
    engine = submitted(attempts(REQUESTS[:3]))
    for _ in range(3):
        engine.step()
    engine.submit(attempts(REQUESTS[5:])[0])
    engine.step()
    assert engine.num_running == 4 and engine.num_free_slots == 4
    engine.submit(REQUESTS[4])
    ended = engine.step()
    assert [(c.key.sample_index, c.epoch, c.finish_reason) for c in ended] == [
        (5, ATTEMPT_EPOCH, FinishReason.CUT)
    ]
    assert ended[0].token_ids.tolist() == plain[ended[0].key].token_ids[: ended[0].num_tokens].tolist()
    assert (4, False) in running(engine) and engine.num_running == 4


def test_a_slot_that_is_kept_for_a_sample_on_its_way_is_free_at_once() -> None:
    engine = submitted(attempts(REQUESTS[:4]))
    engine.step()
    engine.exchange.num_reserved += 2
    engine.give_way()
    assert engine.num_running == 2
    assert engine.step()[:2] and engine.num_running <= 2, "what has ended is told, nobody takes the slots"


def test_the_sample_itself_ends_its_attempt(plain) -> None:
    engine = submitted(attempts(REQUESTS[:2]))
    engine.step()
    engine.submit(REQUESTS[0])
    done = to_the_end(engine)
    assert [c.epoch for c in done if c.key == REQUESTS[0].key] == [ATTEMPT_EPOCH, 0]
    made = {c.key: c for c in done if c.epoch == 0}
    assert not tiny_pool.mismatches(made, {REQUESTS[0].key: plain[REQUESTS[0].key]})


def test_all_of_them_end_before_new_weights_come() -> None:
    engine = submitted(attempts(REQUESTS))
    engine.step()
    ended = engine.end_attempts()
    assert not engine.has_work and len(ended) == 4, "those that waited have nothing to tell"
    assert all(c.epoch == ATTEMPT_EPOCH and c.num_tokens for c in ended)


def test_where_memory_is_short_attempts_go_first(plain) -> None:
    needed = tiny_pool.engine("off").exchange.token_bytes["target"] * (tiny_pool.MAX_TOTAL_TOKENS + 20) / 1e6
    engine = submitted([*attempts(REQUESTS[2:]), *REQUESTS[:2]], plan="off", kv_cache_mb=1.2 * needed)
    done = to_the_end(engine)
    assert engine.stats.num_preemptions == 0, "no sample had to wait for an attempt"
    made = {c.key: c for c in done if c.epoch == 0}
    assert not tiny_pool.mismatches(made, {key: plain[key] for key in made}) and len(made) == 2


def test_a_sample_that_moves_in_ends_its_attempt(plain) -> None:
    source, here = submitted(REQUESTS[:1]), submitted(attempts(REQUESTS[:2]))
    for engine in (source, here):
        engine.step()
    detached = source.exchange.detach(REQUESTS[0].key, weight_version=0)
    assert detached is not None
    here.supersede(REQUESTS[0].key)
    here.exchange.attach(*detached)
    assert sorted(running(here)) == [(0, False), (1, True)]
    state, _ = here.exchange.detach(REQUESTS[0].key, weight_version=0) or (None, ())
    assert state is not None and not state.request.is_attempt


def test_an_attempt_whose_logits_are_not_finite_ends_without_a_word(plain, monkeypatch) -> None:
    engine = submitted([*REQUESTS[:1], *attempts(REQUESTS[1:2])], plan="off")
    append = engine._batch.append

    def poisoned(token_ids, policy, sampling, num_accepted):
        for slot, request in enumerate(engine._batch.requests):
            if request.is_attempt:
                policy[slot, 0] = np.nan
        return append(token_ids, policy, sampling, num_accepted)

    monkeypatch.setattr(engine._batch, "append", poisoned)
    done = to_the_end(engine)
    assert (done[0].key.sample_index, done[0].epoch, done[0].num_tokens) == (1, ATTEMPT_EPOCH, 0)
    assert {c.key: c for c in done if c.epoch == 0}.keys() == {REQUESTS[0].key}
