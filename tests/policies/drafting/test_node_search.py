"""The search for the best nodes against brute force over every allocation."""

from itertools import product

import numpy as np
import pytest

from rlhfspec.policies.drafting.cost_view import CostView
from rlhfspec.policies.drafting.node_search import allocation_of, best_ragged, best_uniform, sorted_scores


def view(
    batch: int, nodes: int, random: np.random.Generator | None = None, **tables: list[float]
) -> CostView:
    """Rising cost tables, hand-made or drawn; convex in the tokens as sums of hinges are."""
    if random is not None:
        tables = {
            "uniform_s": random.exponential(1.0, nodes + 1).cumsum().tolist(),
            "tokens_s": [0.0, *np.sort(random.exponential(0.3, batch * nodes)).cumsum().tolist()],
            "widest_s": random.exponential(0.6, nodes + 1).cumsum().tolist(),
        }
    arrays = {name: np.array(values, dtype=float) for name, values in tables.items()}
    return CostView(num_samples=batch, context_tokens=100, draft_s=np.zeros(1), **arrays)


def drawn_scores(batch: int, nodes: int, random: np.random.Generator) -> np.ndarray:
    """Descending in each row, in tenths: ties are common, noughts too."""
    return -np.sort(-random.integers(0, 10, (batch, nodes)) / 10, axis=1)


def ragged_worth(counts: tuple[int, ...], scores: np.ndarray, costs: CostView, goodput: float) -> float:
    gained = sum(scores[row, :count].sum() for row, count in enumerate(counts))
    return gained - goodput * (costs.tokens_s[sum(counts)] + costs.widest_s[max(counts)])


@pytest.mark.parametrize(("batch", "nodes"), [(1, 4), (2, 4), (3, 3), (4, 3)])
def test_ragged_finds_the_best_of_all_allocations(batch: int, nodes: int) -> None:
    random = np.random.default_rng(batch)
    for _ in range(60):
        costs, scores = view(batch, nodes, random), drawn_scores(batch, nodes, random)
        goodput = float(random.choice([0.05, 0.2, 0.5, 1.0]))
        counts, worth = best_ragged(scores, costs, goodput)
        best = max(
            ragged_worth(all_counts, scores, costs, goodput)
            for all_counts in product(range(nodes + 1), repeat=batch)
        )
        assert worth == pytest.approx(best)
        assert ragged_worth(tuple(counts.tolist()), scores, costs, goodput) == pytest.approx(best)


@pytest.mark.parametrize(("batch", "nodes"), [(1, 5), (4, 6)])
def test_uniform_finds_the_best_common_number(batch: int, nodes: int) -> None:
    random = np.random.default_rng(batch)
    for _ in range(60):
        costs, scores = view(batch, nodes, random), drawn_scores(batch, nodes, random)
        count, worth = best_uniform(scores, costs, 0.4)
        worths = [scores[:, :n].sum() - 0.4 * costs.uniform_s[n] for n in range(nodes + 1)]
        assert worth == pytest.approx(max(worths))
        assert worths[count] == pytest.approx(max(worths))


def test_a_sample_is_capped_where_the_widest_row_is_expensive() -> None:
    # a third node of the first sample would take a second and a half with it
    costs = view(2, 3, tokens_s=[0.0] * 7, widest_s=[0, 0.1, 0.2, 1.7], uniform_s=[0.0] * 4)
    scores = np.array([[0.9, 0.8, 0.7], [0.6, 0.5, 0.4]])
    counts, worth = best_ragged(scores, costs, 1.0)
    assert counts.tolist() == [2, 2]
    assert worth == pytest.approx(0.9 + 0.8 + 0.6 + 0.5 - 0.2)


def test_ragged_by_hand_gives_the_likelier_sample_more_nodes() -> None:
    # every token costs 0.5: what is less likely is not worth it
    costs = view(3, 3, tokens_s=[0.5 * n for n in range(10)], widest_s=[0.0] * 4, uniform_s=[0.0] * 4)
    scores = np.array([[0.9, 0.8, 0.7], [0.6, 0.3, 0.1], [0.4, 0.4, 0.4]])
    counts, worth = best_ragged(scores, costs, 1.0)
    assert counts.tolist() == [3, 1, 0]
    assert worth == pytest.approx(0.9 + 0.8 + 0.7 + 0.6 - 4 * 0.5)
    # seconds that are worth less buy more
    assert best_ragged(scores, costs, 0.7)[0].tolist() == [3, 1, 3]


def test_zero_scores_are_not_verified_even_at_zero_cost() -> None:
    costs = view(2, 3, tokens_s=[0.0] * 7, widest_s=[0.0] * 4, uniform_s=[0.0] * 4)
    assert best_ragged(np.zeros((2, 3)), costs, 1.0)[0].tolist() == [0, 0]
    assert best_uniform(np.zeros((2, 3)), costs, 1.0) == (0, 0.0)
    scores = np.array([[0.5, 0.0, 0.0], [0.5, 0.2, 0.0]])
    assert best_ragged(scores, costs, 1.0)[0].tolist() == [1, 2]
    assert best_uniform(scores, costs, 1.0) == (2, pytest.approx(1.2))


def test_equal_samples_that_cannot_all_be_served_are_served_in_order() -> None:
    tokens_s = [0.0, 0.1, 0.2, 1.0, 2.0]
    costs = view(4, 1, tokens_s=tokens_s, widest_s=[0.0, 0.0], uniform_s=[0.0, 2.0])
    counts, worth = best_ragged(np.full((4, 1), 0.5), costs, 1.0)
    assert counts.tolist() == [1, 1, 0, 0]
    assert worth == pytest.approx(0.8)


def test_no_sample_gets_more_nodes_than_the_cost_tables_know() -> None:
    costs = view(2, 2, tokens_s=[0.0] * 5, widest_s=[0.0] * 3, uniform_s=[0.0] * 3)
    scores = np.full((2, 6), 0.9)
    assert best_ragged(scores, costs, 1.0)[0].tolist() == [2, 2]
    assert best_uniform(scores, costs, 1.0)[0] == 2


def test_fewer_candidates_than_the_tables_know_are_all_there_is() -> None:
    costs = view(2, 5, tokens_s=[0.0] * 11, widest_s=[0.0] * 6, uniform_s=[0.0] * 6)
    scores = np.full((2, 3), 0.9)
    assert best_ragged(scores, costs, 1.0)[0].tolist() == [3, 3]
    assert best_uniform(scores, costs, 1.0)[0] == 3


def test_scores_are_sorted_in_each_row_and_a_chain_is_left_alone() -> None:
    tree = np.array([[0.3, 0.9, 0.5], [0.2, 0.1, 0.4]])
    np.testing.assert_array_equal(sorted_scores(tree, (3,)), [[0.9, 0.5, 0.3], [0.4, 0.2, 0.1]])
    np.testing.assert_array_equal(sorted_scores(tree, (1, 2)), [[0.9, 0.5, 0.3], [0.4, 0.2, 0.1]])
    chain = np.array([[0.9, 0.5, 0.3]])
    assert sorted_scores(chain, (1, 1, 1)) is chain


@pytest.mark.parametrize("batch", [2, 5])
def test_an_allocation_reproduces_its_own_counts(batch: int) -> None:
    random = np.random.default_rng(batch)
    for _ in range(60):
        costs = view(batch, 4, random)
        scores = -np.sort(-random.random((batch, 4)), axis=1)
        counts, _ = best_ragged(scores, costs, float(random.choice([0.05, 0.2, 0.5])))
        np.testing.assert_array_equal(allocation_of(counts, scores).of(scores), counts)


def test_an_allocation_applies_its_price_to_other_scores() -> None:
    counts = np.array([2, 1])
    allocation = allocation_of(counts, np.array([[0.9, 0.6, 0.1], [0.7, 0.3, 0.2]]))
    assert allocation.of(np.array([[0.9, 0.59, 0.5], [0.8, 0.7, 0.6]])).tolist() == [1, 3]


def test_an_allocation_keeps_a_binding_cap() -> None:
    counts = np.array([2, 1])
    allocation = allocation_of(counts, np.array([[0.9, 0.8, 0.7], [0.7, 0.3, 0.2]]))
    assert allocation.of(np.array([[0.9, 0.9, 0.9], [0.8, 0.8, 0.8]])).tolist() == [2, 2]


@pytest.mark.parametrize("count", [0, 2])
def test_a_uniform_allocation_ignores_scores(count: int) -> None:
    allocation = allocation_of(np.full(3, count), np.full((3, 4), 0.5))
    assert allocation.of(np.array([[0.9, 0.1, 0.0, 0.0], [0.9] * 4])).tolist() == [count, count]


def test_costs_of_a_larger_batch_are_scaled_to_the_actual_one() -> None:
    # four nodes take a second: two samples bear half of it
    costs = view(
        4, 2, tokens_s=[0.25 * n for n in range(9)], widest_s=[0.0, 0.4, 0.8], uniform_s=[0.0, 1.0, 2.0]
    )
    scores = np.array([[0.3, 0.2], [0.3, 0.2]])
    assert best_uniform(scores, costs, 1.0) == (1, pytest.approx(0.1))
    assert best_uniform(np.repeat(scores, 2, axis=0), costs, 1.0) == (1, pytest.approx(0.2))
    counts, worth = best_ragged(np.array([[0.5, 0.2], [0.3, 0.2]]), costs, 1.0)
    assert counts.tolist() == [1, 1]
    assert worth == pytest.approx(0.8 - 2 * 0.25 - 0.5 * 0.4)
