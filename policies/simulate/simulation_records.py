"""What is simulated, and what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ...core.errors import ConfigError
from ...core.records import (
    Completion,
    FinishReason,
    Prompt,
    SampleKey,
    SampleRequest,
    SamplingParams,
    Stream,
)
from ...profiles.transfer import PrefillModel, TransferModel
from ..reallocation.gate import Gate, GateMode
from ..reallocation.rate_curve import RateCurve
from ..scaling.scaling_records import Resize
from .simulated_instance import SharedMachine

Binding = Literal["static", "pull"]
"static: sample i to instance i mod K, each with a queue of its own; pull: to the one that owns fewest, as slots free"


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The samples of a rollout in their order of arrival; all are there at the start. Arrays are [n]."""

    response_tokens: np.ndarray
    "true lengths, at least 1"
    prompt_tokens: np.ndarray
    speed: np.ndarray
    "tokens of the sample for one of the mean sample: drafts of some are accepted more often"
    group: np.ndarray | None = None
    "whose prompt it shares: computed once where another of the group runs; below 0 or None: nobody's"

    def __len__(self) -> int:
        return len(self.response_tokens)

    @property
    def groups(self) -> np.ndarray:
        """[n] the group of each, below 0 where it is nobody's."""
        return np.full(len(self), -1) if self.group is None else self.group

    @property
    def context_tokens(self) -> np.ndarray:
        """[n] tokens of each sample at its end."""
        return self.prompt_tokens + self.response_tokens


def joined(parts: Sequence[Samples]) -> Samples:
    """All of them in one, in this order; no group is in two of them."""
    groups, first = [], 0
    for part in parts:
        group = part.groups
        groups.append(np.where(group >= 0, group + first, -1))
        first = max(first, int(groups[-1].max(initial=-1)) + 1)
    return Samples(
        response_tokens=np.concatenate([part.response_tokens for part in parts]),
        prompt_tokens=np.concatenate([part.prompt_tokens for part in parts]),
        speed=np.concatenate([part.speed for part in parts]),
        group=np.concatenate(groups),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveTruth:
    """What moves really take."""

    kv_bytes_per_token: float
    transfer: TransferModel = field(default_factory=TransferModel)
    prefill: PrefillModel = field(default_factory=PrefillModel)
    downtime_s: float = 0.0
    "a migrated sample rests between its last decode step here and its first one there"
    bystander_share: float = 0.05
    "decode steps are longer by this share while a transfer of the instance goes on"

    def gate(self, mode: GateMode = "auto") -> Gate:
        """A policy's choice of ways that knows all this beforehand."""
        return Gate(
            kv_bytes_per_token=self.kv_bytes_per_token,
            transfer=deepcopy(self.transfer),
            prefill=deepcopy(self.prefill),
            mode=mode,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Elastic:
    """A pool that may change during the rollout."""

    least: int
    most: int
    start_up_s: float
    idle_timeout_s: float
    rollouts_ahead: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSetup:
    """The instances and how they are looked after."""

    num_instances: int
    "at the start"
    num_slots: int
    "per instance"
    curve: RateCurve
    "with all instances busy"
    max_new_tokens: int
    moves: MoveTruth
    poll_interval_s: float = 0.1
    order_delay_s: float = 0.02
    "from the look at the pool to the start of the moves planned on it"
    alone_curve: RateCurve | None = None
    "of an instance while no other has work: instances of one machine share it; None: the same"
    prompt_token_s: float = 0.0
    "seconds for which an instance computes a prompt token when a sample is bound to it"
    elastic: Elastic | None = None
    "None: the instances stay the same"
    prompt_s: float = 0.0
    "seconds for which it computes any prompt, beside those of the tokens"
    last_step_tokens: float = 0.0
    "of a mean sample, that its last decode step makes beyond its end"
    report_interval_s: float = 0.0
    """an instance tells of ended samples this often at most, and of its last one at once; until it has told, only a
    sample that it has in line takes the slot, a fourth of the slots of them (`policies.scheduling.ledger`)"""
    message_s: float = 0.0
    "of each message between scheduler and instance"
    machine: SharedMachine | None = None
    "that all instances and the trainer share; `curve` is of all instances busy, and no trainer"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """One rollout."""

    finish_s: float
    "when the last sample was done"
    busy_s: np.ndarray
    "[K]"
    num_tokens: int
    num_moves: int
    "moves that were begun"
    num_migrated: int
    num_recomputed: int
    num_void: int
    "migrations whose sample was done before they were"
    instance_s: float = 0.0
    "instances times seconds, from each one's start to its end"
    learner_end_s: float = 0.0
    "when the update beside it was done"
    resizes: tuple[tuple[float, Resize], ...] = ()
    "when the pool was to change, and why"

    @property
    def busy_share(self) -> float:
        """Mean share of the finish time for which an instance was busy."""
        return float(self.busy_s.mean()) / max(self.finish_s, 1e-12)


def requests_of(samples: Samples, max_new_tokens: int) -> list[SampleRequest]:
    """What the scheduler is asked for."""
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    return [
        SampleRequest(
            key=SampleKey(run_seed=0, stream=Stream.BENCH, sample_index=number),
            prompt=Prompt(prompt_id=number, token_ids=unread_tokens(tokens)),
            sampling=sampling,
        )
        for number, tokens in enumerate(samples.prompt_tokens.tolist())
    ]


def completion_of(request: SampleRequest, num_tokens: int, instance: str) -> Completion:
    """A whole response of so many tokens."""
    none = np.zeros(0, dtype=np.float32)
    return Completion(
        key=request.key,
        prompt_id=request.prompt.prompt_id,
        group_id=request.group_id,
        epoch=request.epoch,
        token_ids=unread_tokens(num_tokens),
        policy_logprobs=none,
        sampling_logprobs=none,
        finish_reason=FinishReason.STOP,
        weight_spans=(),
        instance=instance,
        num_decode_steps=0,
        num_accepted_tokens=0,
    )


def unread_tokens(count: int) -> np.ndarray:
    """So many tokens that nobody reads: they take no memory."""
    return np.broadcast_to(np.int8(0), count)


WorkloadName = Literal["balanced", "long_tail", "skewed"]
WORKLOADS: tuple[WorkloadName, ...] = ("balanced", "long_tail", "skewed")

TAIL_SIGMA = 0.8
"Log-normal: the 99th percentile is 6.4 times the median."
TAIL_MEDIAN_SHARE = 1 / 6
"Median as a share of the limit."


def drawn_lengths(
    name: WorkloadName, num_samples: int, num_instances: int, *, max_new_tokens: int, seed: int
) -> np.ndarray:
    """[n] lengths in order of arrival.

    balanced: log-normal, every run of K samples has one length, so that each instance gets the same lengths.
    long_tail: log-normal, independent.
    skewed: log-normal, the longest K-th part of them where static binding gives them all to the first instance.

    Raises ConfigError for an unknown name.
    """
    random = np.random.default_rng(seed)
    drawn = random.lognormal(np.log(TAIL_MEDIAN_SHARE * max_new_tokens), TAIL_SIGMA, num_samples)
    lengths = np.clip(np.rint(drawn), 1, max_new_tokens).astype(np.int64)
    match name:
        case "balanced":
            return np.repeat(lengths, num_instances)[:num_samples]
        case "long_tail":
            return lengths
        case "skewed":
            return skew(lengths, num_instances)
    raise ConfigError(f"no lengths '{name}'; expected one of: {', '.join(WORKLOADS)}")


def skew(lengths: np.ndarray, num_instances: int) -> np.ndarray:
    """Put the longest K-th part of the lengths on every K-th place: static binding gives them to one instance."""
    order = np.sort(lengths)[::-1]
    num_long = -(-len(lengths) // num_instances)
    first = np.arange(len(lengths)) % num_instances == 0
    skewed = np.empty_like(lengths)
    # within each group the order is a fixed shuffle: arrival says nothing of the length
    random = np.random.default_rng(len(lengths))
    skewed[first] = random.permutation(order[:num_long])
    skewed[~first] = random.permutation(order[num_long:])
    return skewed


def samples_of(
    lengths: np.ndarray, *, prompt_tokens: int = 0, speed_sigma: float = 0.0, seed: int = 0
) -> Samples:
    """Samples of these lengths; `speed_sigma` spreads their speeds around 1."""
    random = np.random.default_rng([seed, 1])
    return Samples(
        response_tokens=np.maximum(np.asarray(lengths, dtype=np.int64), 1),
        prompt_tokens=np.full(len(lengths), prompt_tokens, dtype=np.int64),
        speed=np.exp(random.normal(0.0, speed_sigma, len(lengths))),
    )
