"""What is known of a run before it starts, whole and frozen; made once (`run_check`), read by whatever runs.

Whoever runs later takes from here its own section or its spec, and never the whole config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...actors.actor_messages import GenerationSpec, SchedulerSettings, SpotSpec, TrainerSpec
from ...core.config import Config
from ...core.settings.generation import ReallocationConfig
from ...core.settings.reward import RewardConfig
from ...engine.weights.loading import num_token_ids
from ...learning.data.chat.end_tokens import stop_strings
from ...policies.reallocation.by_name import make_reallocation_policy
from ...policies.reallocation.gate import Gate
from ...policies.reallocation.pool_records import ReallocationPolicy
from ...policies.reallocation.rate_curve import RateCurve, rate_curve_from_profile
from ...policies.scaling.scaling_policy import ScalingPolicy
from ...policies.scaling.scaling_records import Limits
from ...policies.scheduling.look_ahead import LookAheadLaw, rows_of_curve, rows_of_profile
from ...profiles.profile import Profile
from .drafts import what_drafts
from .inputs import Inputs
from .memory_plan import MOVING_POLICIES, MemoryPlan
from .model_check import CheckedModels
from .reward_plan import resolved_reward
from .topology import Topology

_GUESSED_SAMPLES = (1, 4, 64)
_GUESSED_RATES = (100.0, 300.0, 600.0)
"Without a profile: tokens a second that processors deliver over samples, which the run corrects by one factor."


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """A run that may start: nothing in its config, its files or here speaks against it."""

    config: Config
    "of a new run with the end tokens that were found"
    topology: Topology
    models: CheckedModels
    inputs: Inputs
    memory: MemoryPlan
    profile: Profile | None = None
    "what the policy `goodput` goes by"
    report: tuple[str, ...] = ()
    "what `check` prints"
    notes: tuple[str, ...] = ()
    "what a run says at its start"
    scores_groups: bool = False
    "the reward looks at all samples of a prompt together"
    takes_any_stop: bool = False
    "requests may name stop strings that the config does not"
    brings_drafts: bool = False
    "requests may bring drafts, whatever the config says"

    @property
    def reward(self) -> RewardConfig:
        """With what it takes from other sections."""
        return resolved_reward(self.config.reward, self.config.sampling.max_new_tokens)

    def shared_by_updates(self, cores_of: Mapping[int, tuple[str, float]]) -> str:
        """What trainers take away from instances beside them, `cores_of` node and cores by bundle; empty: nothing."""
        config, trainer, topology = self.config, self.config.cluster.trainer, self.topology
        on_gpu = trainer.num_gpus > 0 and config.trainer.device != "cpu"
        if on_gpu and config.trainer.scoring == "model":
            if trainer.num_gpus < 1 and config.decodes_on_gpu:
                return (
                    f"trainer and instances may share a GPU (cluster.trainer.num_gpus {trainer.num_gpus:g})"
                )
            return ""
        busy = [*topology.generation, *topology.trainer]
        if config.reward.models and not config.cluster.reward.num_gpus:
            busy += topology.reward
        for place in topology.trainer:
            node, cores = cores_of[place.bundle]
            here = [other for other in busy if cores_of[other.bundle][0] == node]
            threads = sum(other.num_threads for other in here)
            if threads > cores and any(other in topology.generation for other in here):
                where = f" of node {node[:8]}" if node else ""
                return (
                    f"{place.name} shares {cores:g} cores{where} with instances, all together use {threads} threads "
                    "(engine.num_threads, trainer.num_threads); lower trainer.num_threads, or give the trainer a "
                    "device or a node of its own"
                )
        return ""

    def generating(self) -> RunPlan:
        """What generates and scores of it, without trainers; no head is trained, which nobody would collect."""
        frozen = self.config.drafter_training.model_copy(update={"spot": "off"})
        config = self.config.model_copy(update={"drafter_training": frozen})
        # a head that stays as it is is published in the models' type
        models = replace(self.models, drafts=what_drafts(config))
        return replace(self, config=config, models=models, topology=replace(self.topology, trainer=()))

    def generation_spec(self, instance: str) -> GenerationSpec:
        """What an instance is told when it is made."""
        config, pool = self.config, self.config.cluster.generation
        spot = SpotSpec(
            training=config.drafter_training, temperature=config.sampling.temperature, seed=config.run.seed
        )
        return GenerationSpec(
            instance=instance,
            engine=config.engine,
            speculation=config.speculation,
            takes_drafts=config.takes_drafts or self.brings_drafts,
            dtype=config.models.dtype,
            max_total_tokens=self.inputs.max_total_tokens,
            vocab_size=num_token_ids(self.inputs.tokenizer),
            report_interval_s=config.cluster.poll_interval_s,
            migration=config.reallocation if self._moves and pool.most > 1 else None,
            profile=self.profile,
            step_log=config.run.step_log,
            cache_dir=config.run.cache_dir,
            gpu_bytes=self.memory.gpu_bytes,
            gpu_mapped_bytes=0 if config.engine.kv_cache_mb is None else self.memory.kv_pool_bytes,
            gpu_share=pool.num_gpus,
            num_ranks=pool.tensor_parallel,
            rank_cpus=pool.num_cpus,
            spot=spot if config.trains_head else None,
            stop_strings=stop_strings(self.inputs.tokenizer, hides_special=self.takes_any_stop)
            if config.sampling.stop or self.takes_any_stop
            else None,
        )

    def trainer_spec(self) -> TrainerSpec:
        """What the trainers are told when they are made, but for their names and ranks."""
        config, tokenizer = self.config, self.inputs.tokenizer
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
            part_weights={part.name: part.weight for part in config.reward.parts},
            base_model=config.models.target,
            engine=config.engine if config.trainer.scoring == "engine" else None,
            max_total_tokens=self.inputs.dataset.max_prompt_tokens + config.max_response_tokens,
            gpu_bytes=self.memory.trainer_gpu_bytes,
            gpu_share=config.cluster.trainer.num_gpus,
            num_optimizer_steps=self._num_optimizer_steps(),
            max_new_tokens=config.sampling.max_new_tokens,
            checksums="words" if config.cluster.is_on_gpus else "xxh3",
            timeout_s=config.cluster.order_timeout_s,
        )

    def scheduler_settings(self) -> SchedulerSettings:
        """What the scheduler is told when it is made."""
        cluster, reallocation = self.config.cluster, self.config.reallocation
        return SchedulerSettings(
            poll_interval_s=cluster.poll_interval_s,
            heartbeat_timeout_s=cluster.heartbeat_timeout_s,
            order_timeout_s=cluster.order_timeout_s,
            binding="static" if reallocation.policy == "static" else "pull",
            reallocation=self._reallocation(reallocation)
            if self._moves and cluster.generation.most > 1
            else None,
            reallocation_interval_s=reallocation.interval_s,
            scaling=self._scaling(),
            look_ahead=self._look_ahead(),
        )

    def _look_ahead(self) -> LookAheadLaw | None:
        """The law of attempts at the next batch; None where there are none."""
        wanted, slots = self.config.rollout.look_ahead, self.config.engine.max_running_samples
        if wanted == "off":
            return None
        curve = self._rate_curve()
        rows = rows_of_curve(curve, slots) if self.profile is None else rows_of_profile(self.profile)
        # the trainer has cores of its own only where it has a device of its own
        shares = not self.config.learns_on_gpu or self.config.cluster.trainer.num_gpus < 1
        return LookAheadLaw(curve, rows, most=None if wanted == "auto" else int(wanted), is_shared=shares)

    @property
    def _moves(self) -> bool:
        return self.config.reallocation.policy in MOVING_POLICIES

    def _reallocation(self, wanted: ReallocationConfig) -> ReallocationPolicy | None:
        # float32 as on CPU: an upper bound on devices that keep bfloat16
        shapes = [shape.kv for shape in (self.models.target, self.models.draft) if shape is not None]
        gate = Gate(kv_bytes_per_token=float(sum(shape.token_bytes for shape in shapes)), mode=wanted.mode)
        return make_reallocation_policy(wanted.policy, curve=self._rate_curve(), gate=gate)

    def _scaling(self) -> ScalingPolicy | None:
        """The policy of the pool's size; None where it is fixed."""
        pool = self.config.cluster.generation
        if not pool.is_elastic:
            return None
        limits = Limits(least=pool.least, most=pool.most, idle_timeout_s=pool.idle_timeout_s)
        return ScalingPolicy(self._rate_curve(), limits, can_move=self._moves)

    def _rate_curve(self) -> RateCurve:
        if self.profile is None:
            return RateCurve(_GUESSED_SAMPLES, _GUESSED_RATES)
        speculation = self.config.speculation
        return rate_curve_from_profile(
            self.profile, max_nodes=speculation.max_nodes, max_depth=speculation.max_depth
        )

    def _num_optimizer_steps(self) -> int:
        """Steps of the target's optimizer in a whole run."""
        rollout, trainer = self.config.rollout, self.config.trainer
        num_samples = rollout.prompts_per_iteration * rollout.samples_per_prompt
        return self.config.run.iterations * trainer.epochs * -(-num_samples // trainer.minibatch_size)
