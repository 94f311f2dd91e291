"""The whole config of a run: its sections (`core.settings`), and what they must agree on.

Files are YAML, one mapping per section; unknown keys fail (see `core.config_io`). No config object
is mutated after it is loaded.
"""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from core.ranges import LEAST_TEMPERATURE
from core.settings.algorithm import AlgorithmConfig
from core.settings.cluster import ClusterConfig
from core.settings.correction import require_correction
from core.settings.data import DataConfig
from core.settings.environment import EnvironmentConfig
from core.settings.evaluation import EvaluationConfig
from core.settings.generation import (
    EngineConfig,
    ReallocationConfig,
    RolloutConfig,
    SamplingConfig,
    SpeculationConfig,
    require_schedule,
)
from core.settings.reward import RewardConfig
from core.settings.run import ModelsConfig, RunConfig
from core.settings.section import Section
from core.settings.tracking import TrackingConfig
from core.settings.trainer import DrafterTrainingConfig, TrainerConfig

_GPU_DEFAULTS: dict[str, tuple[str, object, frozenset[str]]] = {
    # goodput waits for the device between levels; a profile that is named asks for it all the same
    "speculation": ("policy", "fixed", frozenset({"policy", "profile"})),
    # a GPU is idle at what fits a CPU's cache
    "engine": ("max_prefill_tokens", 8192, frozenset({"max_prefill_tokens"})),
}
"Of sections, where instances decode on GPUs: a key, its default there, and the keys any of which overrules it."


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

    @property
    def decodes_on_gpu(self) -> bool:
        """Whether instances take the GPUs that are asked for (`actors.ray_utils.assigned_device`)."""
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
        return self.drafter_training.refit and speculation.drafter == "model" and speculation.policy != "off"

    @property
    def trains_head(self) -> bool:
        """True when a draft head drafts and instances are to train it while they have no samples."""
        training, speculation = self.drafter_training, self.speculation
        is_head = speculation.drafter == "head" and speculation.has_draft
        return is_head and training.refit and training.spot != "off" and not self.decodes_on_gpu

    @model_validator(mode="before")
    @classmethod
    def _simple_on_gpus(cls, given: Any) -> Any:
        """Where instances decode on GPUs, what the user left open is what is hard to get wrong there."""
        if not isinstance(given, dict):
            return given
        wish = _given(given, "engine", "device") or "auto"
        if not _takes_gpus(wish, _given(given, "cluster", "generation", "num_gpus") or 0):
            return given
        filled = dict(given)
        for section, (key, value, overruling) in _GPU_DEFAULTS.items():
            have = filled.get(section, {})
            if isinstance(have, Section):
                chosen = have.model_fields_set & overruling
                filled[section] = have if chosen else have.model_copy(update={key: value})
            elif isinstance(have, dict) and not overruling & have.keys():
                filled[section] = {**have, key: value}
        return filled

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.sampling.temperature == 0.0:
            raise ValueError(
                "sampling.temperature must be above 0 to train: greedy sampling has no log-probability; "
                "use 1.0"
            )
        if self.sampling.temperature < LEAST_TEMPERATURE:
            raise ValueError(
                f"sampling.temperature must be at least {LEAST_TEMPERATURE}, got {self.sampling.temperature}: logits "
                "over it overflow; use 1.0"
            )
        drafter = self.speculation.drafter
        if drafter in ("model", "head") and self.models.draft is None:
            what = {"model": "a draft model", "head": "the folder of a draft head"}[drafter]
            raise ValueError(
                f"speculation.drafter is '{drafter}' but models.draft is null; "
                f"name {what}, or set speculation.drafter to suffix or none"
            )
        self._require_spot()
        if self.drafter_training.mode == "cotrain" and drafter == "head":
            raise ValueError(
                "drafter_training.mode cotrain is of a draft model, which learns from the target's logits in its "
                "update; a draft head learns from hidden states on the instances: leave mode at refit, and see "
                "drafter_training.spot"
            )
        if self.drafter_training.mode == "cotrain" and not (
            drafter == "model" and self.speculation.has_draft
        ):
            raise ValueError(
                f"drafter_training.mode is cotrain, and speculation.drafter {drafter} under policy "
                f"{self.speculation.policy} has no draft model to train; leave mode at refit"
            )
        if self.drafter_training.mode == "cotrain" and not self.drafter_training.refit:
            raise ValueError(
                "drafter_training.mode is cotrain and drafter_training.refit false, which leaves the draft model as it "
                "is; take one of the two out"
            )
        if self.algorithm.compares_groups and self.rollout.samples_per_prompt < 2:
            raise ValueError(
                f"algorithm.kind {self.algorithm.kind} compares samples of one prompt: rollout.samples_per_prompt "
                f">= 2, got {self.rollout.samples_per_prompt}"
            )
        require_correction(self.algorithm.correction, self.rollout.max_staleness)
        if self.algorithm.dynamic_sampling and self.trainer.stream_forwards == "on":
            raise ValueError(
                "trainer.stream_forwards on computes blocks of samples that are known beforehand, and "
                "algorithm.dynamic_sampling chooses them during the rollout; set stream_forwards: off"
            )
        if self.trainer.device == "cuda" and self.cluster.trainer.num_gpus == 0:
            raise ValueError(
                "trainer.device is cuda but cluster.trainer.num_gpus is 0, which is a CPU whatever the machine has; "
                "set it to 1, or trainer.device to auto"
            )
        if self.rollout.max_staleness and self.algorithm.dynamic_sampling:
            raise ValueError(
                f"algorithm.dynamic_sampling asks for further prompts until a batch is full, and with "
                f"rollout.max_staleness {self.rollout.max_staleness} it is settled before their rewards how many run "
                "ahead of which update; set max_staleness: 0, or dynamic_sampling: false"
            )
        require_schedule(self.rollout, environment=self.environment.kind)
        if (
            self.rollout.max_staleness
            and self.rollout.weight_load == "keep_kv"
            and not self.engine.turn_cache_mb
        ):
            raise ValueError(
                "rollout.weight_load is keep_kv, and engine.turn_cache_mb 0 has no room for caches that wait; raise "
                "it, or set weight_load: reprefill"
            )
        transport = self.cluster.publication.transport
        if self.rollout.max_staleness and transport in ("broadcast", "nccl"):
            raise ValueError(
                f"cluster.publication.transport is {transport} and rollout.max_staleness above 0: an "
                "instance that joins while the trainer is ahead could not be given the version that the others decode "
                "from, so weights travel by the object store there; set transport: auto or object_store"
            )
        if self.rollout.max_staleness and self.trainer.stream_forwards == "on":
            raise ValueError(
                "trainer.stream_forwards on computes forwards while an iteration is generated, and with "
                f"rollout.max_staleness {self.rollout.max_staleness} the trainer updates then; set stream_forwards: off"
            )
        silent = all(part.kind in ("model", "format") for part in self.reward.scorers)
        metric = self.evaluation.metric
        if self.evaluation.every and silent and metric not in ("eval/reward_mean", "eval/best_at_k"):
            raise ValueError(
                f"evaluation.metric is {metric}, which is made of a part 'correct', and rewards of kind "
                f"{self.reward.title} have none; set it to eval/reward_mean or eval/best_at_k"
            )
        overlong = self.reward.shaping.overlong
        if overlong is not None:
            longest = overlong.max_tokens or self.sampling.max_new_tokens
            if overlong.buffer_tokens > longest:
                raise ValueError(
                    f"reward.shaping.overlong.buffer_tokens is {overlong.buffer_tokens}, more than the {longest} "
                    "tokens of the longest response; lower it"
                )
        if self.reward.kind == "environment" and self.environment.kind is None:
            raise ValueError(
                "reward.kind is 'environment' but environment.kind is null: nothing answers; name an environment"
            )
        if self.reward.kind == "environment" and self.reward.shaping.is_on:
            raise ValueError(
                "reward.kind environment takes what the environment gives; reward.shaping would have no effect; let "
                "the environment shape its rewards"
            )
        return self

    def _require_spot(self) -> None:
        """Raise ValueError where `drafter_training.spot` is on and no head would be trained."""
        if self.drafter_training.spot != "on" or self.trains_head:
            return
        if self.speculation.drafter != "head":
            raise ValueError(
                "drafter_training.spot is on, which trains a draft head on the instances, and speculation.drafter is "
                f"{self.speculation.drafter}, which has none; set spot to auto or off, or drafter to head"
            )
        if self.decodes_on_gpu:
            raise ValueError(
                "drafter_training.spot is on, but instances decode on GPUs, where training would queue before their "
                "forwards; expected instances on CPUs: set it to auto or off"
            )
        why = (
            "drafter_training.refit is false"
            if not self.drafter_training.refit
            else "speculation.policy is off"
        )
        raise ValueError(
            f"drafter_training.spot is on, and {why}, so that no head would learn; set spot to auto or off, or that "
            "otherwise"
        )


def _takes_gpus(wish: object, num_gpus: object) -> bool:
    return wish == "cuda" or (wish == "auto" and isinstance(num_gpus, int | float) and num_gpus > 0)


def _given(tree: Any, *path: str) -> Any:
    """What stands at a path of mappings and sections that nothing has checked so far; None where nothing does."""
    for name in path:
        tree = tree.get(name) if isinstance(tree, dict) else getattr(tree, name, None)
    return tree
