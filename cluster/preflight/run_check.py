"""Everything that can be known to be wrong before a run starts, checked in the order a user mends it.

config -> machine or cluster -> models -> tokenizers -> data -> reward -> memory and disk -> profile. Each fault
raises one InputError with one message. `check_run` is the one list of what a run is refused for by config, files or
environment: `rlhfspec check` and `rlhfspec train` both run it, before Ray starts, so that a run fails at setup and not
at iteration 300.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch
from ray.util.placement_group import remove_placement_group
from transformers.configuration_utils import PretrainedConfig

from rlhfspec.cluster.folder.remote_copy import require_place
from rlhfspec.cluster.folder.trackers import require_trackers
from rlhfspec.cluster.placement import machine
from rlhfspec.cluster.placement.memory_plan import (
    MemoryNeeds,
    MemoryPlan,
    ModelShape,
    ModelShapes,
    gib,
    require_gpu_room,
    require_trainer_gpu_room,
)
from rlhfspec.cluster.placement.ray_session import (
    check_local_ray,
    is_local,
    joined_address,
    object_store_bytes,
    ray_session,
    require_reachable,
)
from rlhfspec.cluster.placement.topology import Topology, place, require_machine
from rlhfspec.cluster.placement.topology import plan as plan_topology
from rlhfspec.cluster.preflight.inputs import Inputs, read_inputs
from rlhfspec.cluster.preflight.model_check import check_models, require_served
from rlhfspec.cluster.preflight.references import require_references
from rlhfspec.cluster.preflight.reward_plan import check_reward, pattern_notes, reward_columns
from rlhfspec.cluster.preflight.run_profile import known_profile
from rlhfspec.core.config import Config
from rlhfspec.core.errors import ConfigError, DataError, PlacementError
from rlhfspec.core.settings.correction import correction_warning
from rlhfspec.engine.admission import MB, require_room_for_one
from rlhfspec.engine.model.compute_backend import ComputeBackend
from rlhfspec.engine.numerics import attention_for, describe_numerics, resolve_device, resolve_numerics
from rlhfspec.engine.weights.causal_lm import max_context_tokens
from rlhfspec.learning.data.prompts import PromptDataset
from rlhfspec.learning.environments.environment_protocol import environment_maker, is_raw, stop_texts
from rlhfspec.learning.trainer.engine_scoring import require_engine_scoring


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """What `rlhfspec check` prints, and the inputs it has read on the way."""

    inputs: Inputs
    models: tuple[str, ...]
    adapter: str | None
    "what learns where not all does; a run says it at its start"
    data: str
    evaluation: tuple[str, ...]
    functions: tuple[str, ...]
    "reward functions of the user's: file, and how they are called; a run says it at its start"
    numerics: str
    correction: str | None
    "a warning of stale samples that are learned from as they are; a run says it at its start"
    memory: MemoryPlan
    available_bytes: int | None
    free_disk_bytes: int
    placement: str

    def lines(self) -> list[str]:
        """The report as text lines."""
        have = gib(self.available_bytes) if self.available_bytes is not None else "an unknown amount"
        rows = [f"  {label:<15}{amount}" for label, amount in self.memory.rows()]
        disk = f"{gib(self.memory.disk_bytes)} of {gib(self.free_disk_bytes)} free"
        return [
            "models",
            *(f"  {line}" for line in (*self.models, self.adapter) if line is not None),
            "data",
            *(f"  {line}" for line in (self.data, *self.inputs.notes(), *self.evaluation)),
            *(["reward"] if self.functions else []),
            *(f"  {line}" for line in self.functions),
            "numerics",
            *(f"  {line}" for line in (self.numerics, self.correction) if line is not None),
            f"memory, of {have} available here",
            *rows,
            *(
                [f"  of each GPU    {gib(self.memory.gpu_bytes)} an instance"]
                if self.memory.gpu_bytes
                else []
            ),
            "disk",
            f"  {disk}",
            "placement",
            *(f"  {line}" for line in self.placement.splitlines()),
        ]


def check_run(config: Config, *, output_dir: Path) -> CheckReport:
    """Check a config whose model names are resolved (no `demo` left).

    Raises ModelError, DataError, ConfigError, RewardError or PlacementError: the first fault found.
    """
    numerics = _check_engine(config)
    topology = _check_surroundings(config, output_dir)
    models = check_models(config)
    inputs = read_inputs(config, models.tokenizer)
    longest = inputs.dataset.max_prompt_tokens
    _check_lengths(config, inputs.dataset, models.configs)
    if inputs.evaluation is not None:
        inputs.evaluation.require_context(models.configs)
    max_total_tokens = inputs.max_total_tokens(config)
    require_served(config, models, max_total_tokens=max_total_tokens)
    reward = check_reward(config.reward, reward_columns(config.data, config.evaluation))
    environment = None
    if config.environment.kind is not None:
        environment = environment_maker(config.environment)()
        stop_texts(environment)
        is_raw(environment)
    evaluated = inputs.evaluation.prompts if inputs.evaluation is not None else ()
    require_references(
        config.reward, config.environment, environment, chain(inputs.dataset.prompts, evaluated)
    )
    shapes = ModelShapes(target=models.target, draft=models.draft, reward_params=reward.num_params)
    needs = MemoryNeeds(config, shapes, max_total_tokens=max_total_tokens)
    plan = needs.plan(
        object_store_bytes=config.cluster.object_store_bytes or object_store_bytes(needs.object_store())
    )
    report = CheckReport(
        inputs=replace(
            inputs,
            object_store_bytes=plan.object_store_bytes,
            gpu_bytes=plan.gpu_bytes,
            trainer_gpu_bytes=plan.trainer_gpu_bytes,
        ),
        models=models.lines,
        adapter=_describe_adapter(models.target, plan),
        data=f"{len(inputs.dataset)} prompts, the longest {longest} tokens",
        evaluation=inputs.evaluation.lines if inputs.evaluation is not None else (),
        functions=(
            *reward.functions,
            *pattern_notes(config.reward, inputs.dataset.prompts, models.tokenizer),
        ),
        numerics=numerics,
        correction=correction_warning(config.algorithm.correction, config.rollout.max_staleness),
        memory=plan,
        available_bytes=machine.memory_bytes(),
        free_disk_bytes=machine.free_disk_bytes(output_dir),
        placement=topology.describe(),
    )
    _require_room(config, report, output_dir)
    if config.engine.kv_cache_mb is not None:
        limit = int(config.engine.kv_cache_mb * MB)
        require_room_for_one(limit, needed=plan.longest_sample_bytes, num_tokens=max_total_tokens)
    profile = known_profile(config, report.inputs)
    return replace(report, inputs=replace(report.inputs, profile=profile))


def require_place_in_cluster(config: Config) -> None:
    """Reserve what the run wants in the cluster that it would join, and give it back: as the run's start does.

    Nothing is asked where the run starts a Ray of its own. Raises PlacementError: the cluster cannot be joined, or does
    not have it within `cluster.placement_timeout_s`.
    """
    if not joined_address(config.cluster):
        return
    with ray_session(config.cluster, "check"):
        remove_placement_group(place(plan_topology(config), is_local=False))


def _check_engine(config: Config) -> str:
    """Require that what computes goes together; a line that says what is promised of the tokens."""
    numerics = "said by the GPU nodes when they start"  # what they can do is known there only
    if config.cluster.generation.num_gpus == 0:
        device = resolve_device(config.engine)
        attention_for(config.engine, resolve_numerics(config.engine, device), ComputeBackend(device))
        numerics = describe_numerics(config.engine, device)
    if config.trainer.scoring == "engine":
        _check_scoring(config)
    return numerics


def _check_surroundings(config: Config, output_dir: Path) -> Topology:
    """Require packages, machine or cluster; where the actors are to stand."""
    require_trackers(config.tracking)
    if config.run.copy_to is not None:
        require_place(config.run.copy_to, output_dir)
    topology = plan_topology(config)
    address = joined_address(config.cluster)
    if is_local(config.cluster):
        require_machine(topology, num_cpus=machine.num_cores(), num_gpus=torch.cuda.device_count())
        check_local_ray(config.cluster)
    elif address is not None:
        require_reachable(address)
    return topology


def _check_scoring(config: Config) -> None:
    """Raise ConfigError where the learner could not have the sampler's bits, or is not to take them."""
    cluster = config.cluster
    if config.algorithm.correction.old_logprobs == "trainer" and config.rollout.max_staleness == 0:
        raise ConfigError(
            "algorithm.correction.old_logprobs trainer computes anew what trainer.scoring engine has from the sampler "
            "bit for bit; take out one of the two"
        )
    if cluster.generation.num_gpus > 0 and config.engine.device != "cpu":
        raise ConfigError(
            f"trainer.scoring engine needs instances on the CPU, cluster.generation.num_gpus is "
            f"{cluster.generation.num_gpus}; set trainer.scoring: model"
        )
    on_gpu = cluster.trainer.num_gpus > 0 and config.trainer.device != "cpu"
    require_engine_scoring(config.engine, torch.device("cuda" if on_gpu else "cpu"))


def _describe_adapter(target: ModelShape, memory: MemoryPlan) -> str | None:
    adapter = target.num_adapter_params
    if adapter is None:
        return None
    share = adapter / (target.num_params + adapter)
    return (
        f"LoRA: {adapter / 1e6:.2f}M of {(target.num_params + adapter) / 1e6:.2f}M parameters learn ({share:.2%}); "
        f"trainer {gib(memory.trainer_bytes)}"
    )


def _check_lengths(config: Config, dataset: PromptDataset, models: Sequence[PretrainedConfig | None]) -> None:
    longest = dataset.max_prompt_tokens
    limits = [limit for model in models if model is not None and (limit := max_context_tokens(model))]
    needed = longest + config.max_response_tokens
    if limits and needed > min(limits):
        raise DataError(
            f"the longest prompt has {longest} tokens and sampling.max_new_tokens is "
            f"{config.sampling.max_new_tokens}: {needed} together, but the models' context holds "
            f"{min(limits)}; lower sampling.max_new_tokens or data.max_prompt_tokens "
            "(with data.on_long_prompt=skip)"
        )


def _require_room(config: Config, report: CheckReport, output_dir: Path) -> None:
    if is_local(config.cluster) and torch.cuda.is_available():
        # GPUs of other nodes are not asked from here
        sizes = [
            torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())
        ]
        if config.decodes_on_gpu:
            num_gpus = config.cluster.generation.num_gpus
            require_gpu_room(report.memory, num_gpus=num_gpus, device_bytes=min(sizes))
        if config.learns_on_gpu:
            require_trainer_gpu_room(
                report.memory, num_gpus=config.cluster.trainer.num_gpus, device_bytes=min(sizes)
            )
    needed = report.memory.total_bytes
    here = joined_address(config.cluster) is None  # a Ray that this process has started runs here too
    if here and report.available_bytes is not None and needed > report.available_bytes:
        parts = ", ".join(f"{label} {amount}" for label, amount in report.memory.rows()[:-1])
        raise PlacementError(
            f"the run needs {gib(needed)} of memory but {gib(report.available_bytes)} are available here "
            f"({parts}); lower engine.max_running_samples, sampling.max_new_tokens, "
            "trainer.max_tokens_per_forward or the number of actors"
        )
    if report.memory.disk_bytes > report.free_disk_bytes:
        raise PlacementError(
            f"checkpoints and rollouts need {gib(report.memory.disk_bytes)} but {output_dir} has "
            f"{gib(report.free_disk_bytes)} free; set run.output_dir to a larger disk"
        )
