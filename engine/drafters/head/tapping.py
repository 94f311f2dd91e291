"""Taps the target's hidden states for a draft head, and for who records what it learns from."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ....core.errors import ModelError
from ...engine import Engine
from ...model.hidden_taps import HiddenTaps
from ...model.runner import ModelRunner
from .feature_recorder import FeatureRecorder


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


def record_features(
    engine: Engine, tapped_layers: Sequence[int], *, max_bytes: int, dtype: torch.dtype = torch.bfloat16
) -> FeatureRecorder:
    """Record what the engine's samples give a head of these taps to learn from, from now on.

    `max_bytes` and `dtype` as of `FeatureRecorder`; raises ModelError as `tap_for_head`.
    """
    taps = tap_for_head(
        engine.runner,
        tapped_layers,
        max_prefill_tokens=engine.max_prefill_tokens,
        max_total_tokens=engine.max_total_tokens,
    )
    recorder = FeatureRecorder(
        num_taps=len(tapped_layers),
        hidden_size=int(engine.runner.model.config.get_text_config().hidden_size),
        max_bytes=max_bytes,
        dtype=dtype,
    )
    taps.followers.append(recorder)
    return recorder
