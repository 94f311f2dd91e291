"""Drafts that requests bring: an honest one is accepted whole, and none changes a token, whatever drafts beside it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tiny_pool

from rlhfspec.core.config import EngineConfig, SpeculationConfig
from rlhfspec.core.records import Completion, SampleRequest
from rlhfspec.engine.build import build_engine
from rlhfspec.engine.drafters.look_up_drafter import LookUpDrafter
from rlhfspec.policies.drafting.baselines import FixedPolicy
from tests.helpers.hand_profile import hand_cost, hand_profile

NODES = 5
PROFILE = hand_profile(0.6, hand_cost(forward_ms=1.0, token_ms=0.001, level_ms=0.05))
REQUESTS = tiny_pool.requests(6, new_tokens=30)


@pytest.fixture(scope="module")
def plain() -> dict:
    return tiny_pool.reference(REQUESTS)


def again(records: dict) -> tuple[list[Completion], int]:
    """All requests generated beside these records, and the decode steps it took."""
    engine = build_engine(
        tiny_pool.target(),
        None,
        engine=EngineConfig(device="cpu", max_running_samples=len(REQUESTS), probe=False),
        speculation=SpeculationConfig(policy="off"),
        max_total_tokens=tiny_pool.MAX_TOTAL_TOKENS,
        policy=FixedPolicy(num_nodes=NODES, depth=NODES, branching=1),
        drafter=LookUpDrafter(tiny_pool.VOCAB_SIZE),
    )
    return engine.generate(
        [replace(r, draft=records.get(r.key)) for r in REQUESTS]
    ), engine.stats.num_decode_steps


def test_an_honest_record_is_accepted_whole(plain) -> None:
    completions, num_steps = again({key: one.token_ids for key, one in plain.items()})
    assert not tiny_pool.mismatches({one.key: one for one in completions}, plain)
    assert num_steps == max(-(-one.num_tokens // (NODES + 1)) for one in completions)


def spoiled(kind: str, request: SampleRequest, tokens: np.ndarray) -> np.ndarray | None:
    if kind == "one token":
        return np.where(np.arange(len(tokens)) == 7, tokens ^ 1, tokens)
    if kind == "no tokens":
        return np.where(
            np.arange(len(tokens)) % 4 == 3, -5 if request.key.sample_index % 2 else 10**6, tokens
        )
    return None if request.key.sample_index % 2 else tokens[:9]


@pytest.mark.parametrize("kind", ["one token", "no tokens", "missing or short"])
def test_a_false_record_changes_no_token(plain, kind: str) -> None:
    records = {one.key: spoiled(kind, one, plain[one.key].token_ids) for one in REQUESTS}
    completions, _ = again({key: tokens for key, tokens in records.items() if tokens is not None})
    assert not tiny_pool.mismatches({one.key: one for one in completions}, plain)


@pytest.mark.parametrize(
    ("drafter", "policy"),
    [
        ("none", "off"),
        *((drafter, policy) for drafter in ("model", "suffix") for policy in ("fixed", "goodput")),
    ],
)
def test_beside_any_drafter_an_honest_draft_is_used_and_a_false_one_parts(plain, drafter, policy) -> None:
    engine = build_engine(
        tiny_pool.target(),
        tiny_pool.draft() if drafter == "model" else None,
        engine=EngineConfig(device="cpu", max_running_samples=3, probe=False),
        speculation=SpeculationConfig(drafter=drafter, policy=policy),
        max_total_tokens=tiny_pool.MAX_TOTAL_TOKENS,
        profile=PROFILE,
        takes_drafts=True,
    )
    honest = [replace(one, draft=plain[one.key].token_ids) for one in REQUESTS]
    for asked in (honest, [replace(one, draft=spoiled("one token", one, one.draft)) for one in honest]):
        before = engine.stats
        made = {one.key: one for one in engine.generate(asked)}
        assert not tiny_pool.mismatches(made, plain)
        done = engine.stats - before
        assert done.num_accepted_tokens > (0.6 if asked is honest else 0.1) * done.num_emitted_tokens


def test_steps_of_samples_that_bring_nothing_are_those_of_before(plain) -> None:
    engine = build_engine(
        tiny_pool.target(),
        tiny_pool.draft(),
        engine=EngineConfig(device="cpu", max_running_samples=3, probe=False),
        speculation=SpeculationConfig(policy="fixed"),
        max_total_tokens=tiny_pool.MAX_TOTAL_TOKENS,
        takes_drafts=True,
    )
    assert engine.drafter is not None and engine.drafter.working() is not engine.drafter
    engine.generate(REQUESTS[:2])
    before = engine.stats
    assert before.num_accepted_tokens and not before.num_accepted_looked_up
    engine.generate([replace(one, draft=plain[one.key].token_ids) for one in REQUESTS[:2]])
    assert (engine.stats - before).num_accepted_looked_up
    assert engine.drafter.working() is not engine.drafter
