"""A sample between two decode steps: all that another instance needs to go on with it, caches aside."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .records import NOTHING, SampleRequest, WeightSpan, so_far


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleState:
    """An unfinished response. Under equal weights any instance continues it to the same tokens (design 3.1)."""

    request: SampleRequest
    weight_version: int
    "of the target model that chose the tokens"
    token_ids: np.ndarray
    "int64 [T], the response so far"
    policy_logprobs: np.ndarray
    "float32 [T]"
    sampling_logprobs: np.ndarray
    "float32 [T]"
    num_decode_steps: int = 0
    num_accepted_tokens: int = 0
    weight_spans: tuple[WeightSpan, ...] = ()
    "of the tokens so far, and of who goes on; empty before an engine has taken the sample up"
    draft_depths: np.ndarray | None = None
    "uint8 [T], as of a completion; None: not known, counted as not drafted"

    @staticmethod
    def fresh(request: SampleRequest, *, weight_version: int = 0) -> SampleState:
        """A sample, or a turn of an episode, of which nothing has been generated yet."""
        before = so_far(request.history or NOTHING)
        return SampleState(request=request, weight_version=weight_version, **before)

    @staticmethod
    def taken_up(spans: tuple[WeightSpan, ...], position: int, weight_version: int) -> tuple[WeightSpan, ...]:
        """Return the spans of a response that an engine of a version goes on with from a position."""
        if spans and spans[-1].weight_version == weight_version:
            return spans
        # what nothing was sampled from since it was taken up the last time does not count
        before = tuple(span for span in spans if span.first_position < position)
        span = WeightSpan(weight_version=weight_version, first_position=position if before else 0)
        return (*before, span)

    @property
    def num_new_tokens(self) -> int:
        """Tokens that this turn has sampled so far."""
        return len(self.token_ids) - (len(self.request.history.token_ids) if self.request.history else 0)

    @property
    def num_committed_tokens(self) -> int:
        """Tokens of prompt and response; the last one, the root, is in no cache."""
        return len(self.request.prompt.token_ids) + len(self.token_ids)
