"""A drafter that computes beside one that looks up: who drafts for whom, what each learns; no token depends on it."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from rlhfspec.core.config import EngineConfig, SpeculationConfig
from rlhfspec.core.decode_records import Budget, DecodeState, StepRecord
from rlhfspec.core.records import SamplingParams
from rlhfspec.engine.build import build_engine
from rlhfspec.engine.decoding.draft_tree import DEAD, chain, select_best
from rlhfspec.engine.drafters.drafter import part_of
from rlhfspec.engine.drafters.drafter_list import DrafterList, merge_proposals
from rlhfspec.engine.drafters.level_drafter import LevelDrafter
from rlhfspec.engine.drafters.model_drafter import ModelDrafter
from rlhfspec.engine.drafters.suffix_drafter import SuffixDrafter
from rlhfspec.policies.drafting.draft_policy import DraftLaw, Proposal
from rlhfspec.policies.drafting.look_up_or_draft import AdaptiveDrafting
from rlhfspec.policies.drafting.replay import replay
from tests.helpers.hand_profile import hand_cost, hand_profile
from tests.helpers.random_heads import random_head

PROFILE = hand_profile(0.6, hand_cost(forward_ms=1.0, token_ms=0.001, level_ms=0.05))
GROUP = SamplingParams(temperature=0.3, max_new_tokens=40)


@pytest.fixture
def pair_engine(pairs):
    """A draft model or a head, and a suffix automaton beside it."""

    def make(policy: str, *, drafter: str = "model", batch: int = 4, num_nodes: int = 5, branching: int = 1):
        pair = pairs["float32"]
        draft = random_head(pair.target, draft_vocab_size=48) if drafter == "head" else pair.draft
        return build_engine(
            pair.target,
            draft,
            engine=EngineConfig(device="cpu", max_running_samples=batch, max_prefill_tokens=96, probe=False),
            speculation=SpeculationConfig.model_validate(
                {
                    "drafter": drafter,
                    "policy": policy,
                    "look_up": "suffix",
                    "num_nodes": num_nodes,
                    "depth": 4,
                    "branching": branching,
                }
            ),
            max_total_tokens=192,
            profile=PROFILE,
        )

    return make


def counted(engine) -> list[int]:
    """Number of samples of every draft that is computed from now on."""
    drafter, calls = engine.drafter.computed, []
    propose = drafter.propose

    def counting(batch, *args):
        calls.append(len(batch))
        return propose(batch, *args)

    drafter.propose = counting
    return calls


def same(ours, theirs) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert a.policy_logprobs.tobytes() == b.policy_logprobs.tobytes()


def test_where_all_look_ups_are_promising_nothing_is_computed(
    pair_engine, make_engine, make_requests
) -> None:
    requests = make_requests((12, 30, 30), GROUP)
    plain = make_engine("off").generate(requests)
    engine = pair_engine("fixed")
    calls = counted(engine)
    same(engine.generate(requests), plain)
    first, before = len(calls), engine.stats
    assert first > before.num_decode_steps / 2, "little was known"
    same(engine.generate(requests), plain)
    again = engine.stats - before
    assert len(calls) - first < again.num_decode_steps / 2, "all had been said"
    assert again.num_accepted_looked_up > 0.8 * again.num_accepted_tokens > 0


def test_a_sample_takes_look_ups_while_its_neighbour_takes_what_is_computed(
    pair_engine, make_engine, make_requests
) -> None:
    known, new = make_requests((30, 12), replace(GROUP, max_new_tokens=30))
    engine = pair_engine("fixed")
    engine.generate([known])
    calls, before = counted(engine), engine.stats
    same(engine.generate([known, new]), make_engine("off").generate([known, new]))
    done = engine.stats - before
    computed = done.num_accepted_tokens - done.num_accepted_looked_up
    assert 2 in calls, "both were in one draft"
    assert done.num_accepted_looked_up > 10 and computed > 3


@pytest.mark.parametrize(("drafter", "batch"), [("model", 4), ("head", 3)])
def test_under_goodput_tokens_are_those_of_plain_decoding_and_the_log_replays(
    pair_engine, make_engine, make_requests, drafter, batch
) -> None:
    requests = make_requests((12, 30, 30, 5), GROUP)
    requests[2] = replace(requests[2], prompt=requests[1].prompt)
    engine = pair_engine("goodput", drafter=drafter, batch=batch)
    assert isinstance(engine.policy, AdaptiveDrafting)
    plain = make_engine("off").generate(requests)
    for _ in range(2):
        same(engine.generate(requests), plain)
    stats = engine.stats
    assert stats.num_accepted_looked_up > 20
    if drafter == "model":
        assert stats.num_accepted_tokens - stats.num_accepted_looked_up > 5
    assert (
        sum(record.num_accepted_looked_up for record in engine.step_records) == stats.num_accepted_looked_up
    )
    law = AdaptiveDrafting(PROFILE, max_nodes=16, max_depth=16, looks_up=True)
    assert replay(law, engine.step_records) is None


def test_what_is_not_verified_is_learned_from_all_the_same(pair_engine, make_requests) -> None:
    requests = make_requests((12, 30), GROUP)
    engine = pair_engine("fixed")
    engine.generate(requests)
    # nothing promises as much: every look-up of the second time is left unused
    drafter = engine.drafter
    drafter._mean_accepted = 1e9
    acceptance = drafter.looked_up._acceptance
    long = acceptance.classes(np.array([33]), np.array([1.0]))
    before, used = acceptance.conditional(long), engine.stats.num_accepted_looked_up
    engine.generate(requests)
    assert engine.stats.num_accepted_looked_up == used
    assert acceptance.conditional(long) > before


class NothingIsWorthIt(DraftLaw):
    """Has everything looked up and nothing verified."""

    max_nodes = 8

    def plan(self, state: DecodeState) -> Budget:
        return Budget(
            num_nodes=8, depth=8, branching=1, width=1, reason="", refined=True, look_up=8 * self.is_pair
        )

    def __init__(self, *, is_pair: bool) -> None:
        self.is_pair = is_pair

    def observe(self, record: StepRecord) -> None:
        assert not record.num_draft_tokens

    def deepen(self, level: int, scores: np.ndarray) -> int:
        return 0

    def is_enough(self, look_up: Proposal) -> bool:
        return True

    def choose(self, proposals: Sequence[Proposal]) -> list[np.ndarray]:
        return [np.zeros(len(one.scores), dtype=np.int64) for one in proposals]


@pytest.mark.parametrize("is_pair", [True, False], ids=["pair", "alone"])
def test_look_ups_are_judged_where_no_node_is_verified(
    pairs, make_engine, make_requests, is_pair: bool
) -> None:
    requests, pair = make_requests((12, 30), GROUP), pairs["float32"]
    drafter = {"drafter": "model", "look_up": "suffix"} if is_pair else {"drafter": "suffix"}
    engine = build_engine(
        pair.target,
        pair.draft if is_pair else None,
        engine=EngineConfig(device="cpu", max_running_samples=4, max_prefill_tokens=96, probe=False),
        speculation=SpeculationConfig.model_validate({"policy": "goodput", **drafter}),
        max_total_tokens=192,
        policy=NothingIsWorthIt(is_pair=is_pair),
        profile=PROFILE,
    )
    acceptance = (engine.drafter.looked_up if is_pair else engine.drafter)._acceptance
    long = acceptance.classes(np.array([33]), np.array([1.0]))
    # as after a time when look-ups were wrong: only being right can bring them back
    acceptance.observe(np.repeat(long, 10), np.zeros(10, dtype=bool))
    engine.generate(requests)
    before = acceptance.conditional(long)
    same(engine.generate(requests), make_engine("off").generate(requests))
    assert acceptance.conditional(long) > before + 0.1, "all had been said"


def test_both_forms_of_a_draft_stand_in_one_tree() -> None:
    computed = replace(chain(torch.tensor([[1, 2, 3], [4, 5, 6]])), scores=torch.rand(2, 3))
    looked_up = np.array([[9, 9, 9, 9], [7, 8, 7, DEAD]])
    used = np.array([False, True])
    tree = merge_proposals(computed, looked_up, used, np.array([2, 3]), torch.device("cpu"))
    assert tree is not None and tree.is_chain and tree.num_in_cache == 2
    assert tree.token_ids.tolist() == [[1, 2, 3], [7, 8, 7]]
    assert tree.num_kept is not None and tree.num_kept.tolist() == [2, 3]
    branches = replace(
        computed,
        parents=torch.tensor([[0, 0, 1]] * 2),
        depth=torch.tensor([[1, 1, 2]] * 2),
        rank=torch.tensor([[1, 2, 1]] * 2),
        is_chain=False,
    )
    tree = merge_proposals(branches, looked_up, used[::-1].copy(), np.array([4, 3]), torch.device("cpu"))
    assert tree is not None and not tree.is_chain
    assert tree.token_ids.tolist() == [[9, 9, 9, 9], [4, 5, 6, DEAD]]
    assert tree.parents.tolist() == [[0, 1, 2, 3], [0, 0, 1, 0]]
    assert tree.depth.tolist() == [[1, 2, 3, 4], [1, 1, 2, 1]]
    assert tree.draft_slots.tolist()[0] == [-1] * 4
    alone = merge_proposals(select_best(branches, 0), looked_up, used, np.array([0, 2]), torch.device("cpu"))
    assert alone is not None and alone.token_ids.tolist() == [[DEAD, DEAD], [7, 8]]
    assert alone.num_in_cache == 0
    assert merge_proposals(None, looked_up, used, np.array([0, 0]), torch.device("cpu")) is None


def test_the_pair_takes_weights_where_its_computing_drafter_does(pair_engine) -> None:
    drafter = pair_engine("fixed").drafter
    assert isinstance(drafter, DrafterList)
    model = part_of(drafter, ModelDrafter)
    assert model is not None and model is part_of(drafter, LevelDrafter) and drafter.cache is model.cache
    assert part_of(drafter, SuffixDrafter) is drafter.looked_up
    assert part_of(model, ModelDrafter) is model and part_of(model, SuffixDrafter) is None
