"""How a sample ends: as a completion, or because its logits are not finite."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..core.errors import NotFiniteError
from ..core.records import Completion, FinishReason, as_asked
from ..core.sample_state import SampleState


def completion_of(
    state: SampleState, *, instance: str, has_stopped: bool = False, is_cut: bool = False
) -> Completion:
    """Return the completion of a sample that has its last token, or is cut before it."""
    request = state.request
    if is_cut and not state.num_new_tokens:
        return as_asked(request)
    ended = FinishReason.STOP if has_stopped else FinishReason.LENGTH
    return Completion(
        key=request.key,
        prompt_id=request.prompt.prompt_id,
        group_id=request.group_id,
        epoch=request.epoch,
        token_ids=state.token_ids,
        policy_logprobs=state.policy_logprobs,
        sampling_logprobs=state.sampling_logprobs,
        finish_reason=FinishReason.CUT if is_cut else ended,
        weight_spans=state.weight_spans,
        instance=instance,
        num_decode_steps=state.num_decode_steps,
        num_accepted_tokens=state.num_accepted_tokens,
        sampled=None
        if request.history is None
        else np.concatenate([request.history.sampled, np.ones(state.num_new_tokens, dtype=bool)]),
        draft_depths=state.draft_depths,
    )


def where_not_finite(state: SampleState) -> str:
    """Name a sample and its first token that has no finite log-probability."""
    request = state.request
    finite = np.isfinite(state.policy_logprobs) & np.isfinite(state.sampling_logprobs)
    wrong = int(np.nonzero(~finite)[0][0])
    before = np.concatenate([request.prompt.token_ids, state.token_ids[:wrong]])
    return (
        f"sample {request.key.sample_index} (prompt {request.prompt.prompt_id}, seed {request.key.run_seed}) at "
        f"response token {wrong}, behind token id {before[-1]}"
    )


def not_finite_error(samples: Sequence[str], *, instance: str, weight_version: int) -> NotFiniteError:
    """Return the error for samples whose logits are NaN, +inf, or -inf throughout."""
    return NotFiniteError(
        f"logits are not finite with weight version {weight_version} on instance {instance}: {'; '.join(samples)}; "
        "look for weights that diverged (trainer.learning_rate) or overflow in models.dtype"
    )
