"""The running system of one run: scheduler, generation pool, reward pool, trainer, data cursor."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from ray.util.placement_group import remove_placement_group
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from rlhfspec.actors.actor_messages import GenerationSpec, SchedulerSettings, SpotSpec, TrainerSpec
from rlhfspec.actors.scheduling.scheduler_actor import SchedulerActor
from rlhfspec.actors.waiting.node import own_raylet, watching_raylet
from rlhfspec.actors.waiting.remote import Handle
from rlhfspec.actors.waiting.watch import watching
from rlhfspec.actors.workers.reward_actors import RewardActor, RewardPool
from rlhfspec.cluster.placement.ray_session import RaySession
from rlhfspec.cluster.placement.single_places import SinglePlaces, lost_machines
from rlhfspec.cluster.placement.spare_cores import nodes_of, shared_by_updates
from rlhfspec.cluster.placement.topology import PlacementContext, Topology, actor_options, place, plan
from rlhfspec.cluster.preflight.evaluation_prompts import EvaluationPrompts
from rlhfspec.cluster.preflight.inputs import Inputs
from rlhfspec.cluster.preflight.reward_plan import resolved_reward, scoring_timeout_s
from rlhfspec.cluster.run.dynamic_sampling import UsefulGroups
from rlhfspec.cluster.run.episodes import EpisodeRewards, Episodes, start_episodes
from rlhfspec.cluster.system.generation_pool import GenerationPool
from rlhfspec.cluster.system.instance_table import InstanceTable
from rlhfspec.cluster.system.reallocation import migration_settings, reallocation_policy, scaling_policy
from rlhfspec.cluster.system.scheduler_client import SchedulerClient, scheduler_name
from rlhfspec.cluster.system.trainer_pool import TrainerPool
from rlhfspec.cluster.weights.first_weights import first_draft, load_and_put
from rlhfspec.cluster.weights.group_publication import Broadcast, are_on_gpus
from rlhfspec.cluster.weights.publish import PublishedWeights
from rlhfspec.core.config import Config
from rlhfspec.core.errors import RlhfSpecError
from rlhfspec.core.records import Completion, Reward, SampleRequest, SamplingParams, Unscored
from rlhfspec.engine.weights.loading import num_token_ids
from rlhfspec.learning.data.cursor import PromptCursor
from rlhfspec.learning.data.prompts import sampling_params
from rlhfspec.policies.scheduling.events import MoveRecord

logger = logging.getLogger(__name__)

Scored = tuple[SampleRequest, Completion, str]
"A completion on its way through the reward pool: its request, itself, its text."


@dataclass(slots=True, kw_only=True)
class GeneratingSystem:
    """Handles to what generates and scores; `draft` and `target` are the versions published last."""

    config: Config
    tokenizer: PreTrainedTokenizerBase
    scheduler: SchedulerClient
    generation: GenerationPool
    rewards: RewardPool[Scored] | EpisodeRewards
    episodes: Episodes | None
    "None: every response is one turn"
    target: PublishedWeights
    draft: PublishedWeights | None
    evaluation: EvaluationPrompts | None = None
    late_moves: list[MoveRecord] = field(default_factory=list)
    "that were told of after the rollout in which they were ordered; the next one's record has them"
    late_rewards: list[tuple[Scored, Reward | Unscored]] = field(default_factory=list)
    "that came while others were scored; the next phase takes them"
    late_failure: RlhfSpecError | None = None
    "of rewards that no update waited for: the next phase raises it"
    is_learning: bool = False
    "whether an iteration has begun to change what the trainers hold: no state can be taken then"

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
    told_faults: set[str] = field(default_factory=set)
    "of the draft head's training, that were told"

    @property
    def recomputes_old(self) -> bool:
        """Whether ratios are over the trainer's own log-probabilities (`algorithm.correction.old_logprobs`)."""
        return self.config.algorithm.correction.recomputes_old(
            is_exact=self.generation.is_invariant, max_staleness=self.config.rollout.max_staleness
        )

    def useful_groups(self, requests: Sequence[SampleRequest]) -> UsefulGroups | None:
        """What replaces groups of equal rewards; None where none are."""
        algorithm, rollout = self.config.algorithm, self.config.rollout
        if not algorithm.dynamic_sampling:
            return None
        return UsefulGroups(
            lambda: self.cursor.next_requests(1, rollout.samples_per_prompt, self.sampling),
            requests,
            max_extra=round(algorithm.max_extra_groups * rollout.prompts_per_iteration),
            metric=algorithm.dynamic_sampling_metric,
        )


@contextmanager
def running_system(
    config: Config,
    session: RaySession,
    inputs: Inputs,
    *,
    note: Callable[[str], None] = logger.warning,
    patience_s: float = 0.0,
) -> Iterator[System]:
    """Run all actors of a config whose model names are resolved, first weights loaded.

    Their bundles are given back however the block ends, and the actors end with them. `note` is told, one line each,
    of actors that are lost and replaced, and of waits that take unusually long. `patience_s`: how much longer than
    `cluster.placement_timeout_s` to wait for a place.
    Raises InputError for models, reward function or placement that cannot be used.
    """
    topology = plan(config)
    group = place(topology, is_local=session.is_local, patience_s=patience_s, note=note)
    singles = SinglePlaces(pinned_to="generation" if topology.pins_pools else None)
    try:
        context = PlacementContext(group=group, namespace=session.namespace, environment=session.environment)
        with watching(note), watching_raylet(own_raylet() if session.is_local else None, note):
            system = _make_actors(config, inputs, topology, context, singles, note)
            system.lost_machines = partial(lost_machines, group, topology.fixed_bundles)
            _bring_up(system)
            if config.rollout.max_staleness and (
                shared := shared_by_updates(config, topology, nodes_of(group, topology))
            ):
                note(f"updates run while later batches are sampled, and slow that down: {shared}")
            yield system
            system.stop()
    finally:
        singles.free_all()
        remove_placement_group(group)


@contextmanager
def running_generation(
    config: Config, session: RaySession, inputs: Inputs, *, note: Callable[[str], None] = logger.warning
) -> Iterator[GeneratingSystem]:
    """Run what generates and scores, without a trainer. Otherwise, and in what it raises, as `running_system`."""
    # nobody would collect what they learn
    frozen = config.drafter_training.model_copy(update={"spot": "off"})
    config = config.model_copy(update={"drafter_training": frozen})
    topology = replace(plan(config), trainer=())
    group = place(topology, is_local=session.is_local)
    singles = SinglePlaces(pinned_to="generation" if topology.pins_pools else None)
    try:
        context = PlacementContext(group=group, namespace=session.namespace, environment=session.environment)
        with watching(note), watching_raylet(own_raylet() if session.is_local else None, note):
            scheduler, generation = _make_generation(config, inputs, topology, context, singles, note)
            episodes = start_episodes(config, inputs.tokenizer, topology, context, note)
            system = GeneratingSystem(
                config=config,
                tokenizer=inputs.tokenizer,
                scheduler=scheduler,
                generation=generation,
                rewards=_rewards(config, topology, context, note, episodes),
                episodes=episodes,
                target=load_and_put(config, config.models.target, "target"),
                draft=first_draft(config),
                evaluation=inputs.evaluation,
            )
            _bring_up_generation(system)
            yield system
            system.stop()
    finally:
        singles.free_all()
        remove_placement_group(group)


def _make_generation(
    config: Config,
    inputs: Inputs,
    topology: Topology,
    context: PlacementContext,
    singles: SinglePlaces,
    note: Callable[[str], None],
) -> tuple[SchedulerClient, GenerationPool]:
    """Start the scheduler and the processes of all instances."""
    instances = InstanceTable()
    scheduler = _scheduler(config, inputs, topology, context, instances)
    max_total_tokens = inputs.max_total_tokens(config)
    generation = GenerationPool(
        cluster=config.cluster,
        topology=topology,
        context=context,
        single_places=singles,
        scheduler=scheduler,
        instances=instances,
        spec_for=lambda instance: _generation_spec(config, inputs, instance, max_total_tokens),
        note=note,
    )
    generation.make_all()
    return scheduler, generation


def _bring_up_generation(system: GeneratingSystem) -> None:
    start_timeout_s = system.config.cluster.start_timeout_s
    system.rewards.prove(timeout_s=start_timeout_s)
    if system.episodes is not None:
        system.episodes.prove(timeout_s=start_timeout_s)
    system.generation.bring_up(*[weights for weights in (system.target, system.draft) if weights is not None])


def _make_actors(
    config: Config,
    inputs: Inputs,
    topology: Topology,
    context: PlacementContext,
    singles: SinglePlaces,
    note: Callable[[str], None],
) -> System:
    """Start every process; they come up at the same time, while the models are read here."""
    cluster, tokenizer, dataset = config.cluster, inputs.tokenizer, inputs.dataset
    longest_trained = dataset.max_prompt_tokens + config.max_response_tokens
    trainers = TrainerPool.start(
        _trainer_spec(config, inputs, longest_trained), topology.trainer, context, cluster
    )
    scheduler, generation = _make_generation(config, inputs, topology, context, singles, note)
    episodes = start_episodes(config, tokenizer, topology, context, note)
    return System(
        config=config,
        tokenizer=tokenizer,
        cursor=PromptCursor(dataset, run_seed=config.run.seed, shuffle=config.data.shuffle),
        sampling=sampling_params(config.sampling, tokenizer, model=config.models.target),
        scheduler=scheduler,
        generation=generation,
        rewards=_rewards(config, topology, context, note, episodes),
        episodes=episodes,
        trainers=trainers,
        target=load_and_put(config, config.models.target, "target"),
        draft=first_draft(config),
        broadcast=Broadcast(cluster, trainers, note),
        evaluation=inputs.evaluation,
    )


def _bring_up(system: System) -> None:
    """Give trainers and instances their first weights, all at the same time; the reward functions must build."""
    config = system.config
    system.trainers.begin_loading(
        system.target,
        system.draft if config.refits_draft else None,
        cotrain=config.drafter_training.mode == "cotrain",
    )
    _bring_up_generation(system)
    system.trainers.confirm_loaded()


def _rewards(
    config: Config,
    topology: Topology,
    context: PlacementContext,
    note: Callable[[str], None],
    episodes: Episodes | None,
) -> RewardPool[Scored] | EpisodeRewards:
    if episodes is not None and config.reward.kind == "environment":
        return EpisodeRewards(episodes)
    reward = resolved_reward(config.reward, config.sampling.max_new_tokens)

    def make(actor: int, number: int) -> Handle:
        where = topology.reward[actor]
        name = f"{where.name}-r{number}" if number else where.name
        return RewardActor.options(**actor_options(where, context) | {"name": name}).remote(
            name, reward, os.getcwd(), config.run.template_time
        )

    return RewardPool(
        [make(actor, 0) for actor in range(len(topology.reward))],
        timeout_s=scoring_timeout_s(config.reward, config.cluster.order_timeout_s),
        heartbeat_timeout_s=config.cluster.silence_limit_s(config.reward.timeout_s),
        kind=reward.title,
        make=make,
        max_restarts=config.cluster.max_instance_restarts,
        note=note,
    )


def _generation_spec(config: Config, inputs: Inputs, instance: str, max_total_tokens: int) -> GenerationSpec:
    return GenerationSpec(
        instance=instance,
        engine=config.engine,
        speculation=config.speculation,
        dtype=config.models.dtype,
        max_total_tokens=max_total_tokens,
        vocab_size=num_token_ids(inputs.tokenizer),
        report_interval_s=config.cluster.poll_interval_s,
        migration=migration_settings(config),
        profile=inputs.profile,
        step_log=config.run.step_log,
        cache_dir=config.run.cache_dir,
        gpu_bytes=inputs.gpu_bytes,
        gpu_share=config.cluster.generation.num_gpus,
        spot=SpotSpec(
            training=config.drafter_training, temperature=config.sampling.temperature, seed=config.run.seed
        )
        if config.trains_head
        else None,
    )


def _scheduler(
    config: Config, inputs: Inputs, topology: Topology, context: PlacementContext, instances: InstanceTable
) -> SchedulerClient:
    cluster, has_peers = config.cluster, config.cluster.generation.most > 1
    options = actor_options(topology.scheduler, context)
    return SchedulerClient(
        lambda settings: SchedulerActor.options(**options | {"name": scheduler_name(settings.term)}).remote(
            settings
        ),
        SchedulerSettings(
            poll_interval_s=cluster.poll_interval_s,
            heartbeat_timeout_s=cluster.heartbeat_timeout_s,
            order_timeout_s=cluster.order_timeout_s,
            binding="static" if config.reallocation.policy == "static" else "pull",
            reallocation=reallocation_policy(config, inputs.profile) if has_peers else None,
            reallocation_interval_s=config.reallocation.interval_s,
            scaling=scaling_policy(config, inputs.profile),
        ),
        instances,
        max_restarts=cluster.max_scheduler_restarts,
        start_timeout_s=cluster.start_timeout_s,
    )


def _trainer_spec(config: Config, inputs: Inputs, max_total_tokens: int) -> TrainerSpec:
    tokenizer = inputs.tokenizer
    pad = tokenizer.pad_token_id
    return TrainerSpec(
        algorithm=config.algorithm,
        trainer=config.trainer,
        drafter_training=config.drafter_training if config.refits_draft else None,
        dtype=config.models.dtype,
        temperature=config.sampling.temperature,
        seed=config.run.seed,
        pad_token_id=pad if isinstance(pad, int) else 0,
        vocab_size=num_token_ids(tokenizer),
        base_model=config.models.target,
        engine=config.engine if config.trainer.scoring == "engine" else None,
        max_total_tokens=max_total_tokens,
        gpu_bytes=inputs.trainer_gpu_bytes,
        gpu_share=config.cluster.trainer.num_gpus,
        num_optimizer_steps=num_optimizer_steps(config),
        max_new_tokens=config.sampling.max_new_tokens,
        checksums="words" if are_on_gpus(config.cluster) else "xxh3",
        timeout_s=config.cluster.order_timeout_s,
    )


def num_optimizer_steps(config: Config) -> int:
    """Steps of the target's optimizer in a whole run."""
    rollout, trainer = config.rollout, config.trainer
    num_samples = rollout.prompts_per_iteration * rollout.samples_per_prompt
    return config.run.iterations * trainer.epochs * -(-num_samples // trainer.minibatch_size)
