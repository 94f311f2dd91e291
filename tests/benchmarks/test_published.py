"""The comparison with published figures: deviations, ranges, and that nothing is taken from what is compared."""

from __future__ import annotations

from copy import deepcopy

import pytest

from rlhfspec.benchmarks.cluster_simulation import paper_figures
from rlhfspec.benchmarks.published import papers
from rlhfspec.benchmarks.published.papers import PAPERS, TLT, ranged
from rlhfspec.policies.simulate.cluster_simulation import bound

COMPARED = TLT["depths"].index(TLT["compared_depth"])


def test_a_row_says_how_far_and_whether_the_range_holds_it() -> None:
    row = ranged("a", 2.0, 2.2, [1.5, 1.9], "all")
    assert row.deviation == pytest.approx(0.1)
    assert (row.low, row.high, row.outside) == (1.5, 2.2, 0.0)
    assert "simulator_x_known_error" not in paper_figures("x", [row])
    above = ranged("b", 2.0, 1.0, [1.5], "all", known=True)
    assert above.outside == pytest.approx(0.25)
    assert ranged("c", 2.0, 3.0, [], "all").outside == pytest.approx(0.5)
    assert paper_figures("x", [row, above]) == {
        "simulator_x_error": pytest.approx(0.5),
        "simulator_x_known_error": pytest.approx(0.5),
        "simulator_x_outside": pytest.approx(0.25),
    }


def test_what_the_engine_adds_comes_from_other_depths_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made = papers.tlt_instance(0.6)
    before = papers.engine_share(made, 2000)
    assert min(before) > 0.0
    spoiled = deepcopy(TLT["speedup"])
    spoiled[COMPARED] = [1.0] * 6
    monkeypatch.setitem(TLT, "speedup", spoiled)
    assert papers.engine_share(made, 2000) == before
    spoiled[0] = [1.0] * 6
    assert papers.engine_share(made, 2000) != before


def test_the_fit_finds_what_was_put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    made, given = papers.tlt_instance(0.6), (3e-4, 5e-3)

    def step_s(depth: int, verified: int) -> float:
        drafted_s = made.speculative_s(1, 2000, nodes=verified - 1, levels=depth, width=TLT["width"])
        return drafted_s + depth * given[0] + given[1]

    speedups = [
        [
            TLT["acceptance"][row][column] * made.plain_s(1, 2000) / step_s(depth, verified)
            for column, verified in enumerate(TLT["verified"])
        ]
        for row, depth in enumerate(TLT["depths"])
    ]
    monkeypatch.setitem(TLT, "speedup", speedups)
    assert papers.engine_share(made, 2000) == pytest.approx(given)
    column = TLT["verified"].index(64)
    assert papers.tlt_speedup(made, 1, 64, 2000, given) == pytest.approx(speedups[COMPARED][column])


def test_the_table_at_batch_one_is_the_grid_at_the_compared_depth() -> None:
    for verified, figures in TLT["published"].items():
        assert figures[0] == TLT["speedup"][COMPARED][TLT["verified"].index(int(verified))]


def test_tlt_within_fifteen_percent_but_for_the_largest_batch() -> None:
    rows = {row.name: row for row in papers.tlt_rows()}
    assert len(rows) == 12
    far = [name for name, row in rows.items() if abs(row.deviation) > 0.15]
    assert far == ["tlt_64_b32"]
    # many verified tokens win at batch 1 and lose at 32, as published
    assert rows["tlt_64_b1"].simulated > rows["tlt_16_b1"].simulated
    assert rows["tlt_64_b32"].simulated < rows["tlt_16_b32"].simulated


def test_a_share_and_the_bound_are_each_others_inverse() -> None:
    assert papers.share_of(3.0, bound(0.6, 3.0)) == pytest.approx(0.6)
    # in turns a step gains exactly the bound
    assert papers.step_speedup(100.0, 50.0, 2.0) == pytest.approx(bound(100 / 150, 2.0))


def test_the_share_that_rlhfspec_implies_is_above_the_one_that_it_states() -> None:
    paper = PAPERS["rlhfspec"]
    assert paper["least_share"] < papers.share_of(paper["generation"], paper["whole"]) < 1.0
