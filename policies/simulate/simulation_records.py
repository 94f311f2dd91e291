"""What is simulated, and what comes out."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from rlhfspec.core.records import (
    Completion,
    FinishReason,
    Prompt,
    SampleKey,
    SampleRequest,
    SamplingParams,
    Stream,
)
from rlhfspec.policies.reallocation.gate import Gate, GateMode
from rlhfspec.policies.reallocation.rate_curve import RateCurve
from rlhfspec.policies.scaling.scaling_records import Resize
from rlhfspec.policies.simulate.simulated_instance import SharedMachine
from rlhfspec.profiles.transfer import PrefillModel, TransferModel

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
    def context_tokens(self) -> np.ndarray:
        """[n] tokens of each sample at its end."""
        return self.prompt_tokens + self.response_tokens


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
    "of an instance while no other has work: instances of one machine share it; None: as ever"
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
    learner_s: float = 0.0
    "seconds of the update beside the rollout, where nothing else is busy"


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
            prompt=Prompt(prompt_id=number, token_ids=_unread_tokens(tokens)),
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
        token_ids=_unread_tokens(num_tokens),
        policy_logprobs=none,
        sampling_logprobs=none,
        finish_reason=FinishReason.STOP,
        weight_spans=(),
        instance=instance,
        num_decode_steps=0,
        num_accepted_tokens=0,
    )


def _unread_tokens(count: int) -> np.ndarray:
    """So many tokens that nobody reads: they take no memory."""
    return np.broadcast_to(np.int8(0), count)
