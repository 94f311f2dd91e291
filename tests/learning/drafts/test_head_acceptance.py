"""Acceptance of drafts: counted on hand-made drafts, and the same as drafting step by step with the sample's noise."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_heads import tiny_head
from tiny_llama import tiny_llama

from rlhfspec.core.records import Prompt, SamplingParams
from rlhfspec.engine.decoding.noise import gumbel_noise, key_words
from rlhfspec.learning.drafts.evaluate_head import (
    NO_RANK,
    Acceptance,
    DraftedResponse,
    Responder,
    _ranks,
    drafted_response,
)
from rlhfspec.learning.drafts.head import HeadModule
from tests.learning.drafts.test_unrolled import drafted

LEVELS = 3


def made(*rows: str, first: int = 0, category: str = "") -> DraftedResponse:
    """One row an anchor: x where a level's first choice is right, else the rank of what is, or a point for none."""
    ranks = [[NO_RANK if mark == "." else int(mark.replace("x", "0")) for mark in row] for row in rows]
    return DraftedResponse(ranks=np.array(ranks), first_token=first, category=category)


def test_a_level_counts_where_those_before_it_were_right():
    acceptance = Acceptance.of([made("xx", "x.", ".x", "x."), None])
    # the last anchor has no second token to draft
    assert acceptance.by_level() == [3 / 4, 1 / 2]
    assert acceptance.num_anchors == 4


def test_steps_emit_what_was_right_and_one_token_more():
    # from 0: two right, three tokens; from 3: wrong, one token; from 4: right, and the response ends with it
    acceptance = Acceptance.of([made("xx", "..", "..", "..", "x.")])
    assert acceptance.mean_length() == pytest.approx((3 + 1 + 1) / 3)
    assert Acceptance.of([]).mean_length() == 1.0 and Acceptance.of([]).by_level() == []


def test_the_best_fixed_tree_takes_the_likeliest_paths():
    acceptance = Acceptance.of([made("x1", "x1", "1x", "x1", "..")])
    assert acceptance.best_tree(3) == [(0,), (0, 1), (1,)]
    assert acceptance.tree_length(0) == 1.0
    # a chain's first node alone; then both levels of it: from 0 three tokens, from 3 the two that are left
    assert acceptance.tree_length(1) == pytest.approx((2 + 1 + 2) / 3)
    assert acceptance.tree_length(2) == pytest.approx((3 + 2) / 2)


def test_positions_count_from_the_response_s_first_token():
    rows = ["x"] * 32 + ["."] * 8
    acceptance = Acceptance.of([made(*rows, first=1)])
    table = acceptance.by_position()
    assert [row[0] for row in table] == [0, 32]
    # 31 anchors lie below token 32: all are right, and each step takes two of them
    assert table[0][1:] == (1.0, 2.0)
    assert table[1][1] == pytest.approx(1 / 9)


def test_categories_are_counted_apart():
    found = Acceptance.of([made("x", "x", category="b"), made(".", "x", category="a")]).by_category()
    assert list(found) == ["a", "b"]
    assert found["a"].by_level() == [0.5] and found["b"].by_level() == [1.0]


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_drafts_are_those_of_the_coupled_rule(temperature: float):
    model = tiny_llama(initializer_range=0.3).eval()
    head = tiny_head(model)
    responder = Responder(model, head.config.tapped_layers, vocab_size=19, max_total_tokens=32, num_slots=4)
    prompts = [Prompt(prompt_id=index, token_ids=np.array([3, 4 + index, 5])) for index in range(3)]
    sampling = SamplingParams(temperature=temperature, max_new_tokens=8, stop_token_ids=())
    embedding, ids = model.get_input_embeddings().weight, head.token_ids
    seen: set[int] = set()
    for response in responder.responses(prompts, sampling, seed=3):
        sequence = replace(response.sequence, taps=response.sequence.taps.float())
        found = drafted_response(
            HeadModule(head),
            sequence,
            response.key,
            embedding=embedding,
            temperature=temperature,
            num_levels=LEVELS,
        )
        assert found is not None and found.first_token == 0
        words = key_words(response.key, sequence.token_ids[:3])[None]
        for anchor in range(1, len(sequence.token_ids) - 2):
            logits = drafted(dict(head.tensors), head, embedding, sequence, anchor)
            expected = []
            for level, of_level in enumerate(logits):
                place = anchor + 2 + level
                noise = gumbel_noise(words, np.array([[place]]), 19)[0, 0, ids]
                scores = of_level / (temperature or 1.0) + (noise if temperature else 0.0)
                order = ids[scores.argsort(descending=True)].tolist()
                token = int(sequence.token_ids[place])
                expected.append(order.index(token) if token in order else NO_RANK)
            expected += [NO_RANK] * (LEVELS - len(expected))
            assert found.ranks[anchor - 1].tolist() == expected
            seen.update(expected)
    assert {0, 1, 2, NO_RANK} <= seen
    assert torch.is_grad_enabled()


def test_scores_that_are_no_numbers_rank_nothing():
    scores = torch.tensor([[1.0, 3.0, 2.0], [math.nan, 3.0, 2.0]])
    found = _ranks(scores, torch.tensor([4, 5, 9]), torch.tensor([5, 5]))
    assert found.tolist() == [0, NO_RANK]
