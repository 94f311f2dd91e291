"""Samples leave one engine and go on in another to the same bits, whatever of their caches comes along.

The pool of this engine never grows: its slots are allocated once, so there is no growth to survive; what may change
under a lease is the slot in which the sample lies.
"""

import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from rlhfspec.core.errors import RlhfSpecError, WeightsError
from rlhfspec.core.records import Completion, SampleRequest, SamplingParams
from rlhfspec.engine.cache.leases import Lease, LeaseEnded
from rlhfspec.engine.drafters.model_drafter import ModelDrafter
from rlhfspec.engine.engine import Engine
from rlhfspec.engine.exchange import DRAFT, TARGET, CachePiece
from rlhfspec.engine.weights.chunks import pack_weights, unpack_weights

PLAIN_SAMPLING = SamplingParams(max_new_tokens=24)
TOP_P = SamplingParams(max_new_tokens=24, top_p=0.8, temperature=0.7)
PROMPTS = (5, 40, 17, 1)


def bits(completion: Completion) -> tuple:
    arrays = (completion.token_ids, completion.policy_logprobs, completion.sampling_logprobs)
    return (completion.finish_reason, *(array.tobytes() for array in arrays))


def read(lease: Lease, engine: Engine, counts: dict[str, int], frame_tokens: int = 7) -> list[CachePiece]:
    """All leased caches, frame by frame."""
    pieces = []
    for part, stop in counts.items():
        size = engine.exchange.token_bytes[part]
        for start in range(0, stop, frame_tokens):
            end = min(start + frame_tokens, stop)
            out = np.empty((end - start) * size, dtype=np.uint8)
            lease.read(part, start, end, out)
            pieces.append(CachePiece(part=part, start=start, stop=end, cells=out))
    return pieces


def move(
    source: Engine, to: Engine, request: SampleRequest, *, steps_between: int = 2, keep=lambda piece: True
):
    """Move a running sample as the protocol does; return how many tokens the destination had to compute."""
    key = request.key
    counts = source.exchange.cached_tokens(key)
    assert counts is not None
    lease = source.exchange.lease(key)
    pieces = read(lease, source, counts)
    for _ in range(steps_between):
        assert all(completion.key != key for completion in source.step())
    source.exchange.end_lease(lease)
    left = source.exchange.detach(key, weight_version=0, shipped=counts)
    assert left is not None
    state, tails = left
    return to.exchange.attach(state, [piece for piece in (*pieces, *tails) if keep(piece)])


def finish(*engines: Engine) -> dict:
    done = {}
    for engine in engines:
        while engine.has_work:
            done.update((completion.key, completion) for completion in engine.step())
    return done


def started(engine: Engine, requests, steps: int = 3) -> Engine:
    for request in requests:
        engine.submit(request)
    for _ in range(steps):
        engine.step()
    return engine


@pytest.fixture(scope="module")
def expected(make_engine, make_requests) -> Callable[..., dict]:
    """Plain decoding of the same requests, made once."""
    made: dict[tuple, dict] = {}

    def of(sampling: SamplingParams, dtype: str) -> dict:
        if (sampling, dtype) not in made:
            done = make_engine("off", dtype=dtype).generate(make_requests(PROMPTS, sampling))
            made[sampling, dtype] = {completion.key: bits(completion) for completion in done}
        return made[sampling, dtype]

    return of


@pytest.mark.parametrize("sampling", [PLAIN_SAMPLING, TOP_P], ids=["T=1", "top-p"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "plan",
    [
        "off",
        "chain4",
        "tree8",
        "tree16",
        "suffix",
        "bandit",
        "head tree",
        "model pair",
        "head pair",
    ],
)
def test_a_moved_sample_goes_on_to_the_same_bits(make_engine, make_requests, expected, plan, dtype, sampling):
    requests = make_requests(PROMPTS, sampling)
    source = started(make_engine(plan, dtype=dtype, batch=4), requests[:3], steps=1)
    to = started(make_engine(plan, dtype=dtype, batch=4), requests[3:], steps=1)
    computed = move(source, to, requests[1], steps_between=1)
    assert computed == 0, "every cache came along"
    done = finish(source, to)
    assert {key: bits(completion) for key, completion in done.items()} == expected(sampling, dtype)
    moved = done[requests[1].key]
    assert (moved.draft_depths == 0).sum() == moved.num_decode_steps - (moved.draft_depths[-1] > 0)


MISSING = {
    "everything": lambda piece: False,
    "the draft cache": lambda piece: piece.part == TARGET,
    "the target cache": lambda piece: piece.part == DRAFT,
    "a frame in the middle": lambda piece: piece.start != 14,
    "the first frames": lambda piece: piece.start > 0,
    "the tails": lambda piece: piece.start < 40,
}


@pytest.mark.parametrize("plan", ["tree8", "head tree"])
@pytest.mark.parametrize("missing", MISSING)
def test_what_does_not_come_along_is_computed_and_changes_no_bit(
    make_engine, make_requests, expected, missing, plan
):
    requests = make_requests(PROMPTS, PLAIN_SAMPLING)
    source = started(make_engine(plan, batch=4), requests[:3], steps=1)
    to = started(make_engine(plan, batch=4), requests[3:], steps=1)
    computed = move(source, to, requests[1], steps_between=1, keep=MISSING[missing])
    assert (computed > 0) == (missing != "the draft cache")
    done = finish(source, to)
    assert {key: bits(completion) for key, completion in done.items()} == expected(PLAIN_SAMPLING, "float32")


def test_the_draft_cache_that_came_along_equals_a_dense_forward_of_the_draft_model(
    make_engine, make_requests, dense_logits, pairs
):
    requests = make_requests((30, 12), SamplingParams(max_new_tokens=60))
    source, to = started(make_engine("tree8", batch=4), requests), make_engine("tree8", batch=4)
    drafter = to.drafter
    assert isinstance(drafter, ModelDrafter)
    errors, missing = [], []
    catch_up = drafter.root_logits

    def checked(running):
        missing.append(int(running.lengths[0]) - drafter.num_cached_tokens(0))
        logits = catch_up(running)
        tokens = running.tokens[0, : running.lengths[0]]
        errors.append((logits[0] - dense_logits(pairs["float32"].draft, tokens)[-1]).abs().max().item())
        return logits

    drafter.root_logits = checked  # type: ignore[method-assign]
    move(source, to, requests[0])
    finish(to)
    assert max(errors) < 1e-4 and len(errors) > 5
    assert missing[0] <= 2, "the imported cache is used and not recomputed"


def test_a_damaged_draft_cache_would_be_seen(make_engine, make_requests, dense_logits, pairs):
    """The check above can fail."""
    requests = make_requests((30,), SamplingParams(max_new_tokens=60))
    source, to = started(make_engine("tree8", batch=4), requests), make_engine("tree8", batch=4)
    drafter = to.drafter
    assert isinstance(drafter, ModelDrafter)
    move(source, to, requests[0])
    drafter.cache.range_of(0, 3, 9).zero_()
    tokens = to._batch.tokens[0, : to._batch.lengths[0]]
    logits = drafter.root_logits(to._batch)
    assert (logits[0] - dense_logits(pairs["float32"].draft, tokens)[-1]).abs().max().item() > 1e-2


def test_tokens_of_other_weights_are_not_continued(make_engine, make_requests):
    (request,) = make_requests((10,), PLAIN_SAMPLING)
    source, to = started(make_engine("chain4"), [request], steps=1), make_engine("chain4")
    left = source.exchange.detach(request.key, weight_version=0)
    assert left is not None and left[1] == ()
    to.weight_version = 1
    with pytest.raises(WeightsError, match=r"weight version 0.*runs version 1.*from its prompt"):
        to.resume(left[0])
    to.resume(left[0].fresh(request))
    assert to.num_waiting == 1


def test_a_sample_leaves_the_waiting_queue_without_caches(make_engine, make_requests, expected):
    requests = make_requests(PROMPTS, PLAIN_SAMPLING)
    source, to = started(make_engine("tree8", batch=2), requests), make_engine("tree8")
    assert source.exchange.cached_tokens(requests[3].key) is None
    assert source.exchange.holds(requests[3].key)
    with pytest.raises(RlhfSpecError, match="does not run here"):
        source.exchange.lease(requests[3].key)
    left = source.exchange.detach(requests[3].key, weight_version=0, shipped={})
    assert left is not None and left[1] == () and not source.exchange.holds(requests[3].key)
    to.resume(left[0])
    done = finish(source, to)
    assert {k: bits(c) for k, c in done.items()} == expected(PLAIN_SAMPLING, "float32")


def test_what_is_not_here_cannot_leave(make_engine, make_requests):
    (request,) = make_requests((3,), PLAIN_SAMPLING)
    engine = make_engine("off")
    assert engine.exchange.detach(request.key, weight_version=0) is None
    assert not engine.exchange.drop(request.key)


def test_one_copy_is_dropped_by_its_epoch(make_engine, make_requests):
    (request,) = make_requests((3,), PLAIN_SAMPLING)
    engine = started(make_engine("off"), [replace(request, epoch=1)], steps=1)
    engine.submit(replace(request, epoch=2))
    assert not engine.exchange.drop(request.key, epoch=3)
    assert engine.exchange.drop(request.key, epoch=1) and engine.num_running == 0
    assert engine.exchange.drop(request.key, epoch=2) and not engine.has_work


def test_a_swap_between_two_reads_of_a_lease_gives_the_same_bytes(make_engine, make_requests):
    """The first sample finishes; the leased one, the last, moves into its slot in mid-export."""
    sampling = [SamplingParams(max_new_tokens=n) for n in (9, 60, 60)]
    requests = make_requests((4, 20, 50), sampling)
    engine = started(make_engine("tree8", batch=4), requests, steps=1)
    leased = requests[2].key
    counts = engine.exchange.cached_tokens(leased)
    assert counts is not None and engine._batch.slot_of(leased) == 2
    lease = engine.exchange.lease(leased)
    before = read(lease, engine, counts)
    halves: list[CachePiece] = []
    for number, piece in enumerate(before):
        if number == len(before) // 2:
            while engine._batch.slot_of(requests[0].key) is not None:
                engine.step()
            assert engine._batch.slot_of(leased) == 0 and lease.slot == 0
            # something else takes the old slot, so that its bytes are another's
            engine.submit(make_requests((60,), SamplingParams(max_new_tokens=5), seed=9)[0])
            engine.step()
        out = np.empty_like(piece.cells)
        lease.read(piece.part, piece.start, piece.stop, out)
        halves.append(CachePiece(part=piece.part, start=piece.start, stop=piece.stop, cells=out))
    for first, second in zip(before, halves, strict=True):
        assert np.array_equal(first.cells, second.cells)


def test_a_transfer_thread_reads_the_same_bytes_while_samples_come_finish_and_swap(
    make_engine, make_requests
):
    sampling = [SamplingParams(max_new_tokens=n) for n in (5, 8, 11, 14, 17, 20, 6, 9)]
    requests = make_requests((4, 20, 9, 30, 7, 12, 3, 25), sampling)
    engine = make_engine("tree8", batch=6)
    long = make_requests((50,), SamplingParams(max_new_tokens=100), seed=8)[0]
    long = type(long)(
        key=type(long.key)(run_seed=5, sample_index=77), prompt=long.prompt, sampling=long.sampling
    )
    started(engine, [*requests[:3], long], steps=1)
    for request in requests[3:]:
        engine.submit(request)
    counts = engine.exchange.cached_tokens(long.key)
    assert counts is not None
    lease = engine.exchange.lease(long.key)
    before = read(lease, engine, counts)
    differing, stop, slots = [], threading.Event(), set()

    def reader() -> None:
        while not stop.is_set():
            again = read(lease, engine, counts)
            differing.extend(
                a for a, b in zip(before, again, strict=True) if not np.array_equal(a.cells, b.cells)
            )

    thread = threading.Thread(target=reader)
    thread.start()
    try:
        while engine.num_running > 1:
            engine.step()
            slots.add(engine._batch.slot_of(long.key))
    finally:
        stop.set()
        thread.join(timeout=20.0)
    assert not thread.is_alive() and differing == [] and len(slots) > 1


def test_a_lease_ends_with_its_sample_and_ending_it_again_is_harmless(make_engine, make_requests):
    requests = make_requests((10, 12), [SamplingParams(max_new_tokens=4), SamplingParams(max_new_tokens=40)])
    engine = started(make_engine("off"), requests, steps=1)
    short, long = (engine.exchange.lease(request.key) for request in requests)
    while engine._batch.slot_of(requests[0].key) is not None:
        engine.step()
    out = np.empty(engine.exchange.token_bytes[TARGET], dtype=np.uint8)
    with pytest.raises(LeaseEnded, match="finished or left"):
        short.read(TARGET, 0, 1, out)
    long.read(TARGET, 0, 1, out)
    engine.exchange.detach(requests[1].key, weight_version=0)
    with pytest.raises(LeaseEnded):
        long.read(TARGET, 0, 1, out)
    for lease in (short, long, long):
        engine.exchange.end_lease(lease)
    assert engine.exchange._leases._given == []


def test_a_refit_in_mid_export_leaves_the_target_cache_and_starts_the_draft_cache_anew(
    make_engine, make_requests, expected, pairs
):
    requests = make_requests(PROMPTS, PLAIN_SAMPLING)
    source = started(make_engine("chain4", batch=4), requests[:3], steps=1)
    to = started(make_engine("chain4", batch=4), requests[3:], steps=1)
    counts = source.exchange.cached_tokens(requests[1].key)
    assert counts is not None
    lease = source.exchange.lease(requests[1].key)
    pieces = read(lease, source, {TARGET: counts[TARGET]})
    manifest, chunks = pack_weights(pairs["float32"].draft, name="draft", weight_version=1)
    source.load_weights(manifest, unpack_weights(manifest, chunks))
    assert source.exchange.cached_tokens(requests[1].key) == {TARGET: counts[TARGET], DRAFT: 0}
    left = source.exchange.detach(requests[1].key, weight_version=0, shipped=counts)
    assert left is not None and all(piece.part == TARGET for piece in left[1])
    assert to.exchange.attach(left[0], [*pieces, *left[1]]) == 0
    done = finish(source, to)
    assert {k: bits(c) for k, c in done.items()} == expected(PLAIN_SAMPLING, "float32")


def test_reserved_slots_are_given_to_no_waiting_sample(make_engine, make_requests):
    requests = make_requests((5, 6, 7), PLAIN_SAMPLING)
    engine = make_engine("off", batch=3)
    engine.exchange.num_reserved = 2
    started(engine, requests, steps=2)
    assert (engine.num_running, engine.num_waiting) == (1, 2)
    assert engine.exchange.num_free_slots == -2 and engine.load().num_free_slots == 0
    engine.exchange.num_reserved = 0
    engine.step()
    assert (engine.num_running, engine.num_waiting) == (3, 0)


def test_a_sample_that_comes_without_a_slot_is_an_error_that_says_so(make_engine, make_requests):
    first, second = make_requests((5, 6), PLAIN_SAMPLING)
    source, to = started(make_engine("off"), [first]), started(make_engine("off", batch=1), [second])
    left = source.exchange.detach(first.key, weight_version=0)
    assert left is not None
    with pytest.raises(RlhfSpecError, match=r"1 slots are taken; a slot must be reserved first"):
        to.exchange.attach(left[0], left[1])
    assert to.num_running == 1 and torch.isfinite(to.runner.pool.cells).all()
