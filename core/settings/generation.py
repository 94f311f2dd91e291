"""How responses are sampled, drafted, decoded and moved between instances."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from ..ranges import LEAST_TEMPERATURE
from .section import MAX_THREADS, Seconds, Section, UserPath

StopString = Annotated[str, Field(min_length=1)]
DRAFTERS_ELSEWHERE = {
    "head": ("eagle", "eagle2", "eagle3", "drafthead", "speculator"),
    "mtp": ("nextn", "deepseekmtp"),
    "suffix": ("lookup", "promptlookup", "ngrams", "suffixdecoding"),
    "model": ("draft", "draftmodel", "assistant", "standalone"),
    "none": ("off", "no", "false"),
}
"What others call a drafter, in small letters and digits alone; `off` in YAML is false."


class SamplingConfig(Section):
    """How responses are sampled."""

    temperature: float = Field(default=1.0, ge=0.0)
    top_k: int = Field(default=0, ge=0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    "tokens less likely than so much of the likeliest are never drawn, as in vLLM; 0: all may be"
    max_new_tokens: int = Field(default=256, ge=1)
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    "what ends a response beside end_token_ids"
    stop: Annotated[
        tuple[StopString, ...], BeforeValidator(lambda one: (one,) if isinstance(one, str) else one)
    ] = ()
    "one or several texts: a response ends behind the token that completes one, which stays in tokens and text"
    end_token_ids: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """null: the tokenizer's end token, those of generation_config.json (without one, of config.json) and, for
    conversations, what closes a turn of the chat template; a run's own config keeps what was found"""


class SpeculationConfig(Section):
    """What is drafted, and who decides how much."""

    drafter: Literal["model", "head", "mtp", "suffix", "none"] = "model"
    """model: a draft model; head: a layer on the target's hidden states; mtp: the one that the target brings;
    suffix: look-up in all responses to the prompt"""
    policy: Literal["goodput", "bandit", "fixed", "off"] = "goodput"
    """goodput: adaptive, from a profile; bandit: TLT's, which learns by trying; fixed, the default where instances have
    GPUs; off: plain decoding"""
    profile: UserPath = "auto"
    "goodput: a folder made by `rlhfspec profile`; auto: made at start-up when there is none in the cache (CPU only)"
    max_nodes: int = Field(default=16, ge=1, le=64)
    "goodput, bandit: most draft nodes verified per sample"
    max_depth: int = Field(default=16, ge=1, le=32)
    "goodput, bandit: most levels drafted"
    num_nodes: int = Field(default=8, ge=0, le=64)
    "fixed: draft nodes verified per sample; 0 is plain decoding"
    depth: int = Field(default=8, ge=0, le=32)
    branching: int = Field(default=1, ge=1, le=8)
    "children offered per node; 1 is a chain"
    look_up: Literal["none", "suffix"] = "none"
    "beside a drafter that computes: what is looked up stands in its place where it promises more"
    suffix_min: int = Field(default=1, ge=1)
    "suffix, as drafter or look_up: least tokens that must match"
    suffix_memory_mb: float = Field(default=256.0, gt=0.0)
    "suffix: responses to look up in, of each instance; the prompts used longest ago go first"

    @property
    def drafts(self) -> bool:
        """Whether anything is drafted but what requests bring."""
        return self.policy != "off" and self.drafter != "none"

    @property
    def names_draft(self) -> bool:
        """Whether models.draft must name what drafts: a model of its own, or a head."""
        return self.drafter in ("model", "head")

    @property
    def has_draft(self) -> bool:
        """Whether weights beside the target's draft: those of models.draft, or the target's MTP layer."""
        return self.drafter in ("model", "head", "mtp") and self.policy != "off"

    @property
    def looks_up(self) -> bool:
        """Whether drafts cost next to nothing, and come with no scores of a model."""
        return self.drafter == "suffix"

    @property
    def needs_profile(self) -> bool:
        """Whether the policy needs a profile of what drafts."""
        return self.policy == "goodput" and self.drafts

    @property
    def remembers(self) -> bool:
        """Whether drafts are looked up in finished responses."""
        return "suffix" in (self.drafter, self.look_up) and self.policy != "off"

    @property
    def without_look_up(self) -> SpeculationConfig:
        """The same, drafted by the drafter alone: what a profile is of."""
        return self.model_copy(update={"look_up": "none"})

    @model_validator(mode="after")
    def _looks_up_beside(self) -> SpeculationConfig:
        if self.look_up != "none" and self.drafter not in ("model", "head", "mtp"):
            raise ValueError(
                f"speculation.look_up {self.look_up} stands beside a drafter that computes (model, head or mtp), "
                f"but drafter is {self.drafter}; set look_up to none, or drafter to one of these (to look up alone: "
                f"drafter {self.look_up})"
            )
        return self

    @model_validator(mode="after")
    def _has_levels(self) -> SpeculationConfig:
        if self.policy == "fixed" and self.num_nodes > 0 and self.depth == 0:
            raise ValueError(
                f"policy fixed is to verify {self.num_nodes} nodes at depth 0, but a tree of no levels has "
                "no node; set depth to 1 or more, or num_nodes to 0 for plain decoding"
            )
        return self


def require_training_temperature(temperature: float) -> None:
    """Raise ValueError for a temperature that no log-probability can be learned from."""
    if temperature == 0.0:
        raise ValueError(
            "sampling.temperature must be above 0 to train: greedy sampling has no log-probability; use 1.0"
        )
    if temperature < LEAST_TEMPERATURE:
        raise ValueError(
            f"sampling.temperature must be at least {LEAST_TEMPERATURE}, got {temperature}: logits over it overflow; "
            "use 1.0"
        )


def require_draft(speculation: SpeculationConfig, draft: str | None) -> None:
    """Raise ValueError where `models.draft` must name what drafts and does not."""
    if speculation.names_draft and draft is None and speculation.policy != "off":
        what = {"model": "a draft model", "head": "the folder of a draft head"}[speculation.drafter]
        raise ValueError(
            f"speculation.drafter is '{speculation.drafter}' but models.draft is null; "
            f"name {what}, or set speculation.drafter to suffix or none"
        )


class EngineConfig(Section):
    """One generation instance."""

    numerics: Literal["auto", "invariant", "fast"] = "auto"
    "invariant: every bit is independent of batch and plan (CPU: one thread); fast: the distribution; auto: by device"
    attention: Literal["auto", "ordered", "sdpa", "reference", "xformers", "split"] = "auto"
    forward: Literal["auto", "stock"] = "auto"
    "auto: our own forward where there is one (Llama, Mistral, Qwen2, Qwen3); stock: the Hugging Face module"
    kernels: Literal["auto", "off"] = "auto"
    "CUDA; auto: what lies between a layer's products by Triton kernels, where Triton is installed; off: torch's own"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_running_samples: int = Field(default=32, ge=1)
    kv_cache_mb: float | None = Field(default=None, gt=0.0)
    "keys and values of all running samples; beyond, the shortest wait. None: room for every slot at full length"
    turn_cache_mb: float = Field(default=256.0, ge=0.0)
    """host memory for caches that wait for an episode's next turn; they yield to running samples where kv_cache_mb is
    short, and what was given up is computed again"""
    max_prefill_tokens: int = Field(default=512, ge=4)
    "prompt tokens in one prefill forward; 8192 by default where instances have GPUs"
    num_threads: int = Field(default=1, ge=1, le=MAX_THREADS)
    graph_memory_mb: int = Field(default=1024, ge=0)
    "CUDA: what recorded decode steps (CUDA graphs) may hold, and forwards of each model; 0: none are recorded"
    probe: bool = True
    "prove batch invariance for this model, dtype and device at start-up"


def _how_far_ahead(given: object) -> str | int:
    """Check `rollout.look_ahead`; `off` in YAML is false."""
    if given is False:
        return "off"
    if given in ("off", "auto") or (isinstance(given, int) and given is not True and given >= 1):
        return given  # type: ignore[return-value]
    raise ValueError(f"expected off, auto or a whole number from 1 on, got {given!r}")


class RolloutConfig(Section):
    """How many responses an iteration generates and how stale they may be."""

    prompts_per_iteration: int = Field(default=32, ge=1)
    samples_per_prompt: int = Field(default=1, ge=1)
    max_staleness: int = Field(default=0, ge=0, le=8)
    "weight versions between a token and the update that learns from it, at most; 0: generation and update take turns"
    weight_load: Literal["reprefill", "drain"] = "reprefill"
    """max_staleness above 0; reprefill: responses are cut where a new version comes, and go on from it with caches that
    it has computed anew; drain: a response is of one version, one behind its update at most"""
    schedule: Literal["recorded", "free"] = "recorded"
    """max_staleness above 0; recorded: what decodes from which version follows from counts of tokens, and two runs are
    equal; free: a version is taken when it is there, at whatever token a response has reached"""
    look_ahead: Annotated[Literal["off", "auto"] | int | bool, BeforeValidator(_how_far_ahead)] = "off"
    """max_staleness 0: free slots, those beside the update too, begin the next batch under the weights that there are;
    what comes of it is a draft for the same samples under the new ones. auto: where that is predicted to pay; a number:
    so many samples of each instance at most, whatever is predicted"""
    over_provisioning: float | None = Field(default=None, gt=0.0, le=8.0)
    """schedule free: batches of prompts that run beyond the next update's, 1 by default; those that end first are
    learned from, none later than max_staleness allows"""
    record: UserPath | None = None
    """folder of an earlier run, which is only read: its responses are taken over while its weights were this run's, and
    are drafts for those of the same keys from there on; `train --rollouts` sets it"""


def require_known_batches(rollout: RolloutConfig, *, environment: str | None, dynamic_sampling: bool) -> None:
    """Raise ValueError where a batch has to be known beforehand and is not."""
    wishes = (("look_ahead", rollout.look_ahead != "off"), ("record", rollout.record is not None))
    others = (
        (f"environment.kind {environment}", environment is not None),
        (f"rollout.max_staleness {rollout.max_staleness}", rollout.max_staleness > 0),
        ("algorithm.dynamic_sampling", dynamic_sampling),
    )
    for name, other in (
        (name, other) for name, wanted in wishes for other, is_set in others if wanted and is_set
    ):
        raise ValueError(
            f"rollout.{name} takes whole responses of batches that are known beforehand, in turns, and goes with no "
            f"{other}; take one of them out"
        )


def require_schedule(rollout: RolloutConfig, *, environment: str | None) -> None:
    """Raise ValueError for settings of a schedule that would have no effect, or cut an environment's turns."""
    cuts = (rollout.schedule, rollout.weight_load) != ("recorded", "drain")
    if rollout.max_staleness and environment is not None and cuts:
        raise ValueError(
            f"rollout.schedule {rollout.schedule} with weight_load {rollout.weight_load} cuts responses where a new "
            f"version comes, and turns of environment.kind {environment} end elsewhere; set schedule: recorded and "
            "weight_load: drain"
        )
    if rollout.schedule == "recorded":
        if rollout.over_provisioning is not None:
            raise ValueError(
                f"rollout.over_provisioning is {rollout.over_provisioning:g} and rollout.schedule recorded, which "
                "fixes beforehand which samples make a batch; set schedule: free and max_staleness to 1 or more, or "
                "take over_provisioning out"
            )
        return
    if not rollout.max_staleness:
        raise ValueError(
            "rollout.schedule is free and rollout.max_staleness 0, so that no sample may meet a second version; set "
            "max_staleness to 1 or more, or take schedule out"
        )
    if rollout.weight_load == "drain":
        raise ValueError(
            "rollout.schedule is free and rollout.weight_load drain, which cuts no response where a version comes; set "
            "weight_load to reprefill, or schedule to recorded"
        )
    if rollout.over_provisioning is not None and rollout.over_provisioning > rollout.max_staleness:
        raise ValueError(
            f"rollout.over_provisioning is {rollout.over_provisioning:g} and rollout.max_staleness "
            f"{rollout.max_staleness}: only as many batches may run beyond the next update's; lower it, or raise "
            "max_staleness"
        )


class ReallocationConfig(Section):
    """How samples are bound to instances, and which unfinished ones move between them."""

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
