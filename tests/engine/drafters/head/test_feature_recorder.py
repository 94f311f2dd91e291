"""What is recorded beside a running engine is what a forward over the finished text gives."""

from collections.abc import Callable

import pytest
import torch

from rlhfspec.core.config import EngineConfig, SpeculationConfig
from rlhfspec.core.records import SamplingParams
from rlhfspec.engine.build import build_engine
from rlhfspec.engine.drafters.head.feature_recorder import FeatureRecorder
from rlhfspec.learning.drafts.features import record_features
from tests.helpers.random_heads import random_head

PLANS = {
    "plain": SpeculationConfig(policy="off"),
    "tree": SpeculationConfig(policy="fixed", drafter="head", num_nodes=8, depth=4, branching=3),
    "suffix": SpeculationConfig(policy="fixed", drafter="suffix", num_nodes=5),
}


@pytest.fixture(scope="module")
def target(new_model: Callable):
    return new_model(7, "float32", num_layers=4)


def recorded(target, requests, plan: str, **settings):
    """Generate, and return the recorder and the completions."""
    made, recorder = recording_engine(target, plan, **settings)
    return recorder, made.generate(requests)


def recording_engine(target, plan: str, *, slots: int = 4, max_bytes: int = 1 << 28, **engine):
    """An engine, and what records beside it."""
    head = random_head(target)
    made = build_engine(
        target,
        head if PLANS[plan].drafter == "head" else None,
        engine=EngineConfig(
            device="cpu", max_running_samples=slots, max_prefill_tokens=48, probe=False, **engine
        ),
        speculation=PLANS[plan],
        max_total_tokens=128,
    )
    recorder = record_features(made, head.config.tapped_layers, max_bytes=max_bytes, dtype=torch.float32)
    return made, recorder


@pytest.mark.parametrize("plan", PLANS)
def test_rows_are_those_of_a_whole_forward(target, make_requests, plan: str) -> None:
    """More samples than slots, prompts of one token and of several packs, members of a group, stop tokens."""
    requests = make_requests((5, 60, 9, 9, 1, 30), SamplingParams(max_new_tokens=24, stop_token_ids=(11, 12)))
    recorder, done = recorded(target, requests, plan)
    sequences = recorder.take()
    texts = {tuple(s.token_ids.tolist()): s for s in sequences}
    taps = random_head(target).config.tapped_layers
    compared = 0
    for request, completion in zip(requests, done, strict=True):
        text = (*request.prompt.token_ids.tolist(), *completion.token_ids.tolist())
        if len(completion.token_ids) < 4:
            continue
        found = texts[text]
        outputs = []
        norm = target.base_model.norm.register_forward_pre_hook(
            lambda _, args, out=outputs: out.append(args[0][0])
        )
        with torch.inference_mode():
            states = target(torch.tensor([text]), output_hidden_states=True).hidden_states
        norm.remove()
        expected = torch.cat([states[layer][0, :-1] for layer in taps], -1)
        torch.testing.assert_close(found.taps, expected, atol=2e-4, rtol=1e-3)
        torch.testing.assert_close(found.last, outputs[0][found.first : -1], atol=2e-4, rtol=1e-3)
        compared += 1
    assert compared >= 5 and len(sequences) == compared
    assert recorder.num_bytes == 0, "nothing is held of samples that have left"


def test_memory_is_bounded(target, make_requests, monkeypatch) -> None:
    """Of finished sequences, and of those that run while they grow."""
    most: list[int] = []
    append = FeatureRecorder._append

    def watched(self: FeatureRecorder, slot: int, hidden: torch.Tensor) -> None:
        append(self, slot, hidden)
        most.append(self._open_bytes)

    monkeypatch.setattr(FeatureRecorder, "_append", watched)
    requests = make_requests((20,) * 12, SamplingParams(max_new_tokens=100))
    recorder, _ = recorded(target, requests, "plain", max_bytes=500_000)
    assert 0 < max(most) <= 500_000
    assert 0 < recorder.num_bytes <= 500_000
    assert 0 < len(recorder.take()) < 12


def test_preempted_samples_teach_nothing(target, make_requests) -> None:
    """Their response tokens are prefilled again, and a prefill ends before the last layer's output."""
    requests = make_requests((9, 12, 15), SamplingParams(max_new_tokens=30))
    engine, recorder = recording_engine(target, "plain")
    for request in requests:
        engine.submit(request)
    for _ in range(10):
        engine.step()
    engine.exchange.preempt(1, weight_version=0)
    assert not recorder.take(), "it has not ended"
    done = {c.key: c for c in engine.generate([])}
    while engine.has_work:
        done.update((c.key, c) for c in engine.step())
    kept = {tuple(sequence.token_ids.tolist()) for sequence in recorder.take()}
    texts = [(*r.prompt.token_ids.tolist(), *done[r.key].token_ids.tolist()) for r in requests]
    assert [text in kept for text in texts] == [True, False, True]


def test_no_token_changes(target, make_requests) -> None:
    requests = make_requests((5, 60, 9), SamplingParams(max_new_tokens=24))
    _, with_recorder = recorded(target, requests, "tree")
    plain = build_engine(
        target,
        None,
        engine=EngineConfig(device="cpu", max_running_samples=4, max_prefill_tokens=48, probe=False),
        speculation=PLANS["plain"],
        max_total_tokens=128,
    ).generate(requests)
    for ours, theirs in zip(with_recorder, plain, strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert ours.policy_logprobs.tobytes() == theirs.policy_logprobs.tobytes()
