"""Cost tables equal the cost model wherever they are read."""

from dataclasses import replace

import numpy as np
import pytest

from rlhfspec.policies.drafting.cost_view import BatchCosts, CostView
from rlhfspec.profiles.cost import BATCH_HINGES, DRAFT_HINGES, VERIFY_HINGES, CostModel, Shape

RANDOM = np.random.default_rng(0)
COST = CostModel(
    draft=tuple(RANDOM.random(9 + len(DRAFT_HINGES)).tolist()),
    verify=tuple(RANDOM.random(9 + len(VERIFY_HINGES) + len(BATCH_HINGES)).tolist()),
    rest=tuple(RANDOM.random(6).tolist()),
)
"Every term counts."
RECORDED = replace(COST, recorded_samples=(1, 4, 6, 12))
NODES, LEVELS = 7, 5


def costs(batch: int, width: int, cost: CostModel = COST) -> BatchCosts:
    return BatchCosts(cost, num_samples=batch, width=width, max_nodes=NODES, max_levels=LEVELS)


def table(batch: int, width: int, cost: CostModel = COST) -> CostView:
    return costs(batch, width, cost).at(90 * batch)


def shape(batch: int, width: int, nodes: int, widest: int, levels: int = 1) -> Shape:
    return Shape(
        num_samples=float(batch),
        context_tokens=90.0 * batch,
        num_nodes=float(nodes),
        widest=float(widest),
        levels=float(levels),
        width=float(width),
    )


@pytest.mark.parametrize("cost", [COST, RECORDED], ids=["as it comes", "recorded"])
@pytest.mark.parametrize(("batch", "width"), [(1, 1), (4, 1), (4, 2), (9, 3)])
def test_uniform_seconds_are_those_of_verification_and_rest(batch: int, width: int, cost: CostModel) -> None:
    direct = []
    for n in range(NODES + 1):
        at = shape(batch, width, batch * n, n)
        direct.append(float(cost.verify_s(at) + cost.rest_s(at)))
    assert table(batch, width, cost).uniform_s.tolist() == pytest.approx(direct)


@pytest.mark.parametrize("cost", [COST, RECORDED], ids=["as it comes", "recorded"])
@pytest.mark.parametrize(("batch", "width"), [(2, 1), (4, 1), (4, 2), (9, 3)])
def test_ragged_seconds_are_the_sum_of_both_parts_at_every_total_and_width(
    batch: int, width: int, cost: CostModel
) -> None:
    view = table(batch, width, cost)
    for widest in range(1, NODES + 1):
        for nodes in range(widest, batch * widest):
            at = shape(batch, width, nodes, widest)
            direct = float(cost.verify_s(at) + cost.rest_s(at))
            assert view.tokens_s[nodes] + view.widest_s[widest] == pytest.approx(direct)


@pytest.mark.parametrize(("batch", "width"), [(1, 1), (4, 2)])
def test_no_nodes_cost_the_same_in_both_tables(batch: int, width: int) -> None:
    view = table(batch, width)
    assert view.tokens_s[0] == 0.0
    assert view.widest_s[0] == pytest.approx(view.uniform_s[0])


@pytest.mark.parametrize(("batch", "width"), [(1, 1), (4, 2)])
def test_draft_seconds_are_those_of_so_many_levels(batch: int, width: int) -> None:
    direct = [float(COST.draft_s(shape(batch, width, 0, 0, levels))) for levels in range(LEVELS + 1)]
    assert table(batch, width).draft_s.tolist() == pytest.approx(direct)


def test_factors_multiply_their_phase_and_nothing_else() -> None:
    view = table(4, 2)
    corrected = costs(4, 2).at(90 * 4, draft=2.0, verify=0.5)
    np.testing.assert_allclose(corrected.draft_s, view.draft_s * 2)
    for name in ("uniform_s", "tokens_s", "widest_s"):
        np.testing.assert_allclose(getattr(corrected, name), getattr(view, name) / 2)
    assert (corrected.num_samples, corrected.context_tokens) == (4, 360)
