"""Records that cross a boundary: what the layers say to each other.

Every record is complete when it is built; a later stage builds a new one. Control records hold no
tensor and no long list; token ids and log-probabilities are numpy arrays on the data records
(`Prompt`, `Completion`, `Rollout`), which travel once and are never rewritten in place.

Words: a *sample* is one prompt's one response in the making; a *decode step* is one target forward
over the running batch; `n` counts draft nodes, the root (last committed token) is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

import numpy as np

from .config import SamplingConfig
from .ranges import require_sampling_ranges


class Stream(StrEnum):
    """Which sequence of sample indices a key belongs to; streams never share noise."""

    TRAIN = "train"
    EVAL = "eval"
    BENCH = "bench"


class FinishReason(StrEnum):
    """Why a response ended."""

    STOP = "stop"
    LENGTH = "length"
    CUT = "cut"
    "where decoding had got to, to go on later: no whole response"


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
    turn: int = 0
    """of an episode with an environment. Turns share the sample's noise: positions count through the whole conversation
    and none is sampled twice."""

    def __hash__(self) -> int:
        return hash((self.sample_index, self.turn))

    @property
    def sample(self) -> SampleKey:
        """The key of the whole sample, whichever turn this is."""
        return replace(self, turn=0) if self.turn else self


ATTEMPT_EPOCH = -1
"Of attempts, which no one owns: `SampleRequest.is_attempt`."
EPOCHS_OF_A_ROUND = 1024
"Epochs apart that a sample is asked for again (with other weights): more owners than it may have in one asking."


def next_round(epoch: int) -> int:
    """The first epoch under which a sample may be asked for again that was delivered under `epoch`; 0 for -1."""
    return (epoch // EPOCHS_OF_A_ROUND + 1) * EPOCHS_OF_A_ROUND


_SAMPLING = SamplingConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a response is sampled. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 keep every token.

    Raises ConfigError for a value outside its range.
    """

    temperature: float = _SAMPLING.temperature
    top_k: int = _SAMPLING.top_k
    top_p: float = _SAMPLING.top_p
    min_p: float = _SAMPLING.min_p
    max_new_tokens: int = _SAMPLING.max_new_tokens
    stop_token_ids: tuple[int, ...] = _SAMPLING.stop_token_ids
    stop: tuple[str, ...] = _SAMPLING.stop
    "texts; what decodes must have been told of the tokenizer (`Engine.stop_strings`)"

    def __post_init__(self) -> None:
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        if isinstance(self.stop, str):
            given["stop"] = (self.stop,)
        if isinstance(self.stop_token_ids, Iterable):
            given["stop_token_ids"] = tuple(self.stop_token_ids)
        require_sampling_ranges(**given)
        # numbers of numpy's narrow types would wrap where they are added up
        given["stop_token_ids"] = map(int, given["stop_token_ids"])
        for name, value in given.items():
            object.__setattr__(self, name, type(getattr(_SAMPLING, name))(value))

    @property
    def filters(self) -> bool:
        """Whether some tokens may never be drawn."""
        return self.temperature > 0.0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt of the data set, tokenised."""

    prompt_id: int
    "row in the data set"
    token_ids: np.ndarray
    "[T] int64, unpadded"
    text: str = ""
    "to be read: the data set's text, or the turns of a conversation"
    reference: str = ""
    "what the reward function compares with; may be empty"
    messages: tuple[tuple[str, str], ...] = ()
    "(role, content) of the turns the chat template was given; empty for plain text"
    turns: tuple[Mapping[str, Any], ...] = ()
    "the same whole, where they hold more (tool_calls, reasoning_content, name); empty: `messages` say all"
    tools: tuple[Mapping[str, Any], ...] = ()
    "that the chat template was told of (data.tools_field)"
    fields: dict[str, Any] = field(default_factory=dict)
    "further columns for reward functions (data.reward_fields), JSON values"
    rendered: str = ""
    "the text that the policy reads in the place of `text`, where data.prompt_template made another of it"
    prefill: str = ""
    "what the prompt begins the assistant's turn with, such as `<think>`; the response goes on behind it"
    teacher_ids: tuple[int, ...] = ()
    "token ids that a teacher reads in the prompt's place (data.teacher_prompt_template); empty: the same"

    @property
    def conversation(self) -> tuple[Mapping[str, Any], ...]:
        """The turns whole, as a chat template takes them."""
        return self.turns or tuple({"role": role, "content": content} for role, content in self.messages)

    @property
    def read_text(self) -> str:
        """What policy and reward model read where there are no messages."""
        return self.rendered or self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSpan:
    """From `first_position` (index into the response) on, tokens come from `weight_version`."""

    weight_version: int
    first_position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """An episode's response before a turn begins. Arrays are [T]; what was not sampled is the environment's."""

    token_ids: np.ndarray
    "int64"
    sampled: np.ndarray
    "bool; False: given by the environment, and without log-probability"
    policy_logprobs: np.ndarray
    "float32, 0 where not sampled"
    sampling_logprobs: np.ndarray
    "float32, 0 where not sampled"
    num_decode_steps: int = 0
    num_accepted_tokens: int = 0
    instance: str = ""
    "that ended the turn before: it may still hold the caches"
    weight_spans: tuple[WeightSpan, ...] = ()
    "what its tokens come of, where that may not be the version that goes on"
    draft_depths: np.ndarray | None = None
    "as of a completion"


NOTHING = History(
    token_ids=np.zeros(0, dtype=np.int64),
    sampled=np.zeros(0, dtype=bool),
    policy_logprobs=np.zeros(0, dtype=np.float32),
    sampling_logprobs=np.zeros(0, dtype=np.float32),
)
"Before a first turn."
_SO_FAR = "token_ids policy_logprobs sampling_logprobs num_decode_steps num_accepted_tokens weight_spans draft_depths"


def so_far(record: History | Completion) -> dict[str, Any]:
    """What all records of a response in the making say of it, by name."""
    return {name: getattr(record, name) for name in _SO_FAR.split()}


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One response to be generated. `epoch` grows with every change of owner (migration, re-queue)."""

    key: SampleKey
    prompt: Prompt
    sampling: SamplingParams
    group_id: int = 0
    "samples of one prompt in one iteration share it (GRPO)"
    epoch: int = 0
    history: History | None = None
    "what the response begins with: earlier turns; sampling.max_new_tokens counts it too"
    keeps_caches: bool = False
    "an environment answers, and another turn may follow: caches wait where there is room"
    is_cut_at_limit: bool = False
    "a response of sampling.max_new_tokens tokens goes on later"
    draft: np.ndarray | None = field(default=None, compare=False)
    """int64 [T]: a response that other weights gave under this key, proposed to the verification from its beginning.
    It changes no token"""
    num_top: int | None = None
    "nothing is sampled: what is there is scored, with so many of the likeliest tokens (`Completion.scores`)"
    is_attempt: bool = False
    "made ahead, under the weights that there are: a draft for the sample of this key, which yields to any other sample"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What a model says of a sample's tokens, prompt and response together, but for the first: T in all.

    In the prompt the model's own distribution; in the response that which was sampled from, greedy ones' the model's.
    """

    logprobs: np.ndarray
    "float32 [T]"
    top_ids: np.ndarray
    "int64 [T, k]: the likeliest first"
    top_logprobs: np.ndarray
    "float32 [T, k]"
    weight_version: int
    "of the model"


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
    "float32, after top-k, min-p and top-p: for truncated importance correction"
    finish_reason: FinishReason
    weight_spans: tuple[WeightSpan, ...]
    instance: str
    num_decode_steps: int
    num_accepted_tokens: int
    sampled: np.ndarray | None = None
    "bool; False: given by an environment, nothing to learn from, its log-probabilities are 0. None: all sampled"
    draft_depths: np.ndarray | None = None
    "uint8: level of the draft tree that an accepted token stood at; 0: not drafted. None: not known"
    scores: Scores | None = None
    "where the request asked for them (`num_top`)"

    @property
    def num_tokens(self) -> int:
        """Number of response tokens."""
        return len(self.token_ids)

    @property
    def num_sampled_tokens(self) -> int:
        """Those that the policy sampled: what figures, penalties and learning count."""
        return int(self.is_sampled.sum())

    @property
    def is_sampled(self) -> np.ndarray:
        """Which response tokens the policy sampled, bool [T]."""
        return np.ones(len(self.token_ids), dtype=bool) if self.sampled is None else self.sampled

    def as_history(self) -> History:
        """Return what a further turn, or the rest of a response that was cut, begins with."""
        return History(sampled=self.is_sampled, instance=self.instance, **so_far(self))


def as_asked(request: SampleRequest) -> Completion:
    """Return what there is of a response of which nothing was sampled since it was asked for."""
    before = request.history or NOTHING
    return Completion(
        key=request.key,
        prompt_id=request.prompt.prompt_id,
        group_id=request.group_id,
        epoch=request.epoch,
        finish_reason=FinishReason.CUT,
        instance=before.instance,
        sampled=before.sampled if request.history else None,
        **so_far(before),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """What a reward function says of one response."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)
    "named summands or diagnostics, all finite"
    tokens: tuple[float, ...] = ()
    "what of `value` is paid where, a number for each sampled token; the rest, of none the whole, on the last one"
    unread: str = field(default="", compare=False)
    "of a judge's answer that could not be read: why; for notes, no file keeps it"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFacts:
    """What a reward may know of a response beside its text."""

    sample_index: int
    num_tokens: int
    "that the policy sampled; the stop token counts"
    finish_reason: FinishReason
    turns: tuple[tuple[str, str], ...] = ()
    "(role, content) of an episode since the prompt, the assistant's last; empty: the response is the only turn"
    num_given_tokens: int = 0
    "that an environment gave; sampling.max_new_tokens counts them too"
    token_ids: tuple[int, ...] = ()
    "of the response, those that were given too"
    weight_version: int = 0
    "that sampled its last token: how many iterations had been learned from"
    group_id: int | None = None
    "that samples of one prompt share; None: nobody knows the others"

    @staticmethod
    def of(completion: Completion) -> ResponseFacts:
        """The facts of a finished response."""
        return ResponseFacts(
            token_ids=tuple(completion.token_ids.tolist()),
            weight_version=completion.weight_spans[-1].weight_version if completion.weight_spans else 0,
            sample_index=completion.key.sample_index,
            num_tokens=completion.num_sampled_tokens,
            finish_reason=completion.finish_reason,
            num_given_tokens=completion.num_tokens - completion.num_sampled_tokens,
            group_id=completion.group_id,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Unscored:
    """A response without a reward, and why: one line that names the sample."""

    reason: str
    is_none: bool = False
    "the function returned None: of an optional part of a mixture that it does not apply"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A scored response: what the rollout buffer holds."""

    prompt: Prompt
    completion: Completion
    response_text: str
    reward: Reward


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """What one learner update did. Every metric is finite."""

    weight_version: int
    num_samples: int
    num_tokens: int
    num_optimizer_steps: int
    metrics: dict[str, float]
    "policy_loss, value_loss, entropy, approx_kl, clip_fraction, grad_norm, ..."
    log_ratio_counts: tuple[int, ...] = ()
    "tokens in each bin of new over old log-probability (`objectives.minibatch_metrics`), over all optimizer steps"
    sample_advantages: tuple[float, ...] | None = None
    "mean advantage of each sample's tokens, in the order of the sample index"
    unmoved: tuple[str, ...] = ()
    "tensors that ought to learn and had no gradient in any step so far"
    part_seconds: dict[str, float] = field(default_factory=dict, compare=False)
    "by part of the update, without gaps"
    cost: dict[str, float] = field(default_factory=dict, compare=False)
    "tokens and packs computed, tokens shared, speed: metrics of the area `update`"
