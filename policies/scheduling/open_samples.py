"""What the scheduler keeps of samples: enough to generate any open one again anywhere."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

from ...core.records import Completion, FinishReason, SampleRequest


@dataclass(slots=True)
class OpenSample:
    """One line of the log of open samples."""

    arrival: int
    request: SampleRequest
    "its epoch is the current one"
    first_epoch: int = 0
    "under which it was asked for; what has a lower one is of an earlier time that it was asked for"
    owner: str | None = None
    num_tokens: int = 0
    "of its response at the last poll"
    was_moved: bool = False
    "a move of it was ordered: a copy may exist under the epoch after the current one"
    taken_back: str = ""
    "the move whose take-back gave the owner its epoch"
    stale: list[tuple[int, str, str]] = field(default_factory=list)
    "(epoch, instance, digest) of reports that came too late to be accepted, to be compared"
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.request.prompt.token_ids)


def is_whole(request: SampleRequest, completion: Completion) -> bool:
    """Whether a completion is not one that goes on later."""
    if completion.finish_reason is FinishReason.CUT:
        return False
    return not (request.is_cut_at_limit and completion.finish_reason is FinishReason.LENGTH)


def digest(completion: Completion) -> str:
    """Hex digest of what must not depend on where or under which plan a sample was generated.

    Empty where it was cut: how far it got does depend on them.
    """
    if completion.finish_reason is FinishReason.CUT:
        return ""
    state = hashlib.blake2b(str(completion.finish_reason).encode(), digest_size=16)
    for array in (completion.token_ids, completion.policy_logprobs, completion.sampling_logprobs):
        state.update(np.ascontiguousarray(array).tobytes())
        state.update(b"|")
    return state.hexdigest()
