"""Everything that can be known to be wrong before a run starts, checked in the order a user fixes it.

config -> machine or cluster -> models -> tokenizers -> data -> reward -> memory and disk -> profile. Each fault
raises one InputError with one message. `check_run` is the one list of what a run is refused for by config, files or
environment: `rlhfspec check` and `rlhfspec train` both run it, before Ray starts, so that a run fails at setup and not
at iteration 300.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch
from ray.util.placement_group import remove_placement_group

from ...actors.remote.assigned_device import CUDA_CONTEXT_BYTES
from ...core.config import Config
from ...core.errors import ConfigError, DataError, PlacementError
from ...core.idle import idle_keys
from ...core.settings.cluster import ClusterConfig
from ...core.settings.correction import correction_warning
from ...core.settings.environment import EnvironmentConfig
from ...core.settings.generation import EngineConfig
from ...engine.admission import MB, require_room_for_one
from ...engine.model.compute_backend import ComputeBackend
from ...engine.numerics import attention_for, describe_numerics, resolve_device, resolve_numerics
from ...engine.weights.causal_lm import DTYPES
from ...learning.environments.environment_protocol import (
    Environment,
    environment_maker,
    is_raw,
    misspelt_attributes,
    stop_texts,
)
from ...learning.environments.tools import require_tools
from ...learning.training.engine_scoring import require_engine_scoring
from ...learning.training.training_forward import compute_dtype_on
from ..folder.remote_copy import require_place
from ..folder.trackers import require_trackers
from ..ray_start import machine
from ..ray_start.forked_workers import is_local, joined_address
from ..ray_start.ray_session import check_local_ray, object_store_bytes, ray_session, require_reachable
from .gpu_room import require_gpu_room
from .inputs import Inputs, read_inputs
from .memory_plan import MemoryNeeds, MemoryPlan, gib
from .model_check import CheckedModels, check_models
from .model_sizes import ModelShape
from .reward_plan import check_reward, pattern_notes, require_references, reward_columns
from .run_plan import RunPlan
from .run_profile import RunProfile
from .topology import Topology, place, plan_topology, require_machine

_UNPLANNED = (
    "what reward models take of GPUs (weights, a forward of reward.batch_size texts) is not in the plan: leave room "
    "for it in the shares cluster.*.num_gpus"
)

_OF_A_RUN = "sampling.max_new_tokens, trainer.max_tokens_per_forward"


def check_run(
    config: Config, *, output_dir: Path, keeps_ends: bool = False, elsewhere: machine.Gpus | None = None
) -> RunPlan:
    """Check a config whose model names are resolved (no `demo` left); the plan of its run.

    `keeps_ends`: end tokens stay as the config has them, as in a run that is gone on with. `elsewhere`: for a machine
    with these GPUs, of which no more is known, in place of this one.
    Raises ModelError, DataError, ConfigError, RewardError or PlacementError: the first fault found.
    """
    numerics = _check_engine(config.engine, config.cluster.generation.num_gpus)
    if config.trainer.scoring == "engine":
        old = config.algorithm.correction.old_logprobs
        recomputes = old == "trainer" and not config.rollout.max_staleness
        _check_scoring(config.engine, config.cluster, on_gpu=config.learns_on_gpu, recomputes=recomputes)
    if is_local(config.cluster.address) and not config.learns_on_gpu:
        compute_dtype_on(torch.device("cpu"), DTYPES[config.models.dtype], config.trainer.compute_dtype)
    require_trackers(config.tracking)
    if config.run.copy_to is not None:
        require_place(config.run.copy_to, output_dir)
    topology = plan_topology(config)
    _require_machine(topology, config.cluster, elsewhere)
    models = check_models(config)
    inputs = read_inputs(config, models.tokenizer)
    dataset, config = _describe_data(inputs, config.run.epochs), config.lasting(inputs.dataset.pass_prompts)
    _require_context(inputs, models, config.sampling.max_new_tokens, config.max_first_words_tokens)
    total, ranks = inputs.max_total_tokens, config.cluster.generation.tensor_parallel
    models.require_served(
        config.speculation, max_total_tokens=total, ranks=ranks, takes_drafts=config.takes_drafts
    )
    columns = reward_columns(config.data, config.evaluation)
    reward = check_reward(config.reward, columns, inputs.dataset.prompts[0])
    environment = _made_environment(config.environment)
    require_tools(config.environment, config.data, inputs.tokenizer)
    evaluated = inputs.evaluation.prompts if inputs.evaluation is not None else ()
    prompts = chain(inputs.dataset.prompts, evaluated)
    require_references(config.reward, config.environment, environment, prompts)
    needs = MemoryNeeds(config, models.shapes(reward.num_params), max_total_tokens=inputs.max_total_tokens)
    room = _Room.of(output_dir, config.cluster, elsewhere)
    memory = _plan_memory(needs, config.cluster, room)
    if memory.checkpoints:
        trainer = config.trainer.model_copy(update={"gradient_checkpointing": True})
        config = config.model_copy(update={"trainer": trainer})
    if config.engine.kv_cache_mb is not None:
        limit = int(config.engine.kv_cache_mb * MB)
        require_room_for_one(limit, needed=memory.longest_sample_bytes, num_tokens=inputs.max_total_tokens)
    adapter = _describe_adapter(models.target, memory)
    correction = correction_warning(config.algorithm.correction, config.rollout.max_staleness)
    patterns = pattern_notes(config.reward, inputs.dataset.prompts, models.tokenizer)
    notes = (adapter, correction, *reward.functions, *patterns)
    remarks = [f"{key} has no effect: {why}" for key, why in idle_keys(config)]
    remarks += [_UNPLANNED] if config.reward.models and config.cluster.reward.num_gpus else []
    remarks += misspelt_attributes(environment) if environment is not None else []
    if is_local(config.cluster.address) and elsewhere is None:
        remarks += spill_notes(memory.object_store_bytes, needs.object_store())
    on_gpus = [f"{key} is {value}, the default on GPUs" for key, value in config.device_defaults.items()]
    evaluation = () if inputs.evaluation is None else inputs.evaluation.lines
    return RunPlan(
        config=config if keeps_ends else config.ending_at(inputs.end_token_ids),
        topology=topology,
        models=models,
        inputs=inputs,
        memory=memory,
        profile=RunProfile(config, inputs).known(),
        scores_groups=reward.in_groups,
        report=_report(
            {
                "models": (*models.lines, adapter),
                "data": (dataset.format(config.run.iterations), *inputs.notes(), *evaluation),
                "reward": notes[2:],
                "numerics": (numerics, *on_gpus, correction),
                "settings": remarks,
                **_describe_memory(memory, room),
                "placement": topology.describe().splitlines(),
            }
        ),
        notes=(*models.doubts, *remarks, *(note for note in notes if note is not None)),
    )


def _report(sections: Mapping[str, Iterable[str | None]]) -> tuple[str, ...]:
    """Headings, each with its lines below; one without lines is left out."""
    lines: list[str] = []
    for heading, below in sections.items():
        found = [f"  {line}" for line in below if line is not None]
        lines += [heading, *found] if found else []
    return tuple(lines)


def require_room_in_cluster(plan: RunPlan) -> None:
    """Reserve what the run wants in the cluster that it would join, and give it back: as the run's start does.

    Nothing is asked where the run starts a Ray of its own. Raises PlacementError: the cluster cannot be joined, or does
    not have it within `cluster.placement_timeout_s`.
    """
    cluster = plan.config.cluster
    if not joined_address(cluster.address):
        return
    with ray_session(cluster, "check"):
        remove_placement_group(place(plan.topology, is_local=False))


def _check_engine(engine: EngineConfig, num_gpus: float) -> str:
    """Require that what computes goes together; a line that says what is promised of the tokens."""
    if num_gpus > 0:
        return "said by the GPU nodes when they start"  # what they can do is known there only
    device = resolve_device(engine.device)
    attention_for(engine, resolve_numerics(engine, device), ComputeBackend(device))
    return describe_numerics(engine, device)


def _made_environment(settings: EnvironmentConfig) -> Environment | None:
    """Make the environment and ask it what a run asks, None where there is none. Raises ConfigError."""
    if settings.kind is None:
        return None
    environment = environment_maker(settings)()
    stop_texts(environment)
    is_raw(environment)
    return environment


def _require_machine(topology: Topology, cluster: ClusterConfig, elsewhere: machine.Gpus | None) -> None:
    """Require a machine that holds all actors, or a cluster that can be reached. Raises PlacementError."""
    address = joined_address(cluster.address)
    if elsewhere is not None:
        if "GPU" not in topology.wanted():
            raise PlacementError(
                "--gpus is of GPUs, and the config asks for none; set cluster.trainer.num_gpus and "
                "cluster.generation.num_gpus, or check it without --gpus"
            )
        require_machine(topology, num_cpus=None, num_gpus=elsewhere.number)
    elif is_local(cluster.address):
        require_machine(topology, num_cpus=machine.num_cores(), num_gpus=torch.cuda.device_count())
        check_local_ray(cluster)
    elif address is not None:
        require_reachable(address)


def _check_scoring(engine: EngineConfig, cluster: ClusterConfig, *, on_gpu: bool, recomputes: bool) -> None:
    """Raise ConfigError where the learner could not have the sampler's bits, or is not to take them."""
    if recomputes:
        raise ConfigError(
            "algorithm.correction.old_logprobs trainer computes anew what trainer.scoring engine has from the sampler "
            "bit for bit; take out one of the two"
        )
    if cluster.generation.num_gpus > 0 and engine.device != "cpu":
        raise ConfigError(
            f"trainer.scoring engine needs instances on the CPU, cluster.generation.num_gpus is "
            f"{cluster.generation.num_gpus}; set trainer.scoring: model"
        )
    require_engine_scoring(engine, torch.device("cuda" if on_gpu else "cpu"))


def _describe_data(inputs: Inputs, epochs: float | None) -> str:
    line = f"{len(inputs.dataset)} prompts, the longest {inputs.dataset.max_prompt_tokens} tokens"
    if (of_teacher := inputs.dataset.prompts.max_teacher_tokens) > inputs.dataset.max_prompt_tokens:
        line += f", to the teacher {of_teacher}"
    return line if epochs is None else f"{line}; run.epochs {epochs:g} is {{}} iterations"


def _describe_adapter(target: ModelShape, memory: MemoryPlan) -> str | None:
    adapter = target.num_adapter_params
    if adapter is None:
        return None
    share = adapter / (target.num_params + adapter)
    return (
        f"LoRA: {adapter / 1e6:.2f}M of {(target.num_params + adapter) / 1e6:.2f}M parameters learn ({share:.2%}); "
        f"trainer {gib(memory.trainer_gpu_bytes or memory.trainer_bytes)}"
    )


def _require_context(
    inputs: Inputs, models: CheckedModels, max_new_tokens: int, max_first_words_tokens: int
) -> None:
    """Raise DataError where a sample might not fit the context of one of the models."""
    context_tokens, longest = models.context_tokens, inputs.dataset.prompts.max_teacher_tokens
    if models.teacher_tokens is not None and longest + max_new_tokens > models.teacher_tokens:
        raise DataError(
            f"the longest prompt that the teacher reads has {longest} tokens and sampling.max_new_tokens is "
            f"{max_new_tokens}: together more than the {models.teacher_tokens} that models.teacher holds; lower one"
        )
    if context_tokens is None:
        return
    longest = inputs.dataset.max_prompt_tokens
    needed = longest + max_new_tokens + max_first_words_tokens
    if needed > context_tokens:
        raise DataError(
            f"the longest prompt has {longest} tokens and sampling.max_new_tokens is {max_new_tokens}: {needed} "
            f"together, but the models' context holds {context_tokens}; lower sampling.max_new_tokens or "
            "data.max_prompt_tokens (with data.on_long_prompt=skip)"
        )
    if inputs.evaluation is not None:
        inputs.evaluation.require_context(context_tokens)


def _describe_memory(memory: MemoryPlan, room: _Room) -> dict[str, list[str]]:
    """Lines of the plan for memory and disk, by their headings."""
    rows = [f"{label:<15}{amount}" for label, amount in memory.rows()]
    on_gpu = {"an instance": memory.gpu_bytes, "a trainer": memory.trainer_gpu_bytes}
    if of_each := [f"{gib(size + CUDA_CONTEXT_BYTES)} {who}" for who, size in on_gpu.items() if size]:
        rows.append(f"{'of each GPU':<15}{', '.join(of_each)} ({gib(CUDA_CONTEXT_BYTES)} of each is CUDA's)")
    have, free = (
        "an unknown amount" if size is None else gib(size) for size in (room.memory_bytes, room.disk_bytes)
    )
    return {
        f"memory, of {have} available {room.where}": rows,
        "disk": [f"{gib(memory.disk_bytes)} of {free} free"],
    }


@dataclass(frozen=True, slots=True)
class _Room:
    """What there is; None: not known."""

    memory_bytes: int | None
    disk_bytes: int | None
    gpus: machine.Gpus | None
    output_dir: Path
    where: str

    @classmethod
    def of(cls, output_dir: Path, cluster: ClusterConfig, elsewhere: machine.Gpus | None) -> _Room:
        """Here, or on a machine of which only the GPUs are known; those of other nodes are not asked from here."""
        if elsewhere is not None:
            return cls(None, None, elsewhere, output_dir, "there")
        gpus = machine.gpus() if is_local(cluster.address) else None
        free = machine.free_disk_bytes(output_dir)
        return cls(machine.memory_bytes(), free, gpus, output_dir, "here")


def _plan_memory(needs: MemoryNeeds, cluster: ClusterConfig, room: _Room) -> MemoryPlan:
    """The plan that there is room for: with activations computed anew where that is left open and must be."""
    wanted = needs.object_store()
    # elsewhere nothing is known of what bounds it
    bounded = wanted if room.where == "there" else object_store_bytes(wanted)
    store = cluster.object_store_bytes or bounded
    memory = needs.plan(object_store_bytes=store)
    try:
        _require_room(cluster, memory, room)
    except PlacementError:
        if not needs.may_checkpoint:
            raise
        memory = needs.checkpointed().plan(object_store_bytes=store)
        _require_room(cluster, memory, room)
    return memory


def spill_notes(store_bytes: int, wanted_bytes: int) -> list[str]:
    """A line where a run's object store is smaller than what it is to hold."""
    if store_bytes >= wanted_bytes:
        return []
    return [
        f"the object store has {gib(store_bytes)} of the {gib(wanted_bytes)} that weights and rollouts take, and Ray "
        "writes the rest to a disk; give it more of /dev/shm (docker run --shm-size, cluster.object_store_bytes)"
    ]


def plan_untrained(needs: MemoryNeeds, cluster: ClusterConfig, *, beside: int = 0) -> MemoryPlan:
    """What a server or an evaluation takes, and so many bytes `beside` it: nobody learns, no disk keeps anything."""
    store = cluster.object_store_bytes or object_store_bytes(needs.object_store())
    whole = needs.plan(object_store_bytes=store)
    whole = replace(whole, ray_bytes=whole.ray_bytes + beside)
    return replace(whole, num_trainer=0, trainer_gpu_bytes=0, disk_bytes=0)


def require_room_for(who: str, memory: MemoryPlan, cluster: ClusterConfig, *, advice: str) -> None:
    """Raise PlacementError where the instances of a server or an evaluation have no room here, or on the GPUs."""
    _require_room(cluster, memory, _Room.of(Path.cwd(), cluster, None), who, advice)


def _require_room(
    cluster: ClusterConfig, memory: MemoryPlan, room: _Room, who: str = "the run", advice: str = _OF_A_RUN
) -> None:
    if room.gpus is not None and room.gpus.number:
        decoding, learning = cluster.generation.num_gpus, cluster.trainer.num_gpus
        each = room.gpus.each_bytes
        require_gpu_room(memory, num_gpus=decoding, device_bytes=each, trainer_gpus=learning)
    needed = memory.total_bytes
    here = joined_address(cluster.address) is None  # a Ray that this process has started runs here too
    if here and room.memory_bytes is not None and needed > room.memory_bytes:
        parts = ", ".join(f"{label} {amount}" for label, amount in memory.rows()[:-1])
        raise PlacementError(
            f"{who} needs {gib(needed)} of memory but {gib(room.memory_bytes)} are available here ({parts}); lower "
            f"engine.max_running_samples, {advice} or the number of actors"
        )
    if room.disk_bytes is not None and memory.disk_bytes > room.disk_bytes:
        raise PlacementError(
            f"checkpoints and rollouts need {gib(memory.disk_bytes)} but {room.output_dir} has "
            f"{gib(room.disk_bytes)} free; set run.output_dir to a larger disk"
        )
