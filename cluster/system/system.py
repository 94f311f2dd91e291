"""The running system of one run: scheduler, generation pool, reward pool, trainer, data cursor."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ray.util.placement_group import remove_placement_group
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ...actors.actor_messages import Taken
from ...actors.remote.node import own_raylet, watching_raylet
from ...actors.remote.remote import Handle
from ...actors.remote.watch import open_waits, waits_noted, watching
from ...actors.scheduling.scheduler_actor import SchedulerActor
from ...actors.workers.reward_actors import RewardActor, RewardPool
from ...core.config import Config
from ...core.records import Completion, SampleRequest, SamplingParams
from ...learning.data.cursor import PromptCursor
from ...learning.data.prompts import sampling_params
from ..plan.evaluation_prompts import EvaluationPrompts
from ..plan.reward_plan import scoring_timeout_s
from ..plan.run_plan import RunPlan
from ..plan.topology import PlacementContext, Topology, actor_options, place
from ..ray_start.ray_session import RaySession
from ..weights.first_weights import first_draft, load_and_put
from ..weights.publish import PublishedWeights
from .episodes import Episodes, start_episodes
from .generation_pool import GenerationPool
from .instance_table import InstanceTable
from .placement_slots import PlacementSlots, cores_of, lost_machines
from .scheduler_client import SchedulerClient, scheduler_name
from .trainer_pool import TrainerPool
from .weight_broadcast import Broadcast

logger = logging.getLogger(__name__)

Scored = tuple[SampleRequest, Completion, str]
"A completion on its way through the reward pool: its request, itself, its text."


@dataclass(slots=True, kw_only=True)
class GeneratingSystem:
    """Handles to what generates and scores; `draft` and `target` are the versions published last."""

    plan: RunPlan
    tokenizer: PreTrainedTokenizerBase
    scheduler: SchedulerClient
    generation: GenerationPool
    rewards: RewardPool[Scored] | None
    "None: environments give them"
    episodes: Episodes | None
    "None: every response is one turn"
    target: PublishedWeights
    draft: PublishedWeights | None
    evaluation: EvaluationPrompts | None = None
    is_learning: bool = False
    "whether an iteration has begun to change what the trainers hold: no state can be taken then"

    @property
    def config(self) -> Config:
        """The run's config."""
        return self.plan.config

    def take(
        self, wait_s: float, note: Callable[[str], None], *, gathers: bool = False, may_fetch: bool = True
    ) -> Taken:
        """Ask the scheduler for updates; replace what was lost, let the pool grow and shrink, say what is odd.

        `may_fetch`: whether the trainer can be asked for weights. Raises what generation cannot go on after.
        """
        taken = self.scheduler.take(wait_s, gathers)
        suspended = (f"drafter alarm, drafting suspended on {text}" for text in taken.drafter_alarms)
        for line in (*self.scheduler.updates(), *suspended):
            note(line)
        for alarm in taken.alarms:
            note(
                f"integrity alarm: sample {alarm.key.sample_index} from {alarm.instance} under epoch "
                f"{alarm.epoch}: {alarm.what}; the report was dropped"
            )
        for lost in taken.lost:
            self.generation.replace(lost)
        self.generation.look(taken, may_fetch=may_fetch)
        return taken

    def stop(self) -> None:
        """Let the actors end their loops; what is left ends with their bundles."""
        self.scheduler.stop()
        self.generation.stop()


@dataclass(slots=True, kw_only=True)
class System(GeneratingSystem):
    """Handles to everything."""

    cursor: PromptCursor
    sampling: SamplingParams
    trainers: TrainerPool
    broadcast: Broadcast
    lost_machines: Callable[[], list[str]] = list
    "Ray's ids of those that are gone with the scheduler's, a reward actor's or a trainer's place on them"
    refit_overhead_s: float = 0.0
    "what the last refit of the draft model took beside the learning: packing, publishing, confirming"
    num_cores: float = 0.0
    "of the machine that all actors stand on; 0: on several"
    noted_faults: set[str] = field(default_factory=set)
    "of the draft head's training, that were told"

    @property
    def recomputes_old(self) -> bool:
        """Whether ratios are over the trainer's own log-probabilities (`algorithm.correction.old_logprobs`)."""
        return self.config.algorithm.correction.recomputes_old(
            is_exact=self.generation.is_invariant and not self.config.trainer.scores_in_bfloat16,
            max_staleness=self.config.rollout.max_staleness,
        )


@contextmanager
def running_system(
    plan: RunPlan,
    session: RaySession,
    *,
    note: Callable[[str], None] = logger.warning,
    patience_s: float = 0.0,
) -> Iterator[System]:
    """Run all actors of a plan, first weights loaded.

    Their bundles are given back however the block ends, and the actors end with them. `note` is told, one line each,
    of actors that are lost and replaced, and of waits that take unusually long. `patience_s`: how much longer than
    `cluster.placement_timeout_s` to wait for a place.
    Raises InputError for models, reward function or placement that cannot be used.
    """
    with _placed(plan.topology, session, note, patience_s) as made:
        with waits_noted(_awaited):
            system = _make_system(plan, made)
            _bring_up(system)
        cores = cores_of(made.context.group, plan.topology)
        machines = set(cores.values())
        system.num_cores = machines.pop()[1] if len(machines) == 1 else 0.0
        if plan.config.rollout.max_staleness and (shared := plan.shared_by_updates(cores)):
            note(f"updates run while later batches are sampled, and slow that down: {shared}")
        yield system
        system.stop()


@contextmanager
def running_generation(
    plan: RunPlan, session: RaySession, *, note: Callable[[str], None] = logger.warning
) -> Iterator[GeneratingSystem]:
    """Run what generates and scores, without a trainer. Otherwise, and in what it raises, as `running_system`."""
    plan = plan.generating()
    with _placed(plan.topology, session, note) as made:
        with waits_noted(_awaited):
            system = GeneratingSystem(**_make_generation(plan, made))
            _bring_up_generation(system)
        yield system
        system.stop()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    """Where a run's actors stand, and whom they tell what becomes of them."""

    topology: Topology
    context: PlacementContext
    places: PlacementSlots
    note: Callable[[str], None]


@contextmanager
def _placed(
    topology: Topology, session: RaySession, note: Callable[[str], None], patience_s: float = 0.0
) -> Iterator[_Placed]:
    """Reserve all bundles, and give them back; within the block, waits are watched."""
    with watching(note), watching_raylet(own_raylet() if session.is_local else None, note):
        group = place(topology, is_local=session.is_local, patience_s=patience_s, note=note)
        places = PlacementSlots(group, pinned_to="generation" if topology.pins_pools else None)
        context = PlacementContext(group=group, namespace=session.namespace, environment=session.environment)
        try:
            yield _Placed(topology=topology, context=context, places=places, note=note)
        finally:
            places.free_all()
            remove_placement_group(group)


def _make_system(plan: RunPlan, made: _Placed) -> System:
    """Start every process; they come up at the same time, while the models are read here."""
    config, inputs = plan.config, plan.inputs
    trainers = TrainerPool.start(plan.trainer_spec(), made.topology.trainer, made.context, config.cluster)
    return System(
        **_make_generation(plan, made),
        cursor=PromptCursor(inputs.dataset, run_seed=config.run.seed, shuffle=config.data.shuffle),
        sampling=sampling_params(config.sampling, inputs.tokenizer, model=config.models.target),
        trainers=trainers,
        broadcast=Broadcast(config.cluster, trainers, made.note),
        lost_machines=partial(lost_machines, made.context.group, made.topology.fixed_bundles),
    )


def _make_generation(plan: RunPlan, made: _Placed) -> dict[str, Any]:
    """Start scheduler, instances, environments and reward actors; the fields of a `GeneratingSystem`."""
    config, tokenizer = plan.config, plan.inputs.tokenizer
    instances = InstanceTable()
    options = actor_options(made.topology.scheduler, made.context)
    scheduler = SchedulerClient(
        lambda settings: SchedulerActor.options(**options | {"name": scheduler_name(settings.term)}).remote(
            settings
        ),
        plan.scheduler_settings(),
        instances,
        max_restarts=config.cluster.max_scheduler_restarts,
        start_timeout_s=config.cluster.start_timeout_s,
    )
    generation = GenerationPool(
        cluster=config.cluster,
        topology=made.topology,
        context=made.context,
        places=made.places,
        scheduler=scheduler,
        instances=instances,
        spec_for=plan.generation_spec,
        note=made.note,
    )
    generation.make_all()
    episodes = start_episodes(plan, made.context, made.note)
    return {
        "plan": plan,
        "tokenizer": tokenizer,
        "scheduler": scheduler,
        "generation": generation,
        "rewards": _rewards(plan, made),
        "episodes": episodes,
        "target": load_and_put(config.models.target, "target", config.models),
        "draft": first_draft(plan.models.drafts),
        "evaluation": plan.inputs.evaluation,
    }


def _bring_up_generation(system: GeneratingSystem) -> None:
    start_timeout_s = system.config.cluster.start_timeout_s
    if system.rewards is not None:
        system.rewards.check(timeout_s=start_timeout_s)
    if system.episodes is not None:
        system.episodes.check(timeout_s=start_timeout_s)
    system.generation.bring_up(*[weights for weights in (system.target, system.draft) if weights is not None])


def _awaited() -> str:
    """What a start waits for, as the watch knows it."""
    waits = open_waits()
    return f"{waits[0].waited_for} to '{waits[0].order}'" if waits else "the models to be read"


def _bring_up(system: System) -> None:
    """Give trainers and instances their first weights, all at the same time; the reward functions must build."""
    config, place = system.config, system.config.models.teacher
    system.trainers.begin_loading(
        system.target,
        system.draft if config.refits_draft else None,
        cotrain=config.drafter_training.mode == "cotrain",
        teacher=None if place is None else load_and_put(place, "teacher", config.models),
    )
    _bring_up_generation(system)
    system.trainers.confirm_loaded()


def _rewards(plan: RunPlan, made: _Placed) -> RewardPool[Scored] | None:
    cluster, reward, template_time = plan.config.cluster, plan.reward, plan.config.run.template_time
    if reward.kind == "environment":
        return None
    evaluated = plan.config.evaluation.samples_per_prompt if plan.scores_groups else 1
    group_size = max(evaluated, plan.config.rollout.samples_per_prompt) if plan.scores_groups else 1

    def make(actor: int, number: int) -> Handle:
        where = made.topology.reward[actor]
        name = f"{where.name}-r{number}" if number else where.name
        return RewardActor.options(**actor_options(where, made.context) | {"name": name}).remote(
            name, reward, os.getcwd(), template_time
        )

    return RewardPool(
        [make(actor, 0) for actor in range(len(made.topology.reward))],
        timeout_s=scoring_timeout_s(reward, cluster.order_timeout_s, group_size),
        heartbeat_timeout_s=cluster.silence_limit_s(reward.timeout_s),
        kind=reward.title,
        make=make,
        max_restarts=cluster.max_instance_restarts,
        note=made.note,
    )
