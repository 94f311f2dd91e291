"""What an engine can sample: checked before a request is queued, so that a bad one touches no other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from ..core.errors import DataError
from ..core.records import SampleKey, SampleRequest, Stream
from ..core.sample_state import SampleState


def require_can_be_sampled(request: SampleRequest, *, vocab_size: int, max_total_tokens: int) -> None:
    """Raise DataError unless prompt, stop tokens and key are ones that the model knows and the cache has room for."""
    number = request.prompt.prompt_id
    try:
        ids = np.asarray(request.prompt.token_ids)
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(f"prompt {number}: expected token_ids as one row of integers: {error}") from error
    if ids.ndim != 1 or not len(ids) or ids.dtype.kind not in "iu":
        raise DataError(
            f"prompt {number}: expected token_ids as one row of integers, at least one, got {ids.dtype} of shape "
            f"{list(ids.shape)}; tokenize the prompt without padding or a batch dimension"
        )
    for what, tokens in (("token ids", ids), ("stop token ids", np.array(request.sampling.stop_token_ids))):
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
            wrong = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
            raise DataError(
                f"prompt {number}: expected {what} from 0 to {vocab_size - 1}, the model's vocabulary, got {wrong}; "
                "use the model's own tokenizer"
            )
    if len(ids) + request.sampling.max_new_tokens > max_total_tokens:
        raise DataError(
            f"prompt {number}: {len(ids)} prompt tokens and up to {request.sampling.max_new_tokens} new ones do not "
            f"fit {max_total_tokens} tokens of context; shorten the prompt or lower sampling.max_new_tokens"
        )
    require_key(request.key)


def require_can_go_on(state: SampleState, *, vocab_size: int, max_total_tokens: int) -> None:
    """Raise DataError unless the request can be sampled and its response so far is the model's and not at its end."""
    require_can_be_sampled(state.request, vocab_size=vocab_size, max_total_tokens=max_total_tokens)
    ids, sampling = state.token_ids, state.request.sampling
    if not len(ids):
        return
    who = f"sample {state.request.key.sample_index}"
    lengths = {len(ids), len(state.policy_logprobs), len(state.sampling_logprobs)}
    before = state.request.history
    if before is not None and not len(before.token_ids) == len(before.sampled) <= len(ids):
        raise DataError(
            f"{who}: its history has {len(before.token_ids)} tokens, {len(before.sampled)} marks and its response "
            f"{len(ids)} tokens; a response begins with its whole history"
        )
    if len(lengths) > 1 or ids.dtype.kind not in "iu" or not 0 <= ids.min() <= ids.max() < vocab_size:
        raise DataError(
            f"{who}: expected as many log-probabilities as tokens, all from 0 to {vocab_size - 1}; it cannot go on"
        )
    new = ids[len(ids) - state.num_new_tokens :]
    if state.request.num_top is None and (
        len(ids) >= sampling.max_new_tokens or np.isin(new, sampling.stop_token_ids).any()
    ):
        raise DataError(
            f"{who}: its {len(ids)} tokens are a whole response (sampling.max_new_tokens {sampling.max_new_tokens}); "
            "there is nothing to go on with"
        )


def require_key(key: SampleKey) -> None:
    """Raise DataError unless every part of the key is one that the noise tells from all others."""
    for name, value in (("run_seed", key.run_seed), ("sample_index", key.sample_index)):
        whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if not whole or not 0 <= value < 2**64:
            raise DataError(f"a sample's key: expected a {name} from 0 to 2^64 - 1, got {value!r}")
    if not isinstance(key.stream, Stream):
        raise DataError(
            f"a sample's key: expected a stream of rlhfspec.core.records.Stream, got {key.stream!r}"
        )


def require_distinct(requests: Sequence[SampleRequest], others: Sequence[SampleRequest]) -> set[SampleKey]:
    """Return the requests' keys. Raises DataError when two of them, or one and one of the others, share a key."""
    for request in requests:
        require_key(request.key)
    count = Counter(request.key for request in (*others, *requests))
    keys = {request.key for request in requests}
    for key in keys:
        if count[key] > 1:
            raise DataError(
                f"{count[key]} requests have the key of sample {key.sample_index} (seed {key.run_seed}, stream "
                f"{key.stream}); give every sample a sample_index of its own"
            )
    return keys
