"""Every setting of a run, its default, and its meaning: the only place where a default stands.

How the models learn stands in `core.training_config`; both are one tree.

Files are YAML, one mapping per section; unknown keys fail (see `core.config_io`). No config object
is mutated after it is loaded.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from core.config_section import MAX_THREADS, Name, Seconds, Section, UserPath, folder_name
from core.ranges import LEAST_TEMPERATURE
from core.training_config import AlgorithmConfig, DrafterTrainingConfig, TrainerConfig

MAX_ACTORS = 4096
MAX_DRAWN_PROBLEMS = 1_000_000
_GPU_DEFAULTS: dict[str, tuple[str, object, frozenset[str]]] = {
    # goodput waits for the device between levels; a profile that is named asks for it all the same
    "speculation": ("policy", "fixed", frozenset({"policy", "profile"})),
    # a GPU is idle at what fits a CPU's cache
    "engine": ("max_prefill_tokens", 8192, frozenset({"max_prefill_tokens"})),
}
"Of sections, where instances decode on GPUs: a key, its default there, and the keys any of which overrules it."


class RunConfig(Section):
    """What the run is called, how long it is, where it writes."""

    name: Annotated[str, AfterValidator(folder_name)] = "run"
    "run folders are called NAME-DATE-TIME"
    seed: int = Field(default=0, ge=0, lt=2**63)
    iterations: int = Field(default=20, ge=1)
    output_dir: UserPath = "runs"
    "run folders are made under it; made absolute against the caller's folder"
    cache_dir: UserPath = "~/.cache/rlhfspec"
    "the only thing kept in the home folder: model pairs the project made itself, models it got by name, profiles"
    checkpoint_every: int = Field(default=0, ge=0)
    "iterations between checkpoints; 0 writes only the last"
    step_log: bool = False
    "true: write what every decode step saw, decided and did, for `rlhfspec replay`"


class ModelsConfig(Section):
    """The pair. `demo` makes the embedded pair (and caches it); a known real model is fetched by its name."""

    target: Name = "demo"
    "path or hub name of a Hugging Face causal LM, `demo`, or a name that `rlhfspec models get` knows"
    draft: Name | None = None
    "a smaller causal LM with an equal tokenizer; null with drafter ngram or none; `demo` with `demo`"
    tokenizer: Name | None = None
    "path or hub name; the target's by default"
    dtype: Literal["float32", "bfloat16"] = "float32"
    trust_remote_code: bool = False


class DataConfig(Section):
    """Where prompts come from: a task that makes them, or a data set of real ones."""

    task: Literal["chain", "one_sentence"] | None = None
    "a generated task, letter chains or questions for a chat model; excludes `path`"
    path: UserPath | None = None
    "a .jsonl or .parquet file, or the name of a `datasets` data set"
    split: str = "train"
    "used with a `datasets` name only"
    prompt_field: str = "question"
    reference_field: str | None = "answer"
    prompt_template: str = "{prompt}"
    "how the prompt field becomes text"
    chat: bool = False
    "true: the tokenizer's chat template is applied to one user turn"
    max_prompt_tokens: int = Field(default=512, ge=1)
    "more characters than so many of the tokenizer's longest tokens hold are too long uncounted"
    on_long_prompt: Literal["fail", "skip"] = "fail"
    shuffle: bool = True
    limit: int | None = Field(default=None, ge=1)
    "use only the first rows"

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        if (self.task is None) == (self.path is None):
            raise ValueError("give exactly one of data.task (a generated task) and data.path (a data set)")
        if "{prompt}" not in self.prompt_template:
            raise ValueError(
                "data.prompt_template must hold {prompt}, or every prompt is the same; put it in"
            )
        if self.task is not None and (self.limit or 0) > MAX_DRAWN_PROBLEMS:
            raise ValueError(
                f"data.limit {self.limit:,} is more than a generated task draws; expected at most "
                f"{MAX_DRAWN_PROBLEMS:,}"
            )
        return self


class RewardConfig(Section):
    """How a response is scored."""

    kind: str = "chain"
    "`chain`, `one_sentence`, `gsm8k`, `model`, or a Python function as `package.module:function`"
    model: Name | None = None
    "kind model: path or hub name of a sequence-classification model"
    batch_size: int = Field(default=32, ge=1)


class SamplingConfig(Section):
    """How responses are sampled."""

    temperature: float = Field(default=1.0, ge=0.0)
    top_k: int = Field(default=0, ge=0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    max_new_tokens: int = Field(default=256, ge=1)
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    "the tokenizer's end-of-sequence token is always added"


class SpeculationConfig(Section):
    """What is drafted, and who decides how much."""

    drafter: Literal["model", "ngram", "none"] = "model"
    policy: Literal["goodput", "batch_table", "bandit", "capacity", "fixed", "off"] = "goodput"
    "goodput: adaptive, from a profile; batch_table, bandit: TLT's; capacity: FastGRPO's; fixed; off: plain decoding"
    profile: UserPath = "auto"
    "goodput: a folder made by `rlhfspec profile`; auto: made at start-up when there is none in the cache (CPU only)"
    max_nodes: int = Field(default=16, ge=1, le=64)
    "goodput, batch_table, bandit: most draft nodes verified per sample"
    max_depth: int = Field(default=16, ge=1, le=32)
    "goodput, batch_table, bandit: most levels drafted"
    num_nodes: int = Field(default=8, ge=0, le=64)
    "fixed: draft nodes verified per sample; 0 is plain decoding"
    depth: int = Field(default=8, ge=0, le=32)
    branching: int = Field(default=1, ge=1, le=8)
    "children offered per node; 1 is a chain"
    capacity_tokens: int = Field(default=24, ge=2)
    "capacity: tokens one target forward verifies at no more than twice the cost of one"
    ngram_max: int = Field(default=4, ge=1)
    ngram_min: int = Field(default=2, ge=1)

    @model_validator(mode="after")
    def _has_levels(self) -> SpeculationConfig:
        if self.policy in ("fixed", "capacity") and self.num_nodes > 0 and self.depth == 0:
            raise ValueError(
                f"policy {self.policy} is to verify {self.num_nodes} nodes at depth 0, but a tree of no levels has "
                "no node; set depth to 1 or more, or num_nodes to 0 for plain decoding"
            )
        return self


class EngineConfig(Section):
    """One generation instance."""

    numerics: Literal["auto", "invariant", "fast"] = "auto"
    "invariant: every bit is independent of batch and plan (CPU: one thread); fast: the distribution; auto: by device"
    attention: Literal["auto", "ordered", "sdpa", "reference", "xformers"] = "auto"
    forward: Literal["auto", "stock"] = "auto"
    "auto: our own forward where there is one (Llama, Mistral, Qwen2, Qwen3); stock: the Hugging Face module"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_running_samples: int = Field(default=32, ge=1)
    kv_cache_mb: float | None = Field(default=None, gt=0.0)
    "keys and values of all running samples; beyond, the shortest wait. None: room for every slot at full length"
    max_prefill_tokens: int = Field(default=512, ge=4)
    "prompt tokens in one prefill forward; 8192 by default where instances have GPUs"
    num_threads: int = Field(default=1, ge=1, le=MAX_THREADS)
    graph_memory_mb: int = Field(default=1024, ge=0)
    "CUDA: what recorded decode forwards (CUDA graphs) may hold, for each model; 0: none are recorded"
    probe: bool = True
    "prove batch invariance for this model, dtype and device at start-up"


class RolloutConfig(Section):
    """How many responses an iteration generates and how stale they may be."""

    prompts_per_iteration: int = Field(default=32, ge=1)
    samples_per_prompt: int = Field(default=1, ge=1)
    max_staleness: Literal[0] = 0
    "weight versions between sampling and update; 0 is synchronous, the only mode so far"


class ReallocationConfig(Section):
    """How samples are bound to instances, and which unfinished ones move between them (docs/operations.md)."""

    policy: Literal["finish_time", "paper_rule", "pull", "static"] = "finish_time"
    "pull: bind a sample when a slot frees, move nothing; static: bind all up front; finish_time, paper_rule: move"
    mode: Literal["auto", "always_migrate", "always_recompute"] = "auto"
    "auto: whichever is predicted to have the sample running at its destination sooner"
    transport: Literal["auto", "gloo", "object_store", "nccl"] = "auto"
    interval_s: Seconds = 0.1
    "between two plans"
    timeout_s: Seconds = 5.0
    "for each stage of a move and each frame; the source keeps or takes back the sample then"
    frame_bytes: int = Field(default=1 << 19, ge=1024)
    transfer_share: float = Field(default=0.15, gt=0.0, le=1.0)
    "most of its time that a transfer thread may be busy: transfers must not slow the samples that stay"
    max_bytes_per_s: float | None = Field(default=None, gt=0.0)
    "of each transfer, for a network that others need too; null: no limit"


class PoolConfig(Section):
    """One actor pool: how many actors, and what each takes. Fractions of a CPU are allowed."""

    num_actors: int = Field(default=1, ge=1, le=MAX_ACTORS)
    num_cpus: float = Field(default=0.5, ge=0.0)
    num_gpus: float = Field(default=0.0, ge=0.0)


class GenerationPoolConfig(PoolConfig):
    """The generation instances."""

    num_actors: int = Field(default=2, ge=1, le=MAX_ACTORS)


class RewardPoolConfig(PoolConfig):
    """The reward actors."""

    num_cpus: float = Field(default=0.25, ge=0.0)


class PublicationConfig(Section):
    """How new weights of the target travel from the trainer to the instances."""

    transport: Literal["auto", "broadcast", "nccl", "object_store"] = "auto"
    "broadcast: a process group (Gloo); nccl: that over NCCL where all have GPUs of their own; auto: broadcast on "
    "several nodes, else object_store"


class ClusterConfig(Section):
    """Ray: where, what each pool takes, and how long anything may take to answer."""

    address: str | None = None
    "`auto` or an address joins a running cluster; null: RAY_ADDRESS if set, else a local one"
    dashboard: bool = True
    dashboard_port: int | None = None
    "null: a free one"
    object_store_bytes: int | None = None
    "null: what the run needs, two versions of its weights among it (local cluster only)"
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    generation: GenerationPoolConfig = GenerationPoolConfig()
    reward: RewardPoolConfig = RewardPoolConfig()
    trainer: PoolConfig = PoolConfig()
    publication: PublicationConfig = PublicationConfig()
    scheduler_num_cpus: float = Field(default=0.1, ge=0.0)
    placement_timeout_s: Seconds = 30.0
    start_timeout_s: Seconds = 300.0
    "an actor's constructor, model building included"
    poll_interval_s: Seconds = 0.1
    heartbeat_timeout_s: Seconds = 60.0
    "an instance that answers no poll for so long is taken for lost"
    order_timeout_s: Seconds = 300.0
    "weight loads, scoring, updates"
    max_instance_restarts: int = Field(default=3, ge=0)
    max_scheduler_restarts: int = Field(default=3, ge=0)
    "in a run, as the instances'; the state comes from the instances and the loop"


class Config(Section):
    """The whole run."""

    run: RunConfig = RunConfig()
    models: ModelsConfig = ModelsConfig()
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    sampling: SamplingConfig = SamplingConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    engine: EngineConfig = EngineConfig()
    rollout: RolloutConfig = RolloutConfig()
    reallocation: ReallocationConfig = ReallocationConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    drafter_training: DrafterTrainingConfig = DrafterTrainingConfig()
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
    def refits_draft(self) -> bool:
        """True when a draft model drafts and is to follow the target."""
        speculation = self.speculation
        return self.drafter_training.refit and speculation.drafter == "model" and speculation.policy != "off"

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
        if self.speculation.drafter == "model" and self.models.draft is None:
            raise ValueError(
                "speculation.drafter is 'model' but models.draft is null; "
                "name a draft model, or set speculation.drafter to ngram or none"
            )
        if self.speculation.drafter == "ngram" and self.speculation.policy == "goodput":
            raise ValueError(
                "speculation.policy goodput goes by a draft model's scores, and drafter ngram has none; "
                "use policy bandit, batch_table, capacity or fixed with it"
            )
        if self.speculation.ngram_min > self.speculation.ngram_max:
            raise ValueError("speculation.ngram_min must not exceed speculation.ngram_max")
        if self.algorithm.kind == "grpo" and self.rollout.samples_per_prompt < 2:
            raise ValueError(
                "algorithm.kind grpo compares samples of one prompt: rollout.samples_per_prompt >= 2"
            )
        if self.trainer.device == "cuda" and self.cluster.trainer.num_gpus == 0:
            raise ValueError(
                "trainer.device is cuda but cluster.trainer.num_gpus is 0, which is a CPU whatever the machine has; "
                "set it to 1, or trainer.device to auto"
            )
        if self.reward.kind == "model" and self.reward.model is None:
            raise ValueError("reward.kind is 'model' but reward.model names none")
        return self


def _takes_gpus(wish: object, num_gpus: object) -> bool:
    return wish == "cuda" or (wish == "auto" and isinstance(num_gpus, int | float) and num_gpus > 0)


def _given(tree: Any, *path: str) -> Any:
    """What stands at a path of mappings and sections that nothing has checked so far; None where nothing does."""
    for name in path:
        tree = tree.get(name) if isinstance(tree, dict) else getattr(tree, name, None)
    return tree
