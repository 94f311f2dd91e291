"""A sample between two decode steps: all that another instance needs to go on with it, caches aside."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from core.records import SampleRequest


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

    @staticmethod
    def fresh(request: SampleRequest, *, weight_version: int = 0) -> SampleState:
        """A sample of which nothing has been generated yet."""
        return SampleState(
            request=request,
            weight_version=weight_version,
            token_ids=np.zeros(0, dtype=np.int64),
            policy_logprobs=np.zeros(0, dtype=np.float32),
            sampling_logprobs=np.zeros(0, dtype=np.float32),
        )

    @property
    def num_committed_tokens(self) -> int:
        """Tokens of prompt and response; the last one, the root, is in no cache."""
        return len(self.request.prompt.token_ids) + len(self.token_ids)
