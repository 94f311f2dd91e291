"""Recorded drafts by hand: which nodes are fair trials, their scores, and what the n best would have gained."""

import numpy as np
import pytest
from hand_tables import grown, two_drafts

from rlhfspec.profiles.acceptance import AcceptanceModel
from rlhfspec.profiles.recording import join_nodes

LOGISTIC = AcceptanceModel(first=(0, 0, 0, 1, 0), other=(0, 0, 1, 0, 0))
"Estimates the logistic function of the log-probability: tests write the logits of what they want."


SCORES = [[0.8, 0.5, 0.4, 0.2, 0.45, 0.05], [0.4, 0.6, 0.54, 0.12, 0.3, 0.2]]


def test_a_node_is_reached_when_its_parent_is_accepted() -> None:
    assert two_drafts().reached.tolist() == [[True, True, True, True, False, False]] * 2


def test_nodes_are_the_fair_trials_only_row_by_row() -> None:
    nodes = two_drafts().nodes()
    assert nodes.margin.tolist() == [0, 1, 2, 3, 6, 7, 8, 9]
    assert nodes.level.tolist() == [1, 1, 2, 2] * 2
    assert nodes.rank.tolist() == [1, 2, 1, 2] * 2
    assert nodes.accepted.tolist() == [True, False, True, False, False, True, True, False]
    assert nodes.sample.tolist() == [4] * 4 + [7] * 4


def test_a_score_is_the_product_along_its_path_by_hand() -> None:
    np.testing.assert_allclose(two_drafts().scores(LOGISTIC), SCORES)


@pytest.mark.parametrize(
    ("levels", "max_nodes", "curve"),
    [
        # the first draft takes its nodes in the order 0 1 4 2 3 5, the second 1 2 0 4 5 3
        (2, 8, [0, 1, 1.5, 1.5, 2, 2, 2, 2, 2]),
        (2, 2, [0, 1, 1.5]),
        (1, 3, [0, 1, 1, 1]),
        (2, 0, [0]),
    ],
)
def test_the_yield_curve_counts_what_the_best_nodes_would_have_gained(
    levels: int, max_nodes: int, curve: list[float]
) -> None:
    assert two_drafts().yield_curve(LOGISTIC, levels, max_nodes) == pytest.approx(curve)


def test_where_keeps_the_drafts_under_the_mask() -> None:
    kept = two_drafts().where(np.array([False, True]))
    assert len(kept) == 1
    assert kept.sample.tolist() == [7]
    assert kept.parent.tolist() == [[-1, -1, 1, 1, 0, 0]]
    np.testing.assert_allclose(kept.scores(LOGISTIC), SCORES[1:])


@pytest.mark.parametrize("seed", range(4))
def test_children_never_score_above_their_parents(seed: int) -> None:
    drafts = grown(seed)
    scores = drafts.scores(
        AcceptanceModel(first=(2.0, 1.0, 0.5, -0.5, 0.3), other=(1.0, -0.5, -1.0, 0.2, 0.3))
    )
    behind = drafts.parent[0] >= 0
    parents = np.take_along_axis(scores, drafts.parent[:, behind], axis=1)
    assert (scores[:, behind] <= parents).all()
    assert ((scores > 0) & (scores < 1)).all()


@pytest.mark.parametrize("seed", range(4))
def test_yield_curves_rise_to_all_that_was_accepted_and_more_levels_hold_more(seed: int) -> None:
    drafts = grown(seed)
    size = drafts.margin.shape[1]
    ends = []
    for levels in range(1, 5):
        curve = np.array(drafts.yield_curve(LOGISTIC, levels, size))
        assert curve[0] == 0.0 and (np.diff(curve) >= 0).all() and (np.diff(curve) <= 1).all()
        assert curve[-1] == pytest.approx(drafts.accepted[:, drafts.level <= levels].sum(1).mean())
        ends.append(curve[-1])
    assert ends == sorted(ends)


def test_joined_tables_are_concatenated_in_order() -> None:
    one, two = two_drafts().nodes(), grown(0).nodes()
    both = join_nodes([one, two])
    assert len(both) == len(one) + len(two)
    assert both.margin.tolist() == one.margin.tolist() + two.margin.tolist()
    assert both.accepted.tolist() == one.accepted.tolist() + two.accepted.tolist()
