"""Weights that the instances do not decode as transformers computes them are not served."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_chat import save_byte_pair

from rlhfspec.cluster.jobs.engine_server import plan_server
from rlhfspec.cluster.observe.console import Reporter
from rlhfspec.cluster.ray_start.ray_session import RaySession
from rlhfspec.cluster.serving.engine_pool import EnginePool
from rlhfspec.cluster.serving.outcome_check import OutcomeCheck
from rlhfspec.cluster.serving.served_weights import read_version
from rlhfspec.core.errors import ModelError

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_an_update_that_decodes_to_something_else_leaves_the_weights_before(
    local_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save_byte_pair(tmp_path)
    tree = {
        "engine": {"max_running_samples": 4, "probe": False, "device": "cpu"},
        "cluster": {"generation": {"num_actors": 1, "num_cpus": 0.3}, "poll_interval_s": 0.05},
    }
    plan = plan_server(tree, Reporter(), model=str(tmp_path / "target"))
    compared = list[str | None]()
    is_planted = False
    own = OutcomeCheck.fault

    def fault(self: OutcomeCheck, weights: Any, said: Any) -> str | None:
        # the fault is planted in the weights of the oracle: the instances' are bit for bit what was published
        if is_planted:
            other = read_version(str(tmp_path / "draft"), plan.config.models, weights, version=2)
            weights = other
        compared.append(own(self, weights, said))
        return compared[-1]

    monkeypatch.setattr(OutcomeCheck, "fault", fault)
    pool = EnginePool(plan, RaySession(namespace="test-outcome", is_local=False, dashboard_url=None))
    try:
        assert compared == [None]
        save_scaled(tmp_path, 1.01)
        weights = read_version(str(tmp_path / "target"), plan.config.models, pool.target, version=1)
        pool.publish(weights).result()
        assert compared == [None, None] and pool.target.manifest.weight_version == 1
        save_scaled(tmp_path, -1.0, to="draft")
        is_planted = True
        weights = read_version(str(tmp_path / "target"), plan.config.models, pool.target, version=2)
        with pytest.raises(ModelError, match=r"do not say what their weights say: response token \d+ of 16"):
            pool.publish(weights).result()
        assert pool.target.manifest.weight_version == 1 and pool.failure is None
        request = OutcomeCheck(plan).request(0)
        (said,) = asyncio.run(answers(pool, request))
        assert {span.weight_version for span in said.weight_spans} == {1}
    finally:
        pool.stop()


async def answers(pool: EnginePool, request: Any) -> list[Any]:
    return [said async for _, said, has_ended in pool.generate([request], streams=False) if has_ended]


def save_scaled(folder: Path, factor: float, *, to: str = "target") -> None:
    """The target's weights, its output scaled."""
    from rlhfspec.engine.weights.loading import load_causal_lm

    model = load_causal_lm(str(folder / "target"), "float32")
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(factor)
    model.save_pretrained(folder / to)
