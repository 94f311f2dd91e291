"""Taps the target's hidden states for a draft head."""

from __future__ import annotations

from collections.abc import Sequence

from ....core.errors import ModelError
from ...model.hidden_taps import HiddenTaps
from ...model.runner import ModelRunner


def tap_for_head(
    runner: ModelRunner, tapped_layers: Sequence[int], *, max_prefill_tokens: int, max_total_tokens: int
) -> HiddenTaps:
    """Tap the inputs of the head's layers and the last layer's output, once; of prefills where a head drafts from it.

    Raises ModelError: the target has no such layer, or others are tapped already.
    """
    output = runner.pool.shape.num_layers
    from_output = output in tapped_layers
    layers = tuple(tapped_layers) if from_output else (*tapped_layers, output)
    if runner.taps is not None:
        if runner.taps.layers != layers:
            raise ModelError(
                f"hidden states of layers {list(runner.taps.layers)} are set aside already, not of {list(layers)}: "
                "what a head is to learn from must be recorded with the taps of the head that drafts"
            )
        return runner.taps
    pool = runner.pool
    # a root and as many draft nodes as the caches have room for, of every sample
    step_tokens = pool.num_slots * (pool.capacity - max_total_tokens)
    return runner.tap(layers, max_tokens=max(max_prefill_tokens, step_tokens), whole_prefills=from_output)
