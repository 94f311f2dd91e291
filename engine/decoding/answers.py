"""What the target answers at every node of a draft: its token by the sampling rule, and log-probabilities."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from .noise import Noise
from .sampling_rule import RowSampling, choose, emitted_logprobs, kept_tokens, scale
from .verify import Verdict


@runtime_checkable
class Answers(Protocol):
    """The target's token at every node, root first, and what is emitted of them."""

    token_ids: Int[Tensor, "B n"]

    def logprobs(self, verdict: Verdict, *, is_chain: bool) -> tuple[Tensor, Tensor]:
        """Return policy and sampling log-probabilities of a verdict's tokens, [B, D] each."""
        ...


class WholeAnswers:
    """From logits of the whole vocabulary."""

    def __init__(
        self, logits: Float[Tensor, "B n V"], noise: Noise, levels: Int[Tensor, "B n"], rows: RowSampling
    ) -> None:
        """A node's noise is that of its level."""
        self._logits, self._rows = logits, rows
        # one sort serves choosing and valuing
        self._kept = kept_tokens(scale(logits, rows), rows) if rows.any_filter else None
        self.token_ids = choose(logits, noise, levels, rows, self._kept)

    def logprobs(self, verdict: Verdict, *, is_chain: bool) -> tuple[Tensor, Tensor]:
        """See `Answers.logprobs`."""
        logits, kept = self._logits, self._kept
        if not is_chain:
            # only what is emitted is scaled and valued
            path = verdict.path[..., None].expand(-1, -1, logits.shape[-1])
            logits, kept = logits.gather(1, path), None if kept is None else kept.gather(1, path)
        return emitted_logprobs(scale(logits, self._rows), verdict.token_ids, self._rows, kept)
