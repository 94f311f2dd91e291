"""The engine's contract: refusals, records that add up, weights between samples and never under them."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from transformers import PreTrainedModel

from rlhfspec.core.config import EngineConfig, SpeculationConfig
from rlhfspec.core.decode_records import GenerationStats
from rlhfspec.core.errors import ConfigError, DataError, ModelError, WeightsError
from rlhfspec.core.records import Completion, Prompt, SampleRequest, SamplingParams, WeightSpan
from rlhfspec.engine.build import build_engine
from rlhfspec.engine.drafters.model_drafter import ModelDrafter
from rlhfspec.engine.engine import Engine
from rlhfspec.engine.weights.chunks import pack_weights, unpack_weights

Make = Callable[..., Engine]
MakeRequests = Callable[..., list[SampleRequest]]
NewModel = Callable[..., PreTrainedModel]
LENGTHS = (4, 20, 9, 31, 14)


def own_pair(new_model: NewModel, pairs):
    """A pair of this test's own: loading weights must not change the shared one."""
    pair = pairs["float32"]
    return type(pair)(target=new_model(1, "float32"), draft=new_model(2, "float32", num_layers=1))


def test_what_cannot_fit_is_refused_at_once(make_engine: Make, make_requests: MakeRequests) -> None:
    engine = make_engine("off", max_total_tokens=40)
    (fits,) = make_requests((30,), SamplingParams(max_new_tokens=10))
    engine.submit(fits)
    (too_long,) = make_requests((30,), SamplingParams(max_new_tokens=11))
    with pytest.raises(DataError, match=r"prompt 0: 30 prompt tokens and up to 11 new ones .* 40 tokens"):
        engine.submit(too_long)
    with pytest.raises(DataError):
        engine.submit(replace(fits, prompt=Prompt(prompt_id=7, token_ids=np.zeros(0, dtype=np.int64))))
    assert engine.num_waiting == 1


def test_models_that_cannot_serve_are_refused(new_model: NewModel) -> None:
    target = new_model(1, "float32", max_position_embeddings=64)

    def build(draft: PreTrainedModel | None, tokens: int) -> Engine:
        return build_engine(
            target,
            draft,
            engine=EngineConfig(device="cpu", probe=False, max_running_samples=1),
            speculation=SpeculationConfig(policy="fixed", num_nodes=4),
            max_total_tokens=tokens,
        )

    with pytest.raises(ModelError, match="65 tokens, the target model's context is 64"):
        build(new_model(2, "float32"), 65)
    with pytest.raises(ModelError, match="draft model has 50 token ids, the tokenizer 64"):
        build(new_model(2, "float32", vocab_size=50), 64)
    with pytest.raises(ConfigError, match=r"models\.draft"):
        build(None, 64)


def test_a_wider_draft_vocabulary_serves_and_changes_nothing(
    make_engine: Make, make_requests: MakeRequests, new_model: NewModel, pairs
) -> None:
    padded = type(pairs["float32"])(
        target=pairs["float32"].target, draft=new_model(2, "float32", vocab_size=80)
    )
    requests = make_requests(LENGTHS, SamplingParams(max_new_tokens=8))
    done = make_engine("tree8", pair=padded).generate(requests)
    plain = make_engine("off").generate(requests)
    assert [c.token_ids.tolist() for c in done] == [c.token_ids.tolist() for c in plain]


def test_padded_token_ids_are_never_sampled(make_requests: MakeRequests, pairs) -> None:
    engine = build_engine(
        pairs["float32"].target,
        None,
        engine=EngineConfig(device="cpu", probe=False, max_running_samples=8),
        speculation=SpeculationConfig(policy="off"),
        max_total_tokens=64,
        vocab_size=10,
    )
    done = engine.generate(make_requests(LENGTHS, SamplingParams(max_new_tokens=30), vocab_size=10))
    tokens = np.concatenate([c.token_ids for c in done])
    assert tokens.max() == 9


def finish(engine: Engine) -> list[Completion]:
    done = []
    while engine.has_work:
        done += engine.step()
    return done


@pytest.mark.parametrize("plan", ["off", "chain4", "tree16", "suffix"])
def test_records_add_up(make_engine: Make, make_requests: MakeRequests, plan: str) -> None:
    engine = make_engine(plan, batch=3)
    requests = make_requests(LENGTHS, [SamplingParams(max_new_tokens=n) for n in (12, 5, 9, 1, 7)])
    done = engine.generate(requests)
    stats, records = engine.stats, list(engine.step_records)
    assert stats.num_completions == len(done) == 5
    assert stats.num_emitted_tokens == sum(c.num_tokens for c in done) == 12 + 5 + 9 + 1 + 7
    assert stats.num_prefill_tokens == sum(LENGTHS) - len(LENGTHS), "the last prompt token is the first root"
    assert stats.num_decode_steps == len(records)
    assert (
        stats.num_sample_steps == sum(r.num_samples for r in records) == sum(c.num_decode_steps for c in done)
    )
    assert stats.num_accepted_tokens == sum(c.num_accepted_tokens for c in done)
    assert stats.num_emitted_tokens <= stats.num_accepted_tokens + stats.num_sample_steps
    assert stats.num_accepted_rank2_plus <= stats.num_accepted_tokens <= stats.num_draft_tokens
    assert [r.decode_step for r in records] == list(range(len(records)))
    for name in ("num_draft_tokens", "num_accepted_tokens", "num_emitted_tokens", "num_accepted_rank2_plus"):
        assert sum(getattr(record, name) for record in records) == getattr(stats, name)
    for one in done:
        depths = one.draft_depths
        assert depths is not None and len(depths) == one.num_tokens
        # a step ends with the target's own token, but where the response's end cuts it
        assert (depths == 0).sum() == one.num_decode_steps - (depths[-1] > 0)
        follows = np.concatenate([[0], depths[:-1]]) + 1
        assert ((depths == 0) | (depths == follows)).all()
    assert max(r.num_samples for r in records) == 3
    assert records[0].context_tokens == sum(LENGTHS[:3])
    if plan == "off":
        assert stats.num_draft_tokens == 0
        assert stats.mean_acceptance_length == 1.0


def test_seconds_come_from_the_clock_given(make_requests: MakeRequests, pairs) -> None:
    ticks = count()
    engine = build_engine(
        pairs["float32"].target,
        None,
        engine=EngineConfig(device="cpu", probe=False, max_running_samples=2),
        speculation=SpeculationConfig(policy="off"),
        max_total_tokens=64,
        clock=lambda: float(next(ticks)),
    )
    engine.generate(make_requests((5,), SamplingParams(max_new_tokens=3)))
    for record in engine.step_records:
        assert (record.draft_s, record.verify_s, record.accept_s) == (1.0, 1.0, 1.0)
        # ticks before and after planning, and one behind the last reading; then the policy takes note
        assert record.step_s == 6.0
        assert record.select_s in (1.0, 2.0)
    assert engine.stats.prefill_s == 1.0
    assert engine.stats.busy_s == 1.0 + 3 * 6.0
    assert engine.load().goodput_tokens_per_s == pytest.approx(3 / 18.0)
    assert engine.load().goodput_samples == 1.0


def test_load_counts_slots_and_tokens(make_engine: Make, make_requests: MakeRequests) -> None:
    engine = make_engine("off", batch=4, max_total_tokens=64)
    idle = engine.load()
    assert (idle.num_running, idle.num_waiting, idle.num_free_slots, idle.context_tokens) == (0, 0, 4, 0)
    assert idle.stats == GenerationStats()
    for request in make_requests((10, 20), SamplingParams(max_new_tokens=5)):
        engine.submit(request)
    waiting = engine.load()
    assert (waiting.num_running, waiting.num_waiting, waiting.num_free_slots) == (0, 2, 2)
    engine.step()
    running = engine.load()
    assert (running.num_running, running.num_waiting, running.num_free_slots) == (2, 0, 2)
    assert running.context_tokens == 10 + 20 + 2
    assert (running.decode_step, running.instance) == (1, "local")


def test_progress_counts_the_responses_so_far(make_engine: Make, make_requests: MakeRequests) -> None:
    engine = make_engine("tree8", batch=2)
    requests = make_requests(LENGTHS, SamplingParams(max_new_tokens=20))
    for request in requests:
        engine.submit(request)
    engine.step()
    engine.step()
    so_far = engine.progress()
    assert set(so_far) == {request.key for request in requests[:2]}
    states = [engine._batch.state(slot, weight_version=0) for slot in range(2)]
    done = {completion.key: completion.token_ids for completion in finish(engine)}
    for state in states:
        key, count = state.request.key, len(state.token_ids)
        assert count >= 2 and so_far[key] == count
        assert state.token_ids.tolist() == done[key][:count].tolist()
    assert engine.progress() == {}


def test_cancelled_samples_come_back_and_can_be_sampled_anew(
    make_engine: Make, make_requests: MakeRequests
) -> None:
    engine = make_engine("tree8", batch=2)
    requests = make_requests(LENGTHS, SamplingParams(max_new_tokens=10))
    expected = make_engine("off").generate(requests)
    for request in requests:
        engine.submit(request)
    engine.step()
    cancelled = engine.cancel_all()
    assert {request.key for request in cancelled} == {request.key for request in requests}
    assert not engine.has_work
    assert engine.step() == []
    again = engine.generate(requests)
    assert [c.token_ids.tolist() for c in again] == [c.token_ids.tolist() for c in expected]


def test_completions_carry_their_request_and_versions(make_engine: Make, make_requests: MakeRequests) -> None:
    engine = make_engine("chain4")
    engine.weight_version = 4
    (request,) = make_requests((5,), SamplingParams(max_new_tokens=3))
    (done,) = engine.generate([replace(request, group_id=8, epoch=2)])
    assert (done.key, done.prompt_id, done.group_id, done.epoch) == (request.key, 0, 8, 2)
    assert done.weight_spans == (WeightSpan(weight_version=4, first_position=0),)
    assert done.instance == "local"


def test_target_weights_wait_for_open_samples(
    make_engine: Make, make_requests: MakeRequests, new_model: NewModel, pairs
) -> None:
    engine = make_engine("tree8", pair=own_pair(new_model, pairs))
    manifest, chunks = pack_weights(new_model(9, "float32"), name="target", weight_version=1)
    tensors = unpack_weights(manifest, chunks)
    requests = make_requests(LENGTHS, SamplingParams(max_new_tokens=10))
    engine.submit(requests[0])
    with pytest.raises(WeightsError, match="0 running and 1 waiting"):
        engine.load_weights(manifest, tensors)
    engine.step()
    with pytest.raises(WeightsError, match="1 running and 0 waiting"):
        engine.load_weights(manifest, tensors)
    assert engine.weight_version == 0
    finish(engine)
    engine.load_weights(manifest, tensors)
    assert engine.weight_version == engine.load().weight_version == 1
    fresh = make_engine("off", pair=replace(pairs["float32"], target=new_model(9, "float32")))
    ours, expected = engine.generate(requests), fresh.generate(requests)
    assert [c.token_ids.tolist() for c in ours] == [c.token_ids.tolist() for c in expected]
    assert {c.weight_spans[0].weight_version for c in ours} == {1}


def test_draft_weights_may_change_under_open_samples(
    make_engine: Make, make_requests: MakeRequests, new_model: NewModel, pairs
) -> None:
    engine = make_engine("tree8", pair=own_pair(new_model, pairs))
    requests = make_requests(LENGTHS, SamplingParams(max_new_tokens=12))
    expected = make_engine("off").generate(requests)
    for request in requests:
        engine.submit(request)
    engine.step()
    manifest, chunks = pack_weights(new_model(6, "float32", num_layers=1), name="draft", weight_version=7)
    engine.load_weights(manifest, unpack_weights(manifest, chunks))
    assert (engine.drafter_version, engine.weight_version) == (7, 0)
    assert isinstance(engine.drafter, ModelDrafter)
    assert [engine.drafter.num_cached_tokens(slot) for slot in range(5)] == [0] * 5
    done = {completion.key: completion for completion in finish(engine)}
    assert [done[r.key].token_ids.tolist() for r in requests] == [c.token_ids.tolist() for c in expected]


def test_a_draft_model_that_fails_its_comparison_drops_what_the_old_one_cached(
    monkeypatch: pytest.MonkeyPatch,
    make_engine: Make,
    make_requests: MakeRequests,
    new_model: NewModel,
    pairs,
) -> None:
    engine = make_engine("tree8", pair=own_pair(new_model, pairs))
    drafter = engine.drafter
    assert isinstance(drafter, ModelDrafter)
    (request,) = make_requests((20,), SamplingParams(max_new_tokens=12))
    engine.submit(request)
    engine.step()
    engine.exchange.kept.put(request.key, request.prompt.token_ids, ())
    assert drafter.num_cached_tokens(0) > 0 and len(engine.exchange.kept) == 1
    manifest, chunks = pack_weights(new_model(6, "float32", num_layers=1), name="draft", weight_version=7)
    load = drafter.runner._forward.load

    def damaged(names, parts) -> str:
        load(names, parts)
        return "lm_head"

    monkeypatch.setattr(drafter.runner._forward, "load", damaged)
    with pytest.raises(WeightsError, match="the copy of lm_head"):
        engine.load_weights(manifest, unpack_weights(manifest, chunks))
    assert drafter.num_cached_tokens(0) == 0 and not len(engine.exchange.kept)


def test_draft_weights_without_a_draft_model_are_refused(make_engine: Make, new_model: NewModel) -> None:
    manifest, chunks = pack_weights(new_model(2, "float32"), name="draft", weight_version=1)
    with pytest.raises(WeightsError, match="no draft model"):
        make_engine("suffix").load_weights(manifest, unpack_weights(manifest, chunks))
