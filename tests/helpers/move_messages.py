"""Hand-made messages of one move, for tests of the machines."""

from __future__ import annotations

import numpy as np

from rlhfspec.core.records import (
    Completion,
    FinishReason,
    Prompt,
    SampleKey,
    SampleRequest,
    SamplingParams,
    WeightSpan,
)
from rlhfspec.core.sample_state import SampleState
from rlhfspec.policies.migration.move_messages import (
    Cancel,
    Claim,
    HandOver,
    Landed,
    MoveOrder,
    MoveReport,
    Prepare,
    Ready,
    Received,
    Refused,
    Settle,
    Shipped,
    Verdict,
)
from rlhfspec.policies.reallocation.pool_records import Move, MoveMode

KEY = SampleKey(run_seed=0, sample_index=7)


def order(mode: MoveMode = MoveMode.MIGRATE, *, epoch: int = 0, move_id: str = "0-0") -> MoveOrder:
    return MoveOrder(move_id=move_id, key=KEY, epoch=epoch, source="a", destination="b", mode=mode)


def prepare(mode: MoveMode = MoveMode.MIGRATE) -> Prepare:
    return Prepare(
        order=order(mode),
        weight_version=0,
        drafter_version=0,
        most_tokens=8,
        cached_tokens={"target": 4},
        token_bytes={"target": 8},
        frame_bytes=16,
    )


def hand_over(mode: MoveMode = MoveMode.MIGRATE) -> HandOver:
    prompt = Prompt(prompt_id=0, token_ids=np.arange(3))
    asked = SampleRequest(key=KEY, prompt=prompt, sampling=SamplingParams())
    return HandOver(order=order(mode), state=SampleState.fresh(asked), drafter_version=0, left_at_s=0.0)


READY = Ready(move_id="0-0", ticket="ticket")
REFUSED = Refused(move_id="0-0", reason="no free slot")
LANDED = Landed(move_id="0-0")
CANCEL = Cancel(move_id="0-0", reason="finished before it left")
SHIPPED = Shipped(move_id="0-0")
SHIPPING_FAILED = Shipped(move_id="0-0", error="the wire broke")
RECEIVED = Received(move_id="0-0")
RECEIVING_FAILED = Received(move_id="0-0", error="a damaged frame")


def settle(verdict: Verdict, epoch: int = 1) -> Settle:
    return Settle(move_id="0-0", key=KEY, verdict=verdict, epoch=epoch)


def report(
    claim: Claim, *, epoch: int = 0, move_id: str = "0-0", key: SampleKey = KEY, source="a", destination="b"
) -> MoveReport:
    return MoveReport(
        claim=claim,
        move_id=move_id,
        key=key,
        epoch=epoch,
        source=source,
        destination=destination,
        reason="test",
    )


def move(key: SampleKey = KEY, source: str = "a", destination: str = "b") -> Move:
    return Move(
        key=key, source=source, destination=destination, mode=MoveMode.MIGRATE, gain_s=0.0, reason="test"
    )


def request(index: int) -> SampleRequest:
    prompt = Prompt(prompt_id=index, token_ids=np.arange(index % 5 + 1))
    return SampleRequest(
        key=SampleKey(run_seed=0, sample_index=index), prompt=prompt, sampling=SamplingParams()
    )


def complete(asked: SampleRequest, instance: str, *, token: int | None = None) -> Completion:
    """The rollout as a pure function of the key; `token` plants a difference."""
    index = asked.key.sample_index
    tokens = np.arange(index, index + 3)
    if token is not None:
        tokens[-1] = token
    logprobs = -np.ones(3, dtype=np.float32) * (1 + index)
    return Completion(
        key=asked.key,
        prompt_id=asked.prompt.prompt_id,
        group_id=asked.group_id,
        epoch=asked.epoch,
        token_ids=tokens,
        policy_logprobs=logprobs,
        sampling_logprobs=logprobs,
        finish_reason=FinishReason.STOP,
        weight_spans=(WeightSpan(weight_version=0, first_position=0),),
        instance=instance,
        num_decode_steps=3,
        num_accepted_tokens=0,
    )
