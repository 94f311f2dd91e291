"""The whole config of a run: its sections (`core.settings`), and what they must agree on.

Files are YAML, one mapping per section; unknown keys fail (see `core.config_io`). No config object
is mutated after it is loaded.
"""

from __future__ import annotations

import math
from typing import Any

from pydantic import model_validator

from .settings.algorithm import AlgorithmConfig, require_echo, require_groups, require_teacher
from .settings.cluster import ClusterConfig, require_publication
from .settings.correction import require_correction
from .settings.data import DataConfig, require_easy_threshold
from .settings.environment import EnvironmentConfig
from .settings.evaluation import EvaluationConfig, require_metric
from .settings.generation import (
    EngineConfig,
    ReallocationConfig,
    RolloutConfig,
    SamplingConfig,
    SpeculationConfig,
    require_draft,
    require_known_batches,
    require_schedule,
    require_training_temperature,
)
from .settings.reward import RewardConfig, require_reward
from .settings.run import ModelsConfig, RunConfig
from .settings.section import Section
from .settings.tracking import TrackingConfig
from .settings.trainer import (
    DrafterTrainingConfig,
    TrainerConfig,
    require_cotrain,
    require_optim,
    require_spot,
    require_trainer,
    trains_head,
)

_GPU_DEFAULTS: dict[str, tuple[str, object, frozenset[str]]] = {
    # goodput waits for the device between levels; a profile that is named asks for it all the same
    "speculation": ("policy", "fixed", frozenset({"policy", "profile"})),
    # a GPU is idle at what fits a CPU's cache
    "engine": ("max_prefill_tokens", 8192, frozenset({"max_prefill_tokens"})),
    "trainer": ("max_tokens_per_forward", 4096, frozenset({"max_tokens_per_forward"})),
}
"""Of sections, where instances (of `trainer` where trainers) have GPUs: a key, its default there, and the keys any of
which overrules it."""


class Config(Section):
    """The whole run."""

    run: RunConfig = RunConfig()
    models: ModelsConfig = ModelsConfig()
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    sampling: SamplingConfig = SamplingConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    engine: EngineConfig = EngineConfig()
    rollout: RolloutConfig = RolloutConfig()
    reallocation: ReallocationConfig = ReallocationConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    drafter_training: DrafterTrainingConfig = DrafterTrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    tracking: TrackingConfig = TrackingConfig()
    cluster: ClusterConfig = ClusterConfig()

    def ending_at(self, end_token_ids: tuple[int, ...] | None) -> Config:
        """The same with the end tokens that were found for its prompts."""
        sampling = self.sampling.model_copy(update={"end_token_ids": end_token_ids})
        return self.model_copy(update={"sampling": sampling})

    def lasting(self, pass_prompts: float) -> Config:
        """The same with its iterations, where they are asked for in passes, each of so many prompts."""
        if self.run.epochs is None:
            return self
        iterations = math.ceil(self.run.epochs * pass_prompts / self.rollout.prompts_per_iteration)
        return self.model_copy(
            update={"run": self.run.model_copy(update={"iterations": max(iterations, 1), "epochs": None})}
        )

    @property
    def decodes_on_gpu(self) -> bool:
        """Whether instances take the GPUs that are asked for (`actors.remote.assigned_device`)."""
        return _takes_gpus(self.engine.device, self.cluster.generation.num_gpus)

    @property
    def learns_on_gpu(self) -> bool:
        """The same of trainers."""
        return _takes_gpus(self.trainer.device, self.cluster.trainer.num_gpus)

    @property
    def max_first_words_tokens(self) -> int:
        """Most tokens that an environment's reset may add to a data set's prompt."""
        return self.environment.max_observation_tokens if self.environment.kind else 0

    @property
    def max_response_tokens(self) -> int:
        """Most tokens behind a data set's prompt: the response, and what an environment's reset may add before it."""
        return self.sampling.max_new_tokens + self.max_first_words_tokens

    @property
    def num_reward_actors(self) -> int:
        """Actors of the reward pool: none where episodes bring their own rewards."""
        return 0 if self.reward.kind == "environment" else self.cluster.reward.num_actors

    @property
    def refits_draft(self) -> bool:
        """True when a draft model drafts and is to follow the target."""
        speculation = self.speculation
        return self.drafter_training.refit and speculation.has_draft and speculation.drafter == "model"

    @property
    def keeps_published(self) -> bool:
        """True when the object store keeps what decodes beside an update: for replacements, or where no states are."""
        return self.rollout.max_staleness > 0 or not self.run.state_every

    @property
    def takes_drafts(self) -> bool:
        """True when requests may bring drafts: samples begun ahead, of the last evaluation, or of a record."""
        evaluates = self.evaluation.every > 0 and not self.evaluation.fresh_keys
        return evaluates or self.rollout.look_ahead != "off" or self.rollout.record is not None

    @property
    def trains_head(self) -> bool:
        """True when a draft head drafts and instances are to train it while they have no samples."""
        return trains_head(self.drafter_training, self.speculation, on_gpu=self.decodes_on_gpu)

    @property
    def device_defaults(self) -> dict[str, object]:
        """By `section.key`: what stands there as the default of who has GPUs; empty on CPUs."""
        return {
            f"{name}.{key}": value
            for name, (key, value, _) in _GPU_DEFAULTS.items()
            if (self.learns_on_gpu if name == "trainer" else self.decodes_on_gpu)
            and getattr(getattr(self, name), key) == value
        }

    @model_validator(mode="before")
    @classmethod
    def _simple_on_gpus(cls, given: Any) -> Any:
        """Where instances or trainers have GPUs, what the user left open is what is hard to get wrong there.

        Who only learns from a teacher has no reward unless one is named.
        """
        if not isinstance(given, dict):
            return given
        filled = dict(given)
        if _given(given, "algorithm", "kind") == "distill" and "reward" not in given:
            filled["reward"] = {"kind": "none"}
        for section, (key, value, overruling) in _GPU_DEFAULTS.items():
            whose, pool = ("trainer", "trainer") if section == "trainer" else ("engine", "generation")
            wish = _given(given, whose, "device") or "auto"
            if not _takes_gpus(wish, _given(given, "cluster", pool, "num_gpus") or 0):
                continue
            have = filled.get(section, {})
            if isinstance(have, Section):
                chosen = have.model_fields_set & overruling
                filled[section] = have if chosen else have.model_copy(update={key: value})
            elif isinstance(have, dict) and not overruling & have.keys():
                filled[section] = {**have, key: value}
        return filled

    @model_validator(mode="after")
    def _agree(self) -> Config:
        """What sections ask of one another; the checks stand beside the section that they speak of."""
        rollout, reward, algorithm = self.rollout, self.reward, self.algorithm
        environment = self.environment.kind
        require_training_temperature(self.sampling.temperature)
        require_known_batches(rollout, environment=environment, dynamic_sampling=algorithm.dynamic_sampling)
        require_draft(self.speculation, self.models.draft)
        require_teacher(self.models, algorithm, self.data, environment=environment)
        require_echo(algorithm, environment=environment, max_turns=self.environment.max_turns)
        require_spot(self.drafter_training, self.speculation, on_gpu=self.decodes_on_gpu)
        require_cotrain(self.drafter_training, self.speculation)
        require_groups(algorithm, rollout)
        if algorithm.advantage != "none":  # a teacher's divergence needs no weight
            require_correction(algorithm.correction, rollout.max_staleness)
        pool, moves = self.cluster.trainer, algorithm.sync_ref_model
        require_optim(self.trainer, pool.num_actors)
        require_trainer(self.trainer, num_gpus=pool.num_gpus, moves_reference=moves)
        require_schedule(rollout, environment=environment)
        require_publication(self.cluster.publication, rollout.max_staleness)
        require_metric(self.evaluation, reward)
        require_easy_threshold(
            self.data,
            reward=reward.kind,
            looks_ahead=rollout.look_ahead != "off",
            evaluated=self.evaluation.data,
        )
        require_reward(
            reward,
            environment=environment,
            max_new_tokens=self.sampling.max_new_tokens,
            learns_from_it=algorithm.advantage != "none",
            samples_per_prompt=rollout.samples_per_prompt,
            combine=algorithm.combine,
        )
        return self


def _takes_gpus(wish: object, num_gpus: object) -> bool:
    return wish == "cuda" or (wish == "auto" and isinstance(num_gpus, int | float) and num_gpus > 0)


def _given(tree: Any, *path: str) -> Any:
    """What stands at a path of mappings and sections that nothing has checked so far; None where nothing does."""
    for name in path:
        tree = tree.get(name) if isinstance(tree, dict) else getattr(tree, name, None)
    return tree
