"""Turns of episodes: bits do not depend on plan, company or kept caches; a later turn computes only what is new."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import tiny_pool

from rlhfspec.core.config import EngineConfig, SpeculationConfig
from rlhfspec.core.errors import DataError
from rlhfspec.core.records import Completion, History, SampleKey, SampleRequest, SamplingParams
from rlhfspec.engine.build import build_engine
from rlhfspec.engine.engine import Engine
from rlhfspec.engine.weights.chunks import pack_weights, unpack_weights
from rlhfspec.learning.environments.episode import Episode, EpisodeLimits

LIMITS = EpisodeLimits(max_turns=4, max_turn_tokens=11, stop_token_ids=(5, 6))
SAMPLING = SamplingParams(max_new_tokens=60, stop_token_ids=(7,))


def answer(completion: Completion) -> np.ndarray:
    """What an environment gives to a turn: a function of its tokens."""
    last = int(completion.token_ids[-1])
    return (np.arange(last % 5) * 7 + last) % tiny_pool.VOCAB_SIZE


def play(
    engine: Engine, asked: list[SampleRequest], *, together: bool = False
) -> dict[SampleKey, Completion]:
    """Play all episodes on one engine, each turn as soon as the one before has ended, or all at once."""
    episodes = {request.key: Episode(request, LIMITS) for request in asked}
    done: dict[SampleKey, Completion] = {}
    for episode in episodes.values():
        engine.submit(episode.first())
    ended: list[Completion] = []
    while engine.has_work:
        ended += engine.step()
        if together and engine.has_work:
            continue
        now, ended = ended, []
        for completion in now:
            episode = episodes[completion.key.sample]
            episode.responses.append("")
            then = episode.goes_on(completion, answer(completion), reward=0.0, done=False)
            if isinstance(then, SampleRequest):
                engine.submit(then)
            else:
                done[then.key] = then
    return done


def bits(done: Mapping[SampleKey, Completion]) -> dict:
    return {key: (*tiny_pool.bits(one), one.is_sampled.tobytes()) for key, one in done.items()}


@pytest.fixture(scope="module")
def asked() -> list[SampleRequest]:
    return tiny_pool.requests(8, sampling=SAMPLING, group_size=2)


@pytest.fixture(scope="module")
def expected(asked) -> dict[SampleKey, Completion]:
    """One sample at a time, without speculation, nothing kept."""
    plain = tiny_pool.engine("off", slots=1)
    plain.exchange.kept._max_bytes = 0
    return {key: one for request in asked for key, one in play(plain, [request]).items()}


@pytest.mark.parametrize("plan", ["off", "tree8", "chain4", "suffix"])
def test_bits_do_not_depend_on_plan_and_company(plan, asked, expected):
    engine = tiny_pool.engine(plan, slots=3)
    done = play(engine, asked)
    assert bits(done) == bits(expected)
    assert engine.stats.num_kept_tokens > 0
    assert any((~one.is_sampled).any() for one in done.values())


def test_injected_tokens_are_the_environments_and_have_no_logprob(expected):
    for completion in expected.values():
        given = ~completion.is_sampled
        assert (completion.policy_logprobs[given] == 0).all() and (
            completion.sampling_logprobs[given] == 0
        ).all()
        assert (completion.policy_logprobs[~given] < 0).all()
        assert (completion.draft_depths[given] == 0).all()


def test_an_episode_with_nothing_said_in_between_is_one_long_response(asked):
    """The noise is that of key, first prompt and absolute position, whichever turn samples there."""
    long = [replace(r, sampling=replace(SAMPLING, max_new_tokens=40, stop_token_ids=())) for r in asked]
    reference = tiny_pool.reference(long)
    engine = tiny_pool.engine("tree8")
    for request in long:
        episode, completion = Episode(request, EpisodeLimits(max_turns=99, max_turn_tokens=7)), None
        turn: SampleRequest | Completion = episode.first()
        while isinstance(turn, SampleRequest):
            (completion,) = engine.generate([turn])
            episode.responses.append("")
            turn = episode.goes_on(completion, np.zeros(0, dtype=np.int64), reward=0.0, done=False)
        assert tiny_pool.bits(turn) == tiny_pool.bits(reference[request.key])


@pytest.mark.parametrize("plan", ["off", "tree8"])
def test_a_second_turn_prefills_only_what_is_new(plan, asked):
    engine = tiny_pool.engine(plan)
    episode = Episode(asked[3], LIMITS)
    (completion,) = engine.generate([episode.first()])
    first = engine.stats.num_prefill_tokens
    assert first == len(asked[3].prompt.token_ids) - 1
    episode.responses.append("")
    then = episode.goes_on(completion, np.array([9, 8, 9]), reward=0.0, done=False)
    assert isinstance(then, SampleRequest)
    engine.generate([then])
    # the turn's last token was in no cache, the observation's last is computed by the first decode step
    assert engine.stats.num_prefill_tokens - first == 3
    assert engine.stats.num_kept_tokens == len(asked[3].prompt.token_ids) + completion.num_tokens - 1


def test_kept_caches_yield_to_running_samples_and_are_computed_again(asked, expected):
    """Memory for little more than one sample of full length: hardly anything can be kept, and no bit changes."""
    roomy = tiny_pool.engine("tree8", slots=8)
    play(roomy, asked, together=True)
    short = tiny_pool.engine("tree8", slots=8, kv_cache_mb=0.1)
    done = play(short, asked, together=True)
    assert bits(done) == bits(expected)
    assert short.stats.num_kept_tokens < roomy.stats.num_kept_tokens
    assert short.stats.num_prefill_tokens > roomy.stats.num_prefill_tokens
    room = short.exchange.kv_admission
    assert room.free_bytes is not None and short.exchange.kept.num_bytes <= room.free_bytes


def test_new_weights_leave_nothing_kept(asked):
    engine = tiny_pool.engine("off")
    engine.generate([Episode(asked[0], LIMITS).first()])
    assert len(engine.exchange.kept) == 1
    manifest, chunks = pack_weights(tiny_pool.target(), name="target", weight_version=1)
    engine.load_weights(manifest, unpack_weights(manifest, chunks))
    assert len(engine.exchange.kept) == 0 and engine.exchange.kept.num_bytes == 0


def test_a_response_that_does_not_begin_with_its_history_is_refused(asked):
    history = History(
        token_ids=np.array([1, 2]),
        sampled=np.array([True]),
        policy_logprobs=np.zeros(2, dtype=np.float32),
        sampling_logprobs=np.zeros(2, dtype=np.float32),
    )
    with pytest.raises(DataError, match="begins with its whole history"):
        tiny_pool.engine("off").submit(replace(asked[0], history=history))


def engine_of(weight_version: int) -> Engine:
    """Plain decoding by the target, or by weights that are a little different."""
    return build_engine(
        copy.deepcopy(tiny_pool.target()) if not weight_version else tiny_pool.draft(),
        None,
        engine=EngineConfig(device="cpu", max_running_samples=4, probe=False),
        speculation=SpeculationConfig(policy="off"),
        max_total_tokens=tiny_pool.MAX_TOTAL_TOKENS,
        weight_version=weight_version,
    )


def test_what_goes_on_with_new_weights_is_computed_by_them_and_shared_with_others():
    """Two samples of one prompt: one begun by older weights, whose caches are gone, and one that is new."""
    begun, new = tiny_pool.requests(6, group_size=3)[4:]
    engine = engine_of(0)
    short = replace(begun.sampling, max_new_tokens=10, stop_token_ids=())
    (first,) = engine.generate([replace(begun, sampling=short, keeps_caches=True)])
    manifest, chunks = pack_weights(tiny_pool.draft(), name="target", weight_version=1)
    engine.load_weights(manifest, unpack_weights(manifest, chunks))
    going_on = replace(begun, key=replace(begun.key, turn=1), history=first.as_history())
    done = engine.generate([going_on, new])
    spans = [[(span.weight_version, span.first_position) for span in one.weight_spans] for one in done]
    assert spans == [[(0, 0), (1, 10)], [(1, 0)]]
    for request, one in zip((going_on, new), done, strict=True):
        (expected,) = engine_of(1).generate([request])
        assert tiny_pool.bits(one) == tiny_pool.bits(expected)
