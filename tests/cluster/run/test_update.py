"""Who waits for whom: the trainers for samples, instances for the trainers, instances for new weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from scripted_pool import weights

from rlhfspec.cluster.run.update import Update
from rlhfspec.core.config_io import config_from_dict


def waits(
    *, began_s: float, ended_s: float, generated_s: float, loaded_s: float, is_cut: bool = False
) -> Any:
    """Rollout wait, backpressure, pause of an iteration that began at 0."""
    schedule: Any = SimpleNamespace(ends_with_update=is_cut)
    update = Update(None, schedule, 0, None)  # type: ignore[arg-type]
    update.began_s, update.ended_s = began_s, ended_s
    waited = update.waits(0.0, generated_s, loaded_s)
    return tuple(waited[f"time/{name}_s"] for name in ("rollout_wait", "backpressure", "pause"))


def test_in_turns_each_waits_while_the_other_works() -> None:
    assert waits(generated_s=4.0, began_s=5.0, ended_s=8.0, loaded_s=8.5) == (5.0, 3.0, 0.5)


def test_ahead_the_shorter_of_both_waits() -> None:
    assert waits(began_s=0.25, ended_s=3.0, generated_s=5.0, loaded_s=5.5) == (2.25, 0.0, 0.5)
    assert waits(began_s=0.25, ended_s=5.0, generated_s=3.0, loaded_s=5.5) == (0.25, 2.0, 0.5)


def test_what_the_update_cuts_is_paused_from_there() -> None:
    assert waits(began_s=0.25, ended_s=3.0, generated_s=3.25, loaded_s=4.0, is_cut=True) == (0.25, 0.0, 1.0)


@pytest.mark.parametrize(("states", "staleness", "stay"), [(10, 0, False), (0, 0, True), (10, 1, True)])
def test_weights_leave_the_store_before_trainers_learn_where_nothing_else_is_lost_by_it(
    monkeypatch, states: int, staleness: int, stay: bool
) -> None:
    monkeypatch.setattr("rlhfspec.cluster.run.update.ray.put", lambda batch: batch)
    target, seen = weights(3), []
    target.chunk_refs = ("a chunk",)
    trainers = SimpleNamespace(
        begin_take=lambda **how: ("order", how),
        begin_update=lambda batch, recompute_old: seen.append(target.chunk_refs) or {},
        heartbeat=lambda order: None,
    )
    sections = {"run": {"state_every": states}, "rollout": {"max_staleness": staleness}}
    sections |= {"data": {"task": "chain"}, "models": {"draft": "demo"}}
    sections |= {"algorithm": {"correction": {"kind": "decoupled"}}}
    config = config_from_dict(sections)
    system: Any = SimpleNamespace(
        target=target,
        trainers=trainers,
        config=config,
        recomputes_old=False,
    )
    schedule: Any = SimpleNamespace(has=lambda iteration: True, take=lambda iteration: [], left_out=[])
    log: Any = SimpleNamespace(rollouts=lambda *what: None)
    Update(system, schedule, 3, log).look()
    assert system.is_learning and seen == [("a chunk",) if stay else ()]
    assert stay or target.fetch() == ("order", {"checksums": "xxh3"})
