"""The look-up drafter by hand."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from core.decode_records import Budget
from core.records import SampleRequest, SamplingParams
from core.sample_state import SampleState
from engine.decoding.draft_tree import DEAD, DraftTree
from engine.decoding.noise import Noise
from engine.decoding.running_batch import RunningBatch
from engine.drafters.drafter import Drafter
from engine.drafters.model_drafter import ModelDrafter
from engine.drafters.ngram_drafter import NgramDrafter
from engine.engine import Engine
from tests.helpers.backends import CPU, own_backend

BUDGET = Budget(num_nodes=3, depth=3, branching=1, width=1, reason="test")


@pytest.fixture
def draft(make_requests: Callable[..., list[SampleRequest]]) -> Callable[..., DraftTree | None]:
    def of(*texts: list[int], ngram_max: int = 3, ngram_min: int = 2) -> DraftTree | None:
        batch = RunningBatch(num_slots=4, max_total_tokens=32, device=CPU, noise=own_backend().noise)
        for request, text in zip(
            make_requests([len(t) for t in texts], SamplingParams()), texts, strict=True
        ):
            request.prompt.token_ids[:] = np.array(text)
            batch.add(SampleState.fresh(request))
        drafter = NgramDrafter(ngram_max=ngram_max, ngram_min=ngram_min)
        return drafter.draft(batch, BUDGET, Noise(torch.empty(len(texts), 4, 64)))

    return of


def drafted(tree: DraftTree | None) -> list[list[int]]:
    assert tree is not None
    return tree.token_ids.tolist()


def test_it_copies_what_followed_the_last_ngram(draft) -> None:
    assert drafted(draft([1, 2, 3, 4, 5, 6, 1, 2])) == [[3, 4, 5]]


def test_the_longest_match_wins_over_the_latest(draft) -> None:
    # "9 1 2" stood at the start and was followed by 7; "1 2" stood later and was followed by 8
    assert drafted(draft([9, 1, 2, 7, 7, 7, 5, 1, 2, 8, 9, 1, 2])) == [[7, 7, 7]]


def test_the_latest_of_equal_matches_wins(draft) -> None:
    assert drafted(draft([1, 2, 3, 1, 2, 4, 5, 5, 1, 2])) == [[4, 5, 5]]


def test_matches_below_the_smallest_size_do_not_count(draft) -> None:
    assert draft([1, 2, 3, 4, 9, 1]) is None
    assert drafted(draft([1, 2, 3, 4, 9, 1], ngram_min=1)) == [[2, 3, 4]]


def test_short_and_new_texts_have_nothing_to_copy(draft) -> None:
    assert draft([5]) is None
    assert draft([1, 2, 3, 4, 5]) is None


def test_a_match_next_to_the_end_copies_what_there_is(draft) -> None:
    # "1 1" ends at the last token but one: only one token follows it
    assert drafted(draft([3, 1, 1, 1])) == [[1]]


def test_samples_without_a_match_get_dead_nodes(draft) -> None:
    tree = draft([1, 2, 3, 4, 5, 6, 1, 2], [1, 2, 3, 4], [8, 8, 7, 8, 8])
    assert drafted(tree) == [[3, 4, 5], [DEAD] * 3, [7, 8, 8]]
    assert tree.scores.tolist() == [[1.0] * 3, [0.0] * 3, [1.0] * 3]
    assert tree.is_chain


def test_both_drafters_keep_the_protocol(make_engine: Callable[..., Engine]) -> None:
    for plan, kind in (("ngram", NgramDrafter), ("tree8", ModelDrafter)):
        drafter = make_engine(plan).drafter
        assert isinstance(drafter, kind)
        assert isinstance(drafter, Drafter)


def test_a_lookup_drafter_has_no_cache_to_ship() -> None:
    drafter = NgramDrafter(ngram_max=3, ngram_min=2)
    assert drafter.cache is None and drafter.num_cached_tokens(0) == 0
