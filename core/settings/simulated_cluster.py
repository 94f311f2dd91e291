"""What `rlhfspec simulate cluster` reads: a cluster that is not here, described in a page."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from .section import Name, Section, UserPath

Share = Annotated[float, Field(ge=1e-3, le=1.0)]
Count = Annotated[int, Field(ge=1, le=10**7)]
DeviceName = Literal["A100", "L40S", "H100", "H200", "B200", "GB200"]
PrecisionName = Literal["bf16", "fp8"]

QWEN_7B: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
"Qwen2.5-7B"


class SimulatedModelConfig(Section):
    """The policy's dimensions: a Hugging Face config.json (or its folder), or its keys written here."""

    config: UserPath | None = None
    "a path; nothing is downloaded"
    dimensions: dict[str, Any] | None = None
    "keys of a config.json; Qwen2.5-7B where neither is given"
    precision: PrecisionName = "bf16"
    "of the weights that decode, and of their products"
    cache_bytes: float = Field(default=2.0, gt=0.0, le=8.0)
    "of one number of the KV caches"

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if self.config is not None and self.dimensions is not None:
            raise ValueError("config and dimensions both describe the model; give one of them")
        return self


class SimulatedDeviceConfig(Section):
    """The devices, all of one kind, and what share of their data sheet is reached."""

    name: DeviceName = "H100"
    profile: UserPath | None = None
    "a folder made by `rlhfspec profile`: its measured costs and acceptance instead of the sheet, for decoding"
    memory_share: Share = 0.74
    compute_share: Share = 0.60
    link_share: Share = 0.70
    layer_s: float = Field(default=39e-6, ge=0.0, le=1.0)
    "of a forward, a layer: what starting its kernels takes whatever their size"
    collective_s: float = Field(default=8e-6, ge=0.0, le=1.0)
    "of an all-reduce, whatever its size"
    spare_memory: float = Field(default=0.10, ge=0.0, lt=1.0)
    "share of the memory that neither weights nor caches get"


class SimulatedPoolsConfig(Section):
    """Who generates and who trains."""

    instances: Annotated[int, Field(ge=1, le=10**4)] = 8
    tensor_parallel: Annotated[int, Field(ge=1, le=1024)] = 1
    "GPUs of an instance"
    split: Literal["tensor", "expert"] = "tensor"
    "tensor: they split every matrix; expert: they split the experts, and each has samples and all else of its own"
    trainer_gpus: Count = 8
    colocated: bool = False
    "the trainer's GPUs are the instances'; they take turns"
    slots: Annotated[int, Field(ge=1, le=10**5)] | None = None
    "samples that run at once on an instance; null: as many as its memory holds, and its share of the batch at most"
    report_s: float = Field(default=0.0, ge=0.0, le=60.0)
    "an instance tells the scheduler of ended samples this often at most: of ours, 0.05 (actors/generation)"
    message_s: float = Field(default=0.0, ge=0.0, le=60.0)
    "of each message between scheduler and instance"
    cores: Annotated[int, Field(ge=1, le=4096)] | None = None
    "all instances and the trainer are processes of one machine with so many cores, one each; null: all have their own"
    core_slowdown: float = Field(default=1.0, ge=1.0, le=10.0)
    "with cores: seconds of a piece of work with all cores busy over those with one busy"
    background: float = Field(default=0.0, ge=0.0, le=4096.0)
    "with cores: how many of them anything else keeps busy while an instance works, on average"
    resting_background: float = Field(default=0.0, ge=0.0, le=4096.0)
    "the same while none does"


class SimulatedLengthsConfig(Section):
    """The samples of one step."""

    samples: Annotated[int, Field(ge=1, le=2 * 10**6)] = 1024
    group_samples: Annotated[int, Field(ge=1, le=10**5)] = 1
    "of one prompt: computed once where another of them runs; step.schedule free learns from them together"
    prompt_tokens: Annotated[int, Field(ge=0, le=10**7)] = 256
    max_new_tokens: Count = 8192
    draw: Literal["long_tail", "skewed", "balanced", "equal"] = "long_tail"
    "equal: all of max_new_tokens"
    file: UserPath | None = None
    "recorded lengths (Parquet, JSONL) instead: drawn from anew, as many as samples"
    speed_sigma: float = Field(default=0.1, ge=0.0, le=3.0)
    "log-normal spread of how fast samples advance beside the mean"
    seed: Annotated[int, Field(ge=0)] = 0


class SimulatedDrafterConfig(Section):
    """What drafts, how well and at what cost."""

    kind: Literal["head", "model", "none"] = "head"
    "head: one layer of the target's size and a head of its own vocabulary; model: a small model"
    policy: Literal["adaptive", "fixed"] = "adaptive"
    "adaptive: the project's own choice of the chain's length for each number of samples; fixed: always the same"
    depth: Annotated[int, Field(ge=1, le=64)] = 3
    nodes: Annotated[int, Field(ge=1, le=1024)] | None = None
    "fixed: verified nodes of a tree; null: a chain, as many as levels"
    width: Annotated[int, Field(ge=1, le=64)] = 1
    "fixed: nodes that a level of the tree runs through the drafter"
    acceptance_length: float = Field(default=2.5, ge=1.0, le=100.0)
    "tokens of a decode step with this depth and these nodes, the target's own included"
    acceptance: Annotated[tuple[Share, ...], Field(min_length=1)] | None = None
    "of each level given those before it, instead of acceptance_length; the last one goes on"
    layers: Annotated[int, Field(ge=1, le=1000)] = 1
    "head: its layers"
    vocab_size: Count = 32000
    "head: tokens that it proposes"
    config: UserPath | None = None
    "model: its config.json"
    tensor_parallel: Annotated[int, Field(ge=1, le=1024)] | None = None
    "GPUs that it runs on; null: the instance's"
    level_s: float = Field(default=0.0, ge=0.0, le=1.0)
    "what the engine adds to a drafted level, beside the drafter's own bytes, products and starts"
    step_s: float = Field(default=550e-6, ge=0.0, le=1.0)
    "what the engine adds to a decode step that speculates"

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        most = (self.nodes or self.depth) + 1
        if self.kind != "none" and self.acceptance is None and self.acceptance_length > self.depth + 1:
            raise ValueError(
                f"acceptance_length {self.acceptance_length} is more than depth + 1 = {self.depth + 1}: no step yields "
                "more; lower it or draft deeper"
            )
        if self.nodes is not None and self.nodes + 1 < self.acceptance_length:
            raise ValueError(
                f"acceptance_length {self.acceptance_length} is more than nodes + 1 = {most}: no step yields more"
            )
        if self.nodes is not None and self.nodes < self.depth:
            raise ValueError(f"nodes {self.nodes} are fewer than depth {self.depth}: a level would have none")
        if self.nodes is not None and self.acceptance is not None:
            raise ValueError("acceptance describes a chain; for a tree of nodes give acceptance_length")
        if self.nodes is not None and self.policy != "fixed":
            raise ValueError(
                "a tree of nodes is played with policy fixed: how other trees would do is not known"
            )
        if (self.kind == "model") != (self.config is not None):
            raise ValueError(
                "a drafter of kind model needs config, the path of its config.json; others have none"
            )
        return self


class SimulatedReallocationConfig(Section):
    """Which samples go where, by the project's own policies."""

    policy: Literal["static", "pull", "paper_rule", "finish_time"] = "finish_time"
    poll_interval_s: float | None = Field(default=None, gt=0.0, le=1e6)
    "null: a 200th of the rollout"


class SimulatedLearnerConfig(Section):
    """The update."""

    mfu: Share = 0.40
    forward_mfu: Share = 0.40
    "of the passes that compute log-probabilities"
    recompute: bool = True
    "activations are computed anew in the backward pass: 8 instead of 6 operations a parameter and token"
    log_probability_passes: Annotated[int, Field(ge=0, le=10)] = 1
    "forward passes over the samples before the update: old policy, reference"
    epochs: Annotated[int, Field(ge=1, le=100)] = 1
    tokens_per_gpu: Count = 16384
    "of one pass of one GPU; parameters are gathered and gradients scattered once for each"
    sharded: bool = True
    "parameters, gradients and optimiser are spread over the trainer's GPUs (FSDP)"
    overlap: bool = True
    "traffic goes on beside the computation"
    measured_s: float | None = Field(default=None, ge=0.0, le=1e7)
    "seconds of log-probabilities and update together, where they are known; null: from operations and traffic"


class SimulatedStepConfig(Section):
    """What else a step does, and what overlaps."""

    staleness: Annotated[int, Field(ge=0, le=64)] = 0
    "updates that a sample's weights may be behind those that it trains; 0: in turns"
    schedule: Literal["recorded", "free"] = "recorded"
    "with staleness, as `rollout.schedule`. recorded: phases by counts; free: no instance waits for the slowest sample"
    over_provisioning: float | None = Field(default=None, gt=0.0, le=64.0)
    "free: batches that run beyond the next update's, as `rollout.over_provisioning`; null: 1"
    look_ahead: Literal["off", "auto"] | Annotated[int, Field(ge=1, le=10**5)] = "off"
    "as `rollout.look_ahead`: free slots begin the next batch; auto: as many as its law says; a number: at most so many"
    agreement_tokens: float = Field(default=2800.0, ge=1.0, le=1e9)
    "look_ahead: mean tokens before the first that one update changes, of samples of equal noise"
    publication_s: float | None = Field(default=None, ge=0.0, le=1e6)
    "seconds from the update to new weights in the instances; null: from bytes and links"
    other_s: float = Field(default=2.0, ge=0.0, le=1e6)
    "data, rewards, preparation, between rollout and update"
    steps: Annotated[int, Field(ge=1, le=64)] = 3
    "rollouts that are played, each with lengths of its own"


class SimulatedClusterConfig(Section):
    """The whole file."""

    model: SimulatedModelConfig = SimulatedModelConfig()
    device: SimulatedDeviceConfig = SimulatedDeviceConfig()
    pools: SimulatedPoolsConfig = SimulatedPoolsConfig()
    lengths: SimulatedLengthsConfig = SimulatedLengthsConfig()
    drafter: SimulatedDrafterConfig = SimulatedDrafterConfig()
    reallocation: SimulatedReallocationConfig = SimulatedReallocationConfig()
    learner: SimulatedLearnerConfig = SimulatedLearnerConfig()
    step: SimulatedStepConfig = SimulatedStepConfig()
    sweep: dict[Name, tuple[Any, ...]] = Field(default_factory=dict)
    "with --sweep: dotted key to its values, such as drafter.depth: [1, 3, 5]; every combination is tried"

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.pools.colocated and self.step.staleness:
            raise ValueError(
                "step.staleness above 0 overlaps generation with training; pools.colocated has them take turns: "
                "set one of them to 0 or false"
            )
        if self.step.look_ahead != "off" and self.step.staleness:
            raise ValueError(
                f"step.look_ahead {self.step.look_ahead} begins batches beside updates so that no sample is stale: set "
                "step.staleness to 0, or look_ahead to off"
            )
        if self.lengths.samples % self.lengths.group_samples:
            raise ValueError(
                f"lengths.samples {self.lengths.samples} must be whole groups of lengths.group_samples "
                f"{self.lengths.group_samples}"
            )
        if self.step.over_provisioning is not None and (
            self.step.schedule != "free" or self.step.over_provisioning > self.step.staleness
        ):
            raise ValueError(
                f"step.over_provisioning {self.step.over_provisioning:g} needs step.schedule free and as much "
                f"step.staleness, got {self.step.schedule} and {self.step.staleness}"
            )
        if (
            self.pools.colocated
            and self.pools.trainer_gpus != self.pools.instances * self.pools.tensor_parallel
        ):
            raise ValueError(
                f"pools.colocated: trainer_gpus {self.pools.trainer_gpus} must be instances x tensor_parallel = "
                f"{self.pools.instances * self.pools.tensor_parallel}"
            )
        if self.device.profile is not None and self.drafter.policy == "fixed":
            raise ValueError(
                "device.profile is played with drafter.policy adaptive: its costs choose the drafts"
            )
        return self
