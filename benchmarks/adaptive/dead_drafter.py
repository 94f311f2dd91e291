"""A drafter that dies in the middle of a run: how soon it is noticed, what it costs."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

import torch

from benchmarks.adaptive.pairs import engine_for
from benchmarks.support.workload import Workload
from rlhfspec.core.config import SpeculationConfig
from rlhfspec.engine.drafters.model_drafter import ModelDrafter
from rlhfspec.engine.model.llama_model import LlamaModel
from rlhfspec.profiles.profile import Profile

BATCH_SIZE = 8
HEALTHY_STEPS = 100
STEPS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadDrafter:
    """What happened after the weights became zero."""

    suspended_after_steps: int
    alarm: str
    cost_share: float
    "seconds beyond plain decoding after the death, over the seconds of the whole run"


def plant_dead_drafter(workload: Workload, profile: Profile) -> DeadDrafter:
    """Decode STEPS steps with a full batch; zero the draft model's weights after HEALTHY_STEPS of them."""
    engine = engine_for(workload, SpeculationConfig(policy="goodput"), batch_size=BATCH_SIZE, profile=profile)
    drafter = engine.drafter
    assert isinstance(drafter, ModelDrafter)
    model = drafter.runner.model
    assert isinstance(model, LlamaModel)
    records = []
    number = 0
    suspended_at = None
    while len(records) < STEPS:
        while engine.num_waiting < BATCH_SIZE:
            request = workload.requests()[number % len(workload.prompts)]
            engine.submit(replace(request, key=replace(request.key, sample_index=number)))
            number += 1
        if len(records) == HEALTHY_STEPS:
            drafter.runner.load({name: torch.zeros(shape) for name, shape in model.shapes.items()})
            drafter.drop()
        engine.step()
        records.append(engine.step_records[-1])
        if suspended_at is None and "suspended" in records[-1].budget.reason:
            suspended_at = len(records) - 1
    engine.cancel_all()
    after = records[HEALTHY_STEPS:]
    plain_s = statistics.median(record.step_s for record in after if record.budget.is_plain)
    wasted = sum(record.step_s - plain_s for record in after if not record.budget.is_plain)
    return DeadDrafter(
        suspended_after_steps=(suspended_at if suspended_at is not None else STEPS) - HEALTHY_STEPS,
        alarm=engine.drafter_alarm,
        cost_share=wasted / sum(record.step_s for record in records),
    )
