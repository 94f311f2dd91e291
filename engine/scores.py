"""Log-probabilities of tokens that are there already, and of the likeliest beside them: by the forward that samples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..core.records import Scores
from ..core.sample_state import SampleState
from .decoding.logprobs import log_softmax
from .decoding.sampling_rule import RowSampling, kept_tokens, scale
from .model.prefill import prefill_packs
from .model.prefill_plan import PrefillPiece, PrefillPlan, packed_inputs
from .model.runner import ModelRunner
from .upload import upload

_LOGITS = 1 << 24
"Of one forward: 64 MiB of float32."


def score(runner: ModelRunner, state: SampleState, slot: int, *, max_tokens: int) -> Scores:
    """Score a sample's tokens in a slot whose memory is there; `max_tokens` in one forward. See `Scores`.

    With invariant numerics the values are the sampler's, bit for bit.
    """
    request, count = state.request, state.request.num_top or 0
    prompt = request.prompt.token_ids
    tokens = np.concatenate([prompt, state.token_ids])
    # a greedy response is valued as the model values it
    sampled = RowSampling.of([request.sampling], runner.device)
    models_own = RowSampling.of([replace(request.sampling, temperature=0.0)], runner.device)
    found: list[list[np.ndarray]] = [[], [], []]
    whole = PrefillPiece(slot=slot, start=0, length=len(tokens) - 1)
    for pack in prefill_packs([whole], max(1, min(max_tokens, _LOGITS // runner.vocab_size))):
        (piece,) = pack
        inputs = packed_inputs({slot: tokens}, pack)  # type: ignore[arg-type]  # read by slot alone
        targets = tokens[piece.start + 1 : piece.start + 1 + piece.length]
        ids, positions, wanted = upload([*inputs, targets], runner.device)
        plan = PrefillPlan(pool=runner.pool, attention=runner.attention, pieces=pack)
        logits = runner.logits(ids, positions, plan)
        begin = min(max(len(prompt) - 1 - piece.start, 0), piece.length)
        for rows, part in ((models_own, slice(begin)), (sampled, slice(begin, None))):
            if not len(wanted[part]):
                continue
            scaled = scale(logits[None, part], rows)
            if rows.any_filter:
                scaled = scaled.masked_fill(~kept_tokens(scaled, rows), float("-inf"))
            values = log_softmax(scaled[0])
            best, best_ids = values.topk(min(count, runner.vocab_size), dim=-1)
            for held, part_of_it in zip(
                found, (values.gather(-1, wanted[part][:, None])[:, 0], best_ids, best), strict=True
            ):
                held.append(part_of_it.cpu().numpy())
    none = (np.zeros(0, np.float32), np.zeros((0, count), np.int64), np.zeros((0, count), np.float32))
    own, top_ids, top = (np.concatenate([empty, *held]) for empty, held in zip(none, found, strict=True))
    return Scores(logprobs=own, top_ids=top_ids, top_logprobs=top, weight_version=state.weight_version)
