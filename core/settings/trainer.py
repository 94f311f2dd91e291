"""How the models learn: the trainer, its adapters, the draft model's refit."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from .generation import SpeculationConfig
from .section import MAX_THREADS, Name, Section, UserPath

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]
Schedule = Literal["constant", "linear", "cosine", "cosine_with_min_lr", "warmup_stable_decay"]
DECAY_RATIO = 0.1
Optim = Literal["adamw", "adamw_8bit", "muon"]
ComputeDtype = Literal["auto", "float32", "bfloat16"]


class LoraConfig(Section):
    """Low-rank adapters (Hu et al. 2022): they learn, the model's own weights stay. Needs the extra `lora`."""

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0.0)
    "the adapters' product counts alpha / rank"
    use_rslora: bool = False
    "true: it counts alpha / sqrt(rank) (Kalajdzievski 2023), as peft's"
    adapter_path: UserPath | None = None
    "folder of a PEFT adapter of this rank, alpha and targets that sft, dpo and train-reward begin with or null"
    targets: Literal["all-linear"] | tuple[Name, ...] = "all-linear"
    "last parts of module names, such as q_proj; all-linear: every linear but the output head"
    base_bits: Literal[4] | None = None
    """4: QLoRA (Dettmers et al. 2023): sft, dpo and train-reward hold the linears below adapters in NF4, by
    bitsandbytes, which they need, and save the model that those are; null: in their own type"""
    dropout: float = 0.0
    "0, the only choice"

    @field_validator("dropout")
    @classmethod
    def _no_dropout(cls, dropout: float) -> float:
        if dropout != 0.0:
            raise ValueError(
                f"expected 0, got {dropout}: what is dropped in training was not dropped in sampling, and the policy "
                "ratio would compare two different models; take it out"
            )
        return dropout

    @field_validator("targets")
    @classmethod
    def _some_targets(cls, targets: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not targets:
            raise ValueError("expected at least one module name, or all-linear; got an empty list")
        return targets


class LearningSection(Section):
    """What the two trainers' sections refuse alike."""

    @model_validator(mode="after")
    def _of_the_rate(self) -> Self:
        given = dict(self)
        schedule, floor = given["schedule"], given["min_lr_ratio"]
        if given["warmup_steps"] and given["warmup_ratio"]:
            raise ValueError(
                f"warmup_steps {given['warmup_steps']} and warmup_ratio {given['warmup_ratio']} both say how long the "
                "warm-up is; take one out"
            )
        if (floor > 0.0) != (schedule == "cosine_with_min_lr") and schedule != "warmup_stable_decay":
            raise ValueError(
                f"min_lr_ratio is {floor} with schedule {schedule}; expected it above 0 with cosine_with_min_lr, "
                "any with warmup_stable_decay, 0 with the others, which have no floor"
            )
        if given["decay_ratio"] != DECAY_RATIO and schedule != "warmup_stable_decay":
            raise ValueError(
                f"decay_ratio {given['decay_ratio']} is of warmup_stable_decay, schedule is {schedule}; take it out"
            )
        if schedule == "warmup_stable_decay" and given["warmup_ratio"] + given["decay_ratio"] > 1.0:
            raise ValueError(
                f"warmup_ratio {given['warmup_ratio']} and decay_ratio {given['decay_ratio']} are more than the whole "
                "run together; lower one"
            )
        return self


class TrainerConfig(LearningSection):
    """The learner. Its weights are float32 whatever `models.dtype` is; that is what it publishes in."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    "auto: the GPU that Ray assigned (cluster.trainer.num_gpus), else the CPU"
    lora: LoraConfig | None = None
    "null: every weight learns"
    learning_rate: float = Field(default=1e-5, gt=0.0, le=1e6)
    value_learning_rate: float = Field(default=1e-3, gt=0.0, le=1e6)
    value_epochs: int = Field(default=8, ge=1)
    "ppo: passes of the value head over a batch's states; cheap, since the trunk is run once for all"
    schedule: Schedule = "constant"
    """how the learning rate goes on after the warm-up, as transformers.get_scheduler: linear and cosine fall towards 0
    at the run's end, cosine_with_min_lr and warmup_stable_decay (which falls last) towards min_lr_ratio"""
    min_lr_ratio: Share = 0.0
    "of those two: the last learning rate over the first (verl's min_lr_ratio)"
    decay_ratio: float = Field(default=DECAY_RATIO, gt=0.0, le=1.0)
    "warmup_stable_decay: share of all optimizer steps in which the rate falls, as a cosine (Hu et al. 2024, section 4)"
    warmup_steps: int = Field(default=0, ge=0)
    "optimizer steps over which the learning rate rises from 0"
    warmup_ratio: Share = 0.0
    "the same as a share of all optimizer steps, rounded up; one of the two"
    epochs: int = Field(default=1, ge=1)
    minibatch_size: int = Field(default=32, ge=1)
    "responses per optimizer step"
    max_tokens_per_forward: int = Field(default=2048, ge=16)
    "in one forward, packed without padding; more are accumulated; where trainers have GPUs 4096 by default"
    block_samples: int = Field(default=8, ge=1)
    "samples for each trainer, by their index, whose forwards before the first step share packs"
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    optim: Optim = "adamw"
    """adamw_8bit: moments of 8 bits, by bitsandbytes, which it needs. muon (Jordan 2024): the layers' matrices step by
    their momentum (0.95), orthogonalised and as long as AdamW's step; all else, embeddings and head too, by AdamW"""
    weight_decay: float = Field(default=0.0, ge=0.0)
    adam_betas: tuple[Beta, Beta] = (0.9, 0.95)
    "of AdamW: how much of its averages of the gradient and of its square each step keeps"
    adam_epsilon: float = Field(default=1e-8, gt=0.0, le=1.0)
    compute_dtype: ComputeDtype = "auto"
    """of matrix products; weights, optimizer, softmax and losses stay float32. auto: float32 on a CPU, on a GPU
    `models.dtype`; bfloat16 on a CPU needs AVX512-BF16 or AMX"""
    gradient_checkpointing: Literal["auto"] | bool = "auto"
    """the layers' activations are computed again for the backward pass, not kept: to the same bits on a CPU. auto:
    where the memory plan would not fit otherwise (`rlhfspec check`)"""
    scoring: Literal["engine", "model"] = "model"
    "whose forward values log-probabilities: the engine's, with the sampler's bits, or the learner's own"
    strategy: Literal["fsdp2", "ddp"] = "fsdp2"
    "with several trainers (cluster.trainer.num_actors): each holds a part of every weight, or all of them"
    num_threads: int = Field(default=2, ge=1, le=MAX_THREADS)

    @property
    def scores_in_bfloat16(self) -> bool:
        """Whether log-probabilities are rounded so; the engine's forward has its own type, whatever gradients have."""
        return self.compute_dtype == "bfloat16" and self.scoring == "model"


class DrafterTrainingConfig(Section):
    """How what drafts follows the target. Idle without a draft model or a draft head."""

    refit: bool = True
    "a draft model learns with every update; a head is trained by instances that have no samples. false: both stay"
    mode: Literal["refit", "cotrain"] = "refit"
    "a draft model: refit after the update within a budget, or a step within it for each of the target's, by the "
    "logits of the same forwards (NeMo-RL); cotrain heeds learning_rate alone of what follows"
    budget_share: float = Field(default=0.05, gt=0.0, le=1.0)
    """most seconds of a refit, publication included, over those that the iteration took before it; of a head: of
    collecting, comparing and publishing what idle time has trained"""
    learning_rate: float = Field(default=5e-5, gt=0.0, le=1e6)
    max_tokens_per_step: int = Field(default=1024, ge=16)
    "tokens, padding included, in one optimizer step of the draft and in the held-out slice; of a head: response tokens"
    max_passes: int = Field(default=8, ge=1)
    "over one iteration's rollouts, when the budget allows so many; of a head: over each sequence that its buffer keeps"
    num_target_tokens: int = Field(default=32, ge=0)
    "likeliest tokens a position whose probabilities the update keeps to learn from; 0: sampled tokens only"
    spot: Literal["auto", "on", "off"] = "auto"
    "a head: train it on instances while they have no samples; auto: where they decode on CPUs"
    buffer_mb: float = Field(default=256.0, gt=0.0)
    "a head: hidden states to learn from, of each instance"
    head_learning_rate: float = Field(default=1e-4, gt=0.0, le=1e6)


def trains_head(training: DrafterTrainingConfig, speculation: SpeculationConfig, *, on_gpu: bool) -> bool:
    """Whether a draft head drafts and instances, `on_gpu` or not, are to train it while they have no samples."""
    is_head = speculation.drafter == "head" and speculation.has_draft
    return is_head and training.refit and training.spot != "off" and not on_gpu


def require_spot(training: DrafterTrainingConfig, speculation: SpeculationConfig, *, on_gpu: bool) -> None:
    """Raise ValueError where `drafter_training.spot` is on and no head would be trained."""
    if training.spot != "on" or trains_head(training, speculation, on_gpu=on_gpu):
        return
    if speculation.drafter != "head":
        raise ValueError(
            "drafter_training.spot is on, which trains a draft head on the instances, and speculation.drafter is "
            f"{speculation.drafter}, which has none; set spot to auto or off, or drafter to head"
        )
    if on_gpu:
        raise ValueError(
            "drafter_training.spot is on, but instances decode on GPUs, where training would queue before their "
            "forwards; expected instances on CPUs: set it to auto or off"
        )
    why = "drafter_training.refit is false" if not training.refit else "speculation.policy is off"
    raise ValueError(
        f"drafter_training.spot is on, and {why}, so that no head would learn; set spot to auto or off, or that "
        "otherwise"
    )


def require_cotrain(training: DrafterTrainingConfig, speculation: SpeculationConfig) -> None:
    """Raise ValueError where a draft model is to learn within the target's update and there is none, or it may not."""
    if training.mode != "cotrain":
        return
    if speculation.drafter == "head":
        raise ValueError(
            "drafter_training.mode cotrain is of a draft model, which learns from the target's logits in its update; a "
            "draft head learns from hidden states on the instances: leave mode at refit, and see drafter_training.spot"
        )
    if speculation.drafter != "model" or not speculation.has_draft:
        raise ValueError(
            f"drafter_training.mode is cotrain, and speculation.drafter {speculation.drafter} under policy "
            f"{speculation.policy} has no draft model to train; leave mode at refit"
        )
    if not training.refit:
        raise ValueError(
            "drafter_training.mode is cotrain and drafter_training.refit false, which leaves the draft model as it is; "
            "take one of the two out"
        )


def require_optim(trainer: LearningSection, num_trainers: int) -> None:
    """Raise ValueError for an optimizer, or a base in 4 bits, that would get parts of what it takes whole."""
    given = dict(trainer)
    if num_trainers > 1 and given["strategy"] == "fsdp2" and given["optim"] != "adamw":
        raise ValueError(
            f"trainer.optim {given['optim']} steps whole weights, and with {num_trainers} trainers strategy fsdp2 "
            "gives each a part of every one; set trainer.strategy: ddp, or trainer.optim: adamw"
        )
    if num_trainers > 1 and given["strategy"] == "fsdp2" and given["lora"] and given["lora"].base_bits:
        raise ValueError(
            f"trainer.lora.base_bits holds whole weights, and with {num_trainers} trainers strategy fsdp2 gives each a "
            "part of every one; set trainer.strategy: ddp, or take base_bits out"
        )


def require_trainer(trainer: TrainerConfig, *, num_gpus: float, moves_reference: bool) -> None:
    """Raise ValueError for a GPU that is not given, a reference that cannot move, an adapter that nobody merged."""
    if trainer.device == "cuda" and num_gpus == 0:
        raise ValueError(
            "trainer.device is cuda but cluster.trainer.num_gpus is 0, which is a CPU whatever the machine has; set it "
            "to 1, or trainer.device to auto"
        )
    if trainer.lora is not None and trainer.lora.adapter_path is not None:
        raise ValueError(
            f"trainer.lora.adapter_path is of sft, dpo and train-reward, got {trainer.lora.adapter_path} for a run, "
            "whose first weights are those of models.target; name the merged model there (model/ beside the adapter)"
        )
    if trainer.lora is not None and trainer.lora.base_bits is not None:
        raise ValueError(
            "trainer.lora.base_bits is of sft, dpo and train-reward: a run's version 0 is models.target's own weights, "
            "which 4 bits would change; take it out"
        )
    if moves_reference and trainer.lora is not None:
        raise ValueError(
            "algorithm.sync_ref_model moves the reference, which with trainer.lora is the model below the adapters "
            "and stays; take one of the two out"
        )
