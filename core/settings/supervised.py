"""Supervised training: `rlhfspec sft`, `train-reward` and `dpo`, each with a whole config of its own."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from .cluster import ClusterConfig
from .run import CACHE_DIR
from .section import (
    MAX_THREADS,
    Moment,
    Name,
    PromptTemplate,
    Section,
    UserPath,
    folder_name,
)
from .trainer import (
    DECAY_RATIO,
    Beta,
    ComputeDtype,
    LearningSection,
    LoraConfig,
    Optim,
    Schedule,
    Share,
    require_optim,
)

USUAL_TOKENS = 1024
"Of a sequence at most, where data.max_tokens says nothing."


class SupervisedRunConfig(Section):
    """What the run is called and where it writes."""

    name: Annotated[str, AfterValidator(folder_name)] = "supervised"
    "run folders are called NAME-DATE-TIME; --out names the folder itself"
    seed: int = Field(default=0, ge=0, lt=2**63)
    "of the order of rows, the held-out split, adapters and a new head"
    template_time: Moment | None = None
    "what chat templates are told when they ask the time (strftime_now), ISO 8601; null: when the run begins, which "
    "its config.yaml keeps"
    output_dir: UserPath = "runs"
    cache_dir: UserPath = CACHE_DIR
    "where models that are known by name are kept"


class SupervisedModelConfig(Section):
    """The model that is trained. All trainers read it from the same path."""

    name: Name
    "path or hub name of a Hugging Face causal LM, or a name that `rlhfspec models get` knows; train-reward also takes "
    "a sequence classifier with one output, whose head it goes on with"
    tokenizer: Name | None = None
    "path or hub name; the model's by default"
    chat_template: UserPath | None = None
    "a Jinja file instead of the tokenizer's own, or the name of one of its several; saved with the checkpoint"
    eos_token: Name | None = None
    "the token that ends a turn, where a chat template's is not the tokenizer's own; saved with the checkpoint"
    dtype: Literal["float32", "bfloat16"] = "float32"
    "of the checkpoint that is saved, and of matrix products on a GPU; the optimizer steps float32"
    trust_remote_code: bool = False


class ExamplesConfig(Section):
    """A file of rows, and which of them are held out."""

    path: UserPath
    "as data.path of a run: a file, a pattern, a folder, or the name of a `datasets` data set"
    split: str = "train"
    "used with a `datasets` name only"
    eval_path: UserPath | None = None
    "held-out rows; null: a share of `path`"
    eval_share: float = Field(default=0.05, ge=0.0, lt=1.0)
    "of the rows, drawn by run.seed, all rows of a prompt on one side, where eval_path is null; 0: nothing is held out"
    limit: int | None = Field(default=None, ge=1)
    "use only the first rows"
    chat: bool = False
    "true: a plain prompt is one user turn, its answer one of the assistant; rows of messages need no such word"
    prompt_field: Name = "prompt"
    prompt_template: PromptTemplate = "{prompt}"
    "how a plain prompt field becomes text; `{COLUMN}` is another column of the row"
    tools_field: Name | None = "tools"
    "what the chat template is told of, where a row has it: a list of JSON schemas, or its text; null: no tools"
    ignored_fields: tuple[Name, ...] = ()
    "columns that are known and left unread; others that would change what is learned are refused"
    max_tokens: int | None = Field(default=None, ge=2)
    "of one sequence; null: 1024, or the model's positions where it has fewer"
    on_long: Literal["truncate", "skip", "fail"] = "truncate"
    "truncate: an example for sft or dpo loses its end, a prompt for train-reward its beginning, a response nothing"

    @property
    def token_limit(self) -> int:
        """Tokens of one sequence at most."""
        return self.max_tokens or USUAL_TOKENS


class ExamplesSource(Section):
    """One of several sets of rows; null: as `data` says it."""

    path: UserPath
    weight: float = Field(default=1.0, gt=0.0, le=1e6)
    "beside the other sources'; data.weight_of says of what"
    split: str | None = None
    limit: int | None = Field(default=None, ge=1)
    chat: bool | None = None
    prompt_field: Name | None = None
    prompt_template: PromptTemplate | None = None
    messages_field: Name | None = None
    reference_field: Name | None = None
    text_field: Name | None = None
    loss_on: Literal["assistant", "completion", "all"] | None = None
    system_prompt: str | None = None
    weight_field: Name | None = None


class DemonstrationsConfig(ExamplesConfig):
    """Rows of `messages`, or of a prompt and its completion: text, or lists of messages."""

    path: UserPath | None = None  # type: ignore[assignment]  # frozen: nobody writes another kind
    "as data.path of a run: a file, a pattern, a folder, or the name of a `datasets` data set"
    messages_field: Name = "messages"
    "taken where a row has it; loss on the assistant's turns"
    reference_field: Name = "completion"
    "of rows without messages: the answer to prompt_field"
    text_field: Name | None = None
    "every row is this text whole, the end token behind (TRL `dataset_text_field`); null: rows as above"
    loss_on: Literal["assistant", "completion", "all"] | None = None
    """the tokens learned: what the assistant wrote (TRL `assistant_only_loss`), all of the completion
    (`completion_only_loss`), all there are; null: all of a text_field, else what the assistant wrote"""

    system_prompt: str | None = None
    "the first turn of every conversation that has no system turn first"
    weight_field: Name | None = None
    "a number from 0 on by which a row's loss counts, in training and held out; null: all by 1"
    sources: tuple[ExamplesSource, ...] = ()
    "several sets of rows, each with its weight; instead of `path`"
    weight_of: Literal["prompt", "source"] = "prompt"
    "prompt: a row of weight 2 comes twice as often as one of weight 1; source: that holds for whole sources"
    stopping: Literal["all_exhausted", "first_exhausted"] = "all_exhausted"
    "an epoch ends when every row has come at least once, or before one comes twice"

    @model_validator(mode="after")
    def _rows_can_be_read(self) -> DemonstrationsConfig:
        if (self.path is None) != bool(self.sources):
            raise ValueError("give exactly one of data.path (rows) and data.sources (several sets of them)")
        if self.sources:
            self.each_source()
        elif self.text_field is not None:
            names = (
                "chat",
                "prompt_field",
                "prompt_template",
                "messages_field",
                "reference_field",
                "system_prompt",
            )
            for name in names:
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(
                        f"data.text_field is all of a row; take data.{name} out, which nothing reads"
                    )
            if self.loss_on not in (None, "all"):
                raise ValueError(f"data.text_field has no {self.loss_on} alone; set data.loss_on to all")
        return self

    def each_source(self) -> tuple[DemonstrationsConfig, ...]:
        """One config a source, in their order; a single source's is this one."""
        if not self.sources:
            return (self,)
        shared = {name: value for name, value in self if name != "sources"}
        return tuple(
            DemonstrationsConfig(**shared | {k: v for k, v in source if k != "weight" and v is not None})
            for source in self.sources
        )


class PairsConfig(ExamplesConfig):
    """Rows of a prompt and two responses; without a prompt, of two conversations that begin alike."""

    chosen_field: Name = "chosen"
    rejected_field: Name = "rejected"


class PreferencesConfig(PairsConfig):
    """Rows of a prompt and two responses; without a prompt, of two conversations that begin alike."""

    margin_field: Name | None = None
    "a number by which the chosen response's score is to exceed the other's; null: `margin` where rows have it"


class FeedbackConfig(PairsConfig):
    """Rows as of train-reward; with loss.type kto also of a prompt, one response and whether it is desirable."""

    label_field: Name = "label"
    "true or false, 1 or 0: the one response of a row is desirable; a row that has it is no pair"
    reference_field: Name = "completion"
    "that response"


class SupervisedTrainerConfig(LearningSection):
    """The optimizer and its schedule. Weights are float32 whatever `model.dtype` is."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    "auto: a GPU where there is one; of several trainers the one that Ray assigned (cluster.trainer.num_gpus)"
    lora: LoraConfig | None = None
    "null: every weight learns; a reward model's head learns whole either way"
    learning_rate: float = Field(default=2e-5, gt=0.0, le=1e6)
    schedule: Schedule = "linear"
    "of the learning rate after the warm-up, as transformers.get_scheduler"
    min_lr_ratio: Share = 0.0
    "cosine_with_min_lr, warmup_stable_decay: the last learning rate over the first"
    decay_ratio: float = Field(default=DECAY_RATIO, gt=0.0, le=1.0)
    "warmup_stable_decay: share of all steps in which the rate falls, as a cosine"
    warmup_steps: int = Field(default=0, ge=0)
    warmup_ratio: Share = 0.0
    "warm-up as a share of all steps, rounded up; one of the two"
    epochs: int = Field(default=1, ge=1)
    max_steps: int | None = Field(default=None, ge=1)
    "optimizer steps; null: as many as the epochs have, else the rows come round as often as they must"
    batch_size: int = Field(default=32, ge=1)
    "examples or pairs per optimizer step, of all trainers together"
    max_tokens_per_forward: int = Field(default=4096, ge=16)
    "in one forward, packed without padding; more are accumulated"
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    optim: Optim = "adamw"
    """adamw_8bit: moments of 8 bits, by bitsandbytes, which it needs. muon (Jordan 2024): the layers' matrices step by
    their momentum (0.95), orthogonalised and as long as AdamW's step; all else, embeddings and head too, by AdamW"""
    weight_decay: float = Field(default=0.0, ge=0.0)
    adam_betas: tuple[Beta, Beta] = (0.9, 0.999)
    "of AdamW: how much of its averages of the gradient and of its square each step keeps"
    adam_epsilon: float = Field(default=1e-8, gt=0.0, le=1.0)
    compute_dtype: ComputeDtype = "auto"
    """of matrix products; weights, optimizer, softmax and losses stay float32. auto: float32 on a CPU, on a GPU
    `model.dtype`; bfloat16 on a CPU needs AVX512-BF16 or AMX"""
    gradient_checkpointing: bool = False
    strategy: Literal["fsdp2", "ddp"] = "fsdp2"
    "with several trainers (cluster.trainer.num_actors): each holds a part of every weight, or all of them"
    num_threads: int = Field(default=2, ge=1, le=MAX_THREADS)
    eval_every: int = Field(default=100, ge=0)
    "steps between evaluations on held-out rows; 0: only at the end"
    checkpoint_every: int = Field(default=0, ge=0)
    "steps between checkpoints that --resume goes on from; 0 writes only the last model"
    keep_best: bool = False
    """keep `checkpoints/best`, of the trained weights whose eval/loss was lowest (TRL `load_best_model_at_end`),
    and below that of the model it began with"""
    early_stopping_patience: int | None = Field(default=None, ge=1)
    "end after so many evaluations in a row whose eval/loss is not below the lowest; null: never"


class PreferenceLossConfig(Section):
    """The loss of `rlhfspec train-reward`."""

    center_rewards_coefficient: float = Field(default=0.0, ge=0.0)
    "of (r_chosen + r_rejected)^2, which keeps scores around zero (Eisenstein et al. 2023); 0.01 is usual"


class DpoTrainerConfig(SupervisedTrainerConfig):
    """The optimizer and its schedule. Weights are float32 whatever `model.dtype` is."""

    learning_rate: float = Field(default=1e-6, gt=0.0, le=1e6)
    "as in TRL; with LoRA ten times as much is usual"


class DpoLossConfig(Section):
    """The loss of `rlhfspec dpo`; sources: `learning.training.objectives.direct_preferences`."""

    type: Literal["sigmoid", "ipo", "hinge", "kto", "orpo"] = "sigmoid"
    "sigmoid is DPO; kto also learns from responses that are judged alone; orpo has no reference and learns chosen ones"
    beta: float = Field(default=0.1, gt=0.0)
    "how strongly the reference holds; of ipo its tau, of orpo the weight of the odds ratio"
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=0.5)
    "share of pairs that are expected to be the wrong way round (cDPO); with sigmoid alone"
    desirable_weight: float = Field(default=1.0, gt=0.0)
    "of kto: what a desirable response weighs"
    undesirable_weight: float = Field(default=1.0, gt=0.0)

    @model_validator(mode="after")
    def _of_its_type(self) -> DpoLossConfig:
        for name, types in _OF_A_TYPE.items():
            if getattr(self, name) != type(self).model_fields[name].default and self.type != types:
                raise ValueError(
                    f"loss.{name} is of loss.type {types}, and the type is {self.type}; take it out"
                )
        return self


_OF_A_TYPE = {"label_smoothing": "sigmoid", "desirable_weight": "kto", "undesirable_weight": "kto"}


class SupervisedConfig(Section):
    """What the commands share."""

    run: SupervisedRunConfig = SupervisedRunConfig()
    model: SupervisedModelConfig
    data: ExamplesConfig
    trainer: SupervisedTrainerConfig = SupervisedTrainerConfig()
    cluster: ClusterConfig = ClusterConfig()
    "only what concerns trainers; Ray starts where trainer.num_actors is above 1"

    @model_validator(mode="after")
    def _can_compare(self) -> SupervisedConfig:
        for name in ("keep_best", "early_stopping_patience"):
            is_held_out = self.data.eval_path is not None or self.data.eval_share > 0.0
            if getattr(self.trainer, name) and not (self.trainer.eval_every and is_held_out):
                raise ValueError(
                    f"trainer.{name} goes by eval/loss; set trainer.eval_every, and data.eval_path or data.eval_share"
                )
        return self

    @model_validator(mode="after")
    def _shares_for_all(self) -> SupervisedConfig:
        num_trainers, num_gpus = self.cluster.trainer.num_actors, self.cluster.trainer.num_gpus
        require_optim(self.trainer, num_trainers)
        if num_trainers > self.trainer.batch_size:
            raise ValueError(
                f"cluster.trainer.num_actors is {num_trainers}, but trainer.batch_size {self.trainer.batch_size} has "
                "not one row for each; lower the one or raise the other"
            )
        if num_trainers > 1 and num_gpus not in (0, 1):
            raise ValueError(
                f"cluster.trainer.num_gpus is {num_gpus:g} with {num_trainers} trainers, each of which trains on one "
                "whole GPU; set 1, or 0 for the CPU"
            )
        return self


class SftLossConfig(Section):
    """The loss of `rlhfspec sft`."""

    type: Literal["nll", "dft"] = "nll"
    "the mean negative log-likelihood of a token; dft: each times its probability, a constant (Wu et al. 2025)"


class SftConfig(SupervisedConfig):
    """`rlhfspec sft`."""

    data: DemonstrationsConfig  # type: ignore[assignment]  # frozen: nobody writes another kind
    loss: SftLossConfig = SftLossConfig()


class TrainRewardConfig(SupervisedConfig):
    """`rlhfspec train-reward`."""

    data: PreferencesConfig  # type: ignore[assignment]  # as above
    loss: PreferenceLossConfig = PreferenceLossConfig()


class DpoConfig(SupervisedConfig):
    """`rlhfspec dpo`."""

    data: FeedbackConfig  # type: ignore[assignment]  # as above
    trainer: DpoTrainerConfig = DpoTrainerConfig()  # type: ignore[assignment]
    loss: DpoLossConfig = DpoLossConfig()
