"""The suffix drafter proposes what siblings and earlier responses said, and keeps its memory bounded."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from rlhfspec.core.config import EngineConfig, SpeculationConfig
from rlhfspec.core.decode_records import Budget
from rlhfspec.core.records import SampleRequest, SamplingParams
from rlhfspec.core.sample_state import SampleState
from rlhfspec.engine.build import build_engine
from rlhfspec.engine.decoding.draft_tree import DEAD
from rlhfspec.engine.decoding.noise import Noise
from rlhfspec.engine.decoding.running_batch import RunningBatch
from rlhfspec.engine.drafters.match_acceptance import MatchAcceptance
from rlhfspec.engine.drafters.suffix_drafter import STATE_BYTES, SuffixDrafter
from rlhfspec.policies.drafting.baselines import FixedPolicy
from rlhfspec.policies.drafting.look_up_or_draft import AdaptiveDrafting
from rlhfspec.policies.drafting.replay import replay
from tests.helpers.backends import CPU, own_backend
from tests.helpers.hand_profile import hand_cost, hand_profile

BUDGET = Budget(num_nodes=4, depth=4, branching=1, width=1, reason="test")
CHEAP = hand_profile(0.5, hand_cost(forward_ms=10.0, token_ms=0.01))
"Verifying a token costs a thousandth of a forward: every look-up is worth a try."


class Texts:
    """A running batch that is written by hand, and the drafter beside it."""

    def __init__(self, make_requests: Callable[..., list[SampleRequest]], memory_mb: float = 1.0) -> None:
        self.make_requests = make_requests
        self.batch = RunningBatch(num_slots=4, max_total_tokens=64, device=CPU, noise=own_backend().noise)
        self.drafter = SuffixDrafter(1 << 40, memory_mb=memory_mb, min_match=1)

    def admit(self, *prompts: list[int]) -> None:
        first = len(self.batch)
        for request, prompt in zip(
            self.make_requests([len(p) for p in prompts], SamplingParams()), prompts, strict=True
        ):
            request.prompt.token_ids[:] = np.array(prompt)
            self.batch.add(SampleState.fresh(request))
        self.drafter.admit(range(first, len(self.batch)), self.batch)

    def say(self, slot: int, *tokens: int) -> None:
        length = int(self.batch.lengths[slot])
        self.batch.tokens[slot, length : length + len(tokens)] = tokens
        self.batch.lengths[slot] += len(tokens)

    def leave(self, slot: int) -> SampleState:
        state = self.batch.state(slot, weight_version=0)
        self.drafter.leave(slot, self.batch)
        if (last := self.batch.remove(slot)) != slot:
            self.drafter.move_slot(last, slot)
        return state

    def come_back(self, state: SampleState) -> None:
        slot = self.batch.add(state)
        self.drafter.admit(range(slot, slot + 1), self.batch)

    def drafted(self) -> list[list[int]]:
        tree = self.drafter.draft(self.batch, BUDGET, Noise(torch.empty(len(self.batch), 5, 64)))
        return (
            [[] for _ in range(len(self.batch))]
            if tree is None
            else [[token for token in row if token != DEAD] for row in tree.token_ids.tolist()]
        )


@pytest.fixture
def texts(make_requests: Callable[..., list[SampleRequest]]) -> Texts:
    return Texts(make_requests)


def test_it_copies_from_prompt_and_own_response(texts: Texts) -> None:
    texts.admit([1, 2, 3, 4, 5, 1, 2])
    assert texts.drafted() == [[3, 4, 5, 1]]
    texts.say(0, 9, 8, 7, 9)
    assert texts.drafted() == [[8, 7, 9]]


def test_what_a_sibling_says_helps_the_next_and_another_prompt_does_not(texts: Texts) -> None:
    texts.admit([1, 2, 3], [1, 2, 3], [1, 2, 4])
    texts.say(0, 20, 21, 22, 23)
    texts.say(1, 20)
    texts.say(2, 20)
    # whoever is drafted first has not heard the others of this step
    texts.drafted()
    assert texts.drafted() == [[], [21, 22, 23], []]


def test_earlier_responses_are_remembered_and_the_oldest_prompt_goes_first(make_requests) -> None:
    texts = Texts(make_requests, memory_mb=40 * STATE_BYTES / 1e6)
    prompts = [np.array([n, n + 1, n + 2]) for n in (10, 20, 30)]
    for number, prompt in enumerate(prompts):
        texts.drafter.remember([(prompt, np.arange(40, 50) + number)])
    assert 20 <= texts.drafter.num_states <= 40
    texts.admit([30, 31, 32], [10, 11, 12])
    assert texts.drafted() == [[42, 43, 44, 45], []]


def test_memory_holds_after_every_response_and_while_samples_are_written(make_requests) -> None:
    most = 60
    texts = Texts(make_requests, memory_mb=(most + 0.5) * STATE_BYTES / 1e6)
    drafter, peaks = texts.drafter, []

    def responses() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for number in range(30):
            yield np.array([number, number + 1]), np.arange(40, 50)
            peaks.append(drafter.num_states)

    drafter.remember(responses())
    assert most / 2 < max(peaks) <= most
    texts.admit([1, 2], [3, 4])
    for token in range(20):
        texts.say(0, token)
        texts.say(1, token + 20)
        texts.drafted()
        assert drafter.num_states <= most
    # what nobody writes in went first
    texts.say(1, 3)
    assert texts.drafted()[1][:2] == [4, 20]


def test_running_samples_that_need_more_than_there_is_are_not_looked_up(make_requests) -> None:
    texts = Texts(make_requests, memory_mb=30.5 * STATE_BYTES / 1e6)
    texts.admit([1, 2], [3, 4], [3, 4])
    for token in range(10, 20):
        for slot in range(3):
            texts.say(slot, token + 10 * slot)
        texts.drafted()
        assert texts.drafter.num_states <= 30
    texts.say(0, 1)
    texts.say(1, 3)
    first, second, _ = texts.drafted()
    assert first == [] and second[:1] == [4]
    for _ in range(3):
        texts.leave(0)
    texts.admit([1, 2])
    texts.say(0, 1)
    assert texts.drafted() == [[2, 1]]


def test_what_was_never_looked_up_is_remembered_when_its_sample_leaves(texts: Texts) -> None:
    texts.admit([1, 2, 3], [1, 2, 3])
    texts.say(0, 20, 21, 22, 23)
    texts.leave(0)
    texts.say(0, 20)
    assert texts.drafted() == [[21, 22, 23]]


def test_a_sample_that_comes_back_is_written_once(texts: Texts) -> None:
    texts.admit([1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3])
    texts.say(0, 20, 21)
    for slot in (1, 2):
        texts.say(slot, 20, 30)
    texts.drafted()
    for _ in range(3):
        # the first one is preempted and goes to the end
        first = next(slot for slot in range(4) if texts.batch.tokens[slot, 4] == 21)
        texts.come_back(texts.leave(first))
    last = next(slot for slot in range(4) if texts.batch.lengths[slot] == 3)
    texts.say(last, 20)
    assert texts.drafted()[last] == [30], "two of three said so"


def test_a_sample_that_is_generated_anew_begins_at_its_prompt(texts: Texts) -> None:
    texts.admit([1, 2, 3])
    texts.say(0, 20, 21)
    texts.come_back(SampleState.fresh(texts.leave(0).request))
    texts.say(0, 20)
    assert texts.drafted() == [[21]]


def test_a_sample_keeps_its_text_when_its_slot_changes(texts: Texts) -> None:
    texts.admit([1, 2, 3], [5, 6, 7])
    texts.say(1, 6)
    assert texts.drafted() == [[], [7, 6]]
    texts.drafter.move_slot(1, 0)
    texts.batch.tokens[0], texts.batch.lengths[0] = texts.batch.tokens[1], texts.batch.lengths[1]
    texts.batch.requests.pop(0)
    texts.say(0, 7)
    assert texts.drafted() == [[6, 7]]


def test_acceptance_is_learned_by_match_length_and_share_and_follows_changes() -> None:
    acceptance = MatchAcceptance()
    short, long = acceptance.classes(np.array([1, 12]), np.array([1.0, 1.0]))
    assert acceptance.conditional(np.array([short])) < acceptance.conditional(np.array([long]))
    for _ in range(400):
        acceptance.observe(np.array([short, long]), np.array([True, False]))
    assert acceptance.conditional(np.array([short])) > 0.95 > 0.05 > acceptance.conditional(np.array([long]))
    for _ in range(400):
        acceptance.observe(np.array([short]), np.array([False]))
    assert acceptance.conditional(np.array([short])) < 0.2


def test_an_engine_that_looks_nothing_up_remembers_all_the_same(pairs, make_requests) -> None:
    requests = make_requests((12, 30, 30), SamplingParams(temperature=0.3, max_new_tokens=40))
    engine = build_engine(
        pairs["float32"].target,
        None,
        engine=EngineConfig(device="cpu", max_running_samples=2, max_prefill_tokens=96, probe=False),
        speculation=SpeculationConfig(drafter="suffix", policy="fixed", num_nodes=4, depth=4),
        max_total_tokens=192,
    )
    looks_up, engine.policy = engine.policy, FixedPolicy(num_nodes=0, depth=0, branching=1)
    engine.generate(requests)
    assert engine.stats.num_draft_tokens == 0
    steps, engine.policy = engine.stats.num_decode_steps, looks_up
    engine.generate(requests)
    assert engine.stats.num_decode_steps - steps < steps / 2


def test_under_goodput_tokens_are_those_of_plain_decoding_and_the_log_replays(
    pairs, make_engine, make_requests
) -> None:
    requests = make_requests((12, 30, 30, 5), SamplingParams(temperature=0.3, max_new_tokens=50))
    # a group: siblings say alike things at this temperature
    requests[2] = replace(requests[2], prompt=requests[1].prompt)
    engine = build_engine(
        pairs["float32"].target,
        None,
        engine=EngineConfig(device="cpu", max_running_samples=4, max_prefill_tokens=96, probe=False),
        speculation=SpeculationConfig(drafter="suffix", policy="goodput"),
        max_total_tokens=192,
        profile=CHEAP,
    )
    plain = make_engine("off").generate(requests)
    for _ in range(2):
        done = engine.generate(requests)
        for a, b in zip(done, plain, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()
            assert a.policy_logprobs.tobytes() == b.policy_logprobs.tobytes()
    assert engine.stats.num_accepted_tokens > 20
    # the second time all of it had been said before
    assert engine.stats.mean_acceptance_length > 1.3
    law = AdaptiveDrafting(CHEAP, max_nodes=16, max_depth=16, computes=False, looks_up=True)
    assert replay(law, engine.step_records) is None
