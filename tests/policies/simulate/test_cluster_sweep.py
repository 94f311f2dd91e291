"""Sweeps: which combinations, what is refused before the first of them is simulated, the best, progress."""

from __future__ import annotations

from typing import Any

import pytest

from rlhfspec.core.errors import ConfigError
from rlhfspec.core.settings.simulated_cluster import SimulatedClusterConfig
from rlhfspec.policies.simulate import sweep as sweep_module
from rlhfspec.policies.simulate.cluster_simulation import num_simulated, require_bounded, require_few_polls
from rlhfspec.policies.simulate.described_cluster import describe
from rlhfspec.policies.simulate.sweep import best, changed, combinations, default_axes, planned, sweep


def small(**sections: dict[str, Any]) -> SimulatedClusterConfig:
    tree = {
        "pools": {"instances": 2, "trainer_gpus": 2},
        "lengths": {"samples": 16, "prompt_tokens": 16, "max_new_tokens": 256},
        "step": {"steps": 1},
    }
    for name, keys in sections.items():
        tree[name] = tree.get(name, {}) | keys
    return SimulatedClusterConfig.model_validate(tree)


def test_a_sweep_names_the_shortest_step_and_keeps_what_cannot_be() -> None:
    base = small()
    rows = sweep(base, {"step.staleness": [0, 1], "pools.colocated": [False, True]})
    assert [row.values["step.staleness"] for row in rows] == [0, 0, 1, 1]
    assert [row.gpus for row in rows] == [4, 2, 4, 0]
    assert "take turns" in rows[3].refused and rows[3].result is None
    chosen = best(rows)
    assert chosen is not None and chosen.result is not None
    steps = [row.result.speculative.step_s for row in rows if row.result]
    assert chosen.result.speculative.step_s == min(steps)
    assert best(rows[3:]) is None
    assert rows[0].label == "staleness 0, colocated False"


def test_another_depth_keeps_the_acceptance_of_a_level() -> None:
    base = small(drafter={"depth": 2, "acceptance_length": 1.75, "policy": "fixed"})
    deeper = describe(changed(base, {"drafter.depth": 3})).instance.draft
    assert deeper is not None and deeper.tokens == pytest.approx(1.875)


def test_keys_that_change_together() -> None:
    together = combinations({"a,b": [[1, 2], [3, 4]], "c": [5]})
    assert together == [{"a": 1, "b": 2, "c": 5}, {"a": 3, "b": 4, "c": 5}]
    with pytest.raises(ConfigError, match="expects lists of 2 values"):
        combinations({"a,b": [[1]]})
    with pytest.raises(ConfigError, match="has 1000 combinations"):
        combinations({"a": list(range(1000))})
    with pytest.raises(ConfigError, match=r"pools\.moons is no key"):
        sweep(small(), {"pools.moons": [1]})


def test_the_default_sweep_spends_the_same_gpus() -> None:
    base = small(pools={"instances": 4, "trainer_gpus": 4, "tensor_parallel": 2})
    axes = default_axes(base)
    splits = axes["pools.tensor_parallel,pools.instances,pools.trainer_gpus"]
    assert {gpus * instances + trainers for gpus, instances, trainers in splits} == {12}
    assert {gpus for gpus, _, _ in splits} == {2, 4}
    assert len(combinations(axes)) == 4 * len(splits) * 2
    one_pool = base.model_copy(update={"pools": base.pools.model_copy(update={"colocated": True})})
    assert list(default_axes(one_pool)) == ["drafter.policy,drafter.depth"]


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ({"step.staleness": [0, 1, "many"]}, r"step\.staleness: .* got 'many'"),
        ({"step.staleness": [0, 1], "drafter.depth": [1, 1000]}, r"drafter\.depth: .* got 1000"),
        ({"step.staleness": [0], "pools.moons": [1]}, r"pools\.moons is no key"),
        ({"step.staleness": [0], "model.config": ["none.json"]}, r"none\.json"),
        ({"step.staleness": [0, 1, 0]}, "0 comes twice"),
        ({"drafter.depth": [1], "drafter.policy,drafter.depth": [["fixed", 2]]}, "comes 2 times"),
        ({"step.staleness": [0, 1], "lengths.file": ["a.jsonl"]}, "read once"),
        ({"sweep.a": [1]}, "another section"),
        ({"step.steps": [1, 6], "lengths.samples": [16, 2_000_000]}, "28,000,224 samples would be played"),
        ({"step.staleness": [0, 1], "lengths.samples": [16, 10**9]}, r"lengths\.samples: .* got 1000000000"),
    ],
)
def test_a_late_fault_is_told_before_anything_is_simulated(
    axes: dict[str, list[Any]], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: object, **keys: object) -> None:
        raise AssertionError("simulated before all combinations were looked at")

    monkeypatch.setattr(sweep_module, "simulate_cluster", never)
    with pytest.raises(ConfigError, match=said):
        sweep(small(), axes)


def test_combinations_that_overflow_are_counted() -> None:
    axes = {f"key{number}": list(range(1000)) for number in range(8)}
    with pytest.raises(ConfigError, match=f"has {1000**8} combinations"):
        combinations(axes)


def test_what_contradicts_itself_is_a_row_not_a_fault() -> None:
    rows = planned(small(), {"device.name": ["A100", "H100"], "model.precision": ["bf16", "fp8"]})
    assert [bool(row.refused) for row in rows] == [False, True, False, False]
    assert "no 8-bit floats" in rows[1].refused and rows[1].cluster is None


def test_a_sweep_tells_where_it_is() -> None:
    told: list[tuple[str, int]] = []
    base = small(drafter={"kind": "none"})
    sweep(base, {"step.staleness": [0, 1]}, progress=lambda name, done: told.append((name, done)))
    assert {name for name, _ in told} == {"1 of 2: plain 1", "2 of 2: plain 1"}
    assert all(0 <= done <= 16 for _, done in told)


def test_no_simulation_takes_a_night() -> None:
    assert num_simulated(small(step={"steps": 2})) == 2 * 2 * 16
    # six that count, and those that fill and empty the pipeline
    assert num_simulated(small(step={"steps": 2, "staleness": 1, "schedule": "free"})) == 2 * 10 * 16
    assert require_bounded([small(drafter={"kind": "none"})]) == 16
    with pytest.raises(ConfigError, match=r"expected at most 20,000,000"):
        require_bounded([small(lengths={"samples": 2_000_000}, step={"steps": 6})])
    require_few_polls(1.0, 90_000.0)
    with pytest.raises(ConfigError, match="100,000,000 times at a rollout of 100 s"):
        require_few_polls(1e-6, 100.0)
