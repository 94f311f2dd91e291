"""What a simulated cluster's config stands for: dimensions read, devices looked up, an instance put together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from core.settings.simulated_cluster import QWEN_7B, SimulatedClusterConfig
from policies.simulate.performance.analytic_instance import AnalyticInstance, Draft
from policies.simulate.performance.contradiction import ContradictionError
from policies.simulate.performance.device_sheets import SHEETS
from policies.simulate.performance.draft_yields import accepted_nodes, even_acceptance
from policies.simulate.performance.model_dimensions import (
    ModelDimensions,
    dimensions_of,
    head_dimensions,
    read_dimensions,
)
from policies.simulate.performance.roofline import Reached, Roofline
from policies.simulate.simulation_records import Samples
from policies.simulate.workloads import WorkloadName, drawn_lengths, samples_of

DEEPEST = 16
"Levels up to which the adaptive choice looks."


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedCluster:
    """The parts."""

    config: SimulatedClusterConfig
    instance: AnalyticInstance
    recorded: np.ndarray | None = None
    "lengths to draw from"
    batches: tuple[Samples, ...] = ()
    "the samples of each step themselves, again and again, instead of drawn ones"
    training_s: tuple[float, ...] = ()
    "of each of these batches, where they are known"

    @property
    def target(self) -> ModelDimensions:
        """The policy's."""
        return self.instance.target.model

    def samples(self, step: int) -> Samples:
        """One step's samples, drawn for it alone."""
        if self.batches:
            return self.batches[step % len(self.batches)]
        wanted = self.config.lengths
        seed = wanted.seed + step
        count, instances = wanted.samples, self.config.pools.instances
        if self.recorded is not None:
            drawn = np.random.default_rng(seed).choice(self.recorded, count)
            lengths = np.minimum(drawn, wanted.max_new_tokens)
        elif wanted.draw == "equal":
            lengths = np.full(count, wanted.max_new_tokens)
        else:
            name: WorkloadName = wanted.draw
            lengths = drawn_lengths(name, count, instances, max_new_tokens=wanted.max_new_tokens, seed=seed)
        made = samples_of(
            lengths, prompt_tokens=wanted.prompt_tokens, speed_sigma=wanted.speed_sigma, seed=seed
        )
        if wanted.group_samples == 1:
            return made
        return replace(made, group=np.arange(count) // wanted.group_samples)


def describe(config: SimulatedClusterConfig, recorded: np.ndarray | None = None) -> DescribedCluster:
    """Put the parts together. Raises ConfigError for dimensions that cannot be read, ContradictionError for others."""
    model, device, pools = config.model, config.device, config.pools
    sheet = SHEETS[device.name]
    if model.config is not None:
        dimensions = read_dimensions(Path(model.config).expanduser())
    else:
        dimensions = dimensions_of(model.dimensions or QWEN_7B, origin="model.dimensions")
    sheet.flops(model.precision)
    reached = Reached(
        memory=device.memory_share,
        compute=device.compute_share,
        link=device.link_share,
        layer_s=device.layer_s,
        collective_s=device.collective_s,
    )
    target = Roofline(
        model=dimensions,
        sheet=sheet,
        gpus=pools.tensor_parallel,
        precision=model.precision,
        cache_bytes=model.cache_bytes,
        reached=reached,
        split=pools.split,
    )
    if pools.split == "expert" and not dimensions.experts:
        raise ContradictionError(
            "pools.split expert: the model has no experts; expected num_experts in its config, or tensor"
        )
    return DescribedCluster(
        config=config,
        instance=AnalyticInstance(target=target, draft=_draft(config, target)),
        recorded=recorded,
    )


def _draft(config: SimulatedClusterConfig, target: Roofline) -> Draft | None:
    drafter = config.drafter
    if drafter.kind == "none":
        return None
    if drafter.config is not None:
        model = read_dimensions(Path(drafter.config).expanduser())
    else:
        model = head_dimensions(target.model, layers=drafter.layers, vocabulary=drafter.vocab_size)
    levels = drafter.depth
    nodes = drafter.nodes or levels
    given = drafter.acceptance or (even_acceptance(drafter.acceptance_length, levels),)
    accepted = accepted_nodes(given, max(DEEPEST, levels))
    tokens = drafter.acceptance_length if drafter.acceptance is None else 1.0 + float(accepted[levels])
    return Draft(
        roofline=Roofline(
            model=model,
            sheet=target.sheet,
            gpus=drafter.tensor_parallel or target.gpus,
            precision="bf16",
            cache_bytes=target.cache_bytes,
            reached=target.reached,
            split=target.split,
        ),
        accepted=accepted,
        level_s=drafter.level_s,
        step_s=drafter.step_s,
        nodes=nodes,
        levels=levels,
        width=drafter.width,
        tokens=tokens,
    )
