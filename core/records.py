"""Records that cross a boundary: what the layers say to each other.

Every record is complete when it is built; a later stage builds a new one. Control records hold no
tensor and no long list; token ids and log-probabilities are numpy arrays on the data records
(`Prompt`, `Completion`, `Rollout`), which travel once and are never rewritten in place.

Words: a *sample* is one prompt's one response in the making; a *decode step* is one target forward
over the running batch; `n` counts draft nodes, the root (last committed token) is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from core.config import SamplingConfig
from core.ranges import require_sampling_ranges


class Stream(StrEnum):
    """Which sequence of sample indices a key belongs to; streams never share noise."""

    TRAIN = "train"
    EVAL = "eval"
    BENCH = "bench"


class FinishReason(StrEnum):
    """Why a response ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleKey:
    """Names one sample for ever: with weights and prompt it determines every token (design 3.1).

    Samples of one key and different prompts share no noise: the prompt takes part in it
    (`engine.decoding.noise.key_words`).
    """

    run_seed: int
    stream: Stream = Stream.TRAIN
    sample_index: int
    "uint64, assigned once by the data cursor, never reused; group members differ."


_SAMPLING = SamplingConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a response is sampled. temperature 0 is greedy; top_k 0 and top_p 1 keep every token.

    Raises ConfigError for a value outside its range.
    """

    temperature: float = _SAMPLING.temperature
    top_k: int = _SAMPLING.top_k
    top_p: float = _SAMPLING.top_p
    max_new_tokens: int = _SAMPLING.max_new_tokens
    stop_token_ids: tuple[int, ...] = _SAMPLING.stop_token_ids

    def __post_init__(self) -> None:
        stops = self.stop_token_ids
        stops = tuple(stops) if isinstance(stops, Iterable) else stops
        require_sampling_ranges(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            max_new_tokens=self.max_new_tokens,
            stop_token_ids=stops,
        )
        # numbers of numpy's narrow types would wrap where they are added up
        for name, value in (
            ("temperature", float(self.temperature)),
            ("top_k", int(self.top_k)),
            ("top_p", float(self.top_p)),
            ("max_new_tokens", int(self.max_new_tokens)),
            ("stop_token_ids", tuple(int(token) for token in stops)),
        ):
            object.__setattr__(self, name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt of the data set, tokenised."""

    prompt_id: int
    "row in the data set"
    token_ids: np.ndarray
    "[T] int64, unpadded"
    text: str = ""
    reference: str = ""
    "what the reward function compares with; may be empty"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One response to be generated. `epoch` grows with every change of owner (migration, re-queue)."""

    key: SampleKey
    prompt: Prompt
    sampling: SamplingParams
    group_id: int = 0
    "samples of one prompt in one iteration share it (GRPO)"
    epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSpan:
    """From `first_position` (index into the response) on, tokens come from `weight_version`."""

    weight_version: int
    first_position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One finished response. Arrays are [T], T the number of response tokens, stop token included."""

    key: SampleKey
    prompt_id: int
    group_id: int
    epoch: int
    token_ids: np.ndarray
    "int64"
    policy_logprobs: np.ndarray
    "float32, log-softmax(logits / T), unfiltered: PPO's old log-probability"
    sampling_logprobs: np.ndarray
    "float32, after top-k and top-p: for truncated importance correction"
    finish_reason: FinishReason
    weight_spans: tuple[WeightSpan, ...]
    instance: str
    num_decode_steps: int
    num_accepted_tokens: int

    @property
    def num_tokens(self) -> int:
        """Number of response tokens."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """What a reward function says of one response."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)
    "named summands or diagnostics, all finite"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A scored response: what the rollout buffer holds."""

    prompt: Prompt
    completion: Completion
    response_text: str
    reward: Reward


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeState:
    """Facts of earlier decode steps that a draft policy may use. No tensor, no wall clock."""

    decode_step: int
    num_samples: int
    context_tokens: int
    "sum over running samples of committed tokens"
    max_remaining_tokens: int
    num_waiting: int = 0
    weight_version: int = 0
    drafter_version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How much to draft and verify in one decode step (design 3.2, phase `plan`).

    `num_nodes` draft nodes per sample are verified; the drafter expands `width` nodes a level for
    `depth` levels and offers `branching` children to each. num_nodes 0 is plain decoding.
    """

    num_nodes: int
    depth: int
    branching: int
    width: int
    reason: str
    refined: bool = False
    "the policy is asked after every level whether to draft another, and at the end which nodes to verify"

    @property
    def is_plain(self) -> bool:
        """True when nothing is drafted."""
        return self.num_nodes == 0


PLAIN = Budget(num_nodes=0, depth=0, branching=0, width=0, reason="plain decoding")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLog:
    """A refined draft: what the policy was shown, what it chose, what the target made of it. C candidates."""

    scores: np.ndarray
    "[B, C] float32: estimated probability that the whole path to the candidate is accepted, level by level"
    level_sizes: tuple[int, ...]
    "candidates of each level; their sum is C"
    num_nodes: np.ndarray
    "[B] candidates verified: the best by score, ties to the earlier"
    num_accepted: np.ndarray
    "[B]"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one decode step saw, decided and did; the policies' food and the replay log's line."""

    state: DecodeState
    budget: Budget
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_rank2_plus: int
    num_emitted_tokens: int
    draft_s: float
    "selection included"
    verify_s: float
    accept_s: float
    other_s: float
    select_s: float = 0.0
    "of these seconds, those spent on choosing: plan, scores, search, bookkeeping"
    draft: DraftLog | None = None
    "of a refined budget that drafted"

    @property
    def decode_step(self) -> int:
        """Number of the decode step since the engine was built."""
        return self.state.decode_step

    @property
    def num_samples(self) -> int:
        """B."""
        return self.state.num_samples

    @property
    def context_tokens(self) -> int:
        """Committed tokens of the batch before the step."""
        return self.state.context_tokens

    @property
    def step_s(self) -> float:
        """Seconds of the whole decode step."""
        return self.draft_s + self.verify_s + self.accept_s + self.other_s


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStats:
    """Sums over decode steps; ratios are derived late. Add two with `+`."""

    num_decode_steps: int = 0
    num_sample_steps: int = 0
    "sum over decode steps of the samples in them"
    num_prefill_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_rank2_plus: int = 0
    num_emitted_tokens: int = 0
    num_completions: int = 0
    num_preemptions: int = 0
    "running samples that had to wait because the caches were full"
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    accept_s: float = 0.0
    other_s: float = 0.0
    select_s: float = 0.0
    "contained in the others"
    move_s: float = 0.0
    "seconds the decode thread gave to moving samples, between decode steps"
    publish_s: float = 0.0
    "seconds it gave to telling the scheduler what it does"

    def __add__(self, other: GenerationStats) -> GenerationStats:
        names = self.__dataclass_fields__
        return GenerationStats(**{n: getattr(self, n) + getattr(other, n) for n in names})

    def __sub__(self, other: GenerationStats) -> GenerationStats:
        names = self.__dataclass_fields__
        return GenerationStats(**{n: getattr(self, n) - getattr(other, n) for n in names})

    @property
    def acceptance_rate(self) -> float:
        """Accepted / verified draft tokens; 0 when nothing was drafted."""
        return self.num_accepted_tokens / max(self.num_draft_tokens, 1)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per sample and decode step, the bonus token included."""
        return self.num_emitted_tokens / max(self.num_sample_steps, 1)

    @property
    def busy_s(self) -> float:
        """Seconds spent in prefill and decode steps."""
        return self.prefill_s + self.draft_s + self.verify_s + self.accept_s + self.other_s


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceLoad:
    """One instance's workload as the scheduler polls it."""

    instance: str
    num_running: int
    num_waiting: int
    num_free_slots: int
    context_tokens: int
    weight_version: int
    drafter_version: int
    decode_step: int
    goodput_tokens_per_s: float
    stats: GenerationStats
    goodput_samples: float = 0.0
    "samples that ran while goodput was measured, in the mean"
    num_slots: int | None = None
    "slots that can be used now: all, or those the caches have room for; None: not known"
    drafter_alarm: str = ""
    "why drafting was suspended here last, with the drafter's checksum, version and age; empty when it never was"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Where one tensor lies in the published byte stream."""

    name: str
    dtype: str
    "torch name without the prefix, such as float32"
    shape: tuple[int, ...]
    offset_bytes: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """Describes one published version of one model; the chunks (uint8 arrays) travel beside it."""

    model: str
    "'target' or 'draft'"
    weight_version: int
    checksum: str
    "hex digest over all bytes in order"
    num_bytes: int
    chunk_num_bytes: tuple[int, ...]
    chunk_checksums: tuple[str, ...]
    tensors: tuple[TensorSpec, ...]
    hf_config_json: str
    "the model's Hugging Face config: an instance builds the module from it"
    schema_version: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """What one learner update did. Every figure is finite."""

    weight_version: int
    num_samples: int
    num_tokens: int
    num_optimizer_steps: int
    figures: dict[str, float]
    "policy_loss, value_loss, entropy, approx_kl, clip_fraction, grad_norm, ..."


def record_to_dict(record: Any) -> dict[str, Any]:
    """Turn a control record into plain JSON-able values; enums become strings.

    Raises TypeError, naming the field, when the record holds an array: arrays travel beside.
    """
    out: dict[str, Any] = {}
    for name in record.__dataclass_fields__:
        value = getattr(record, name)
        if isinstance(value, np.ndarray):
            raise TypeError(f"{type(record).__name__}.{name} is an array; control records carry none")
        out[name] = _plain(value)
    return out


def _plain(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        return record_to_dict(value)
    if isinstance(value, StrEnum):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value
