"""Where an update's seconds go, part by part, and how much of its device they use."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch

from ...engine.weights.causal_lm import PreTrainedModel
from ...profiles.gpu_sheets import peak_flops_of


class Laps:
    """A running clock: a lap gives a part what passed since the lap before, so all parts together are the whole.

    On a GPU a lap is an event of its stream: nothing waits before `end`.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._marks: list[tuple[str, Any]] | None = None

    def begin(self) -> None:
        """Start anew; laps before the first time are not taken."""
        self._marks = [("", self._mark())]

    def lap(self, part: str) -> None:
        """What has passed since the last lap was `part`."""
        if self._marks is not None:
            self._marks.append((part, self._mark()))

    def end(self) -> dict[str, float]:
        """Seconds of each part, and stop."""
        marks, self._marks = self._marks or [], None
        if self._is_gpu and marks:
            marks[-1][1].synchronize()
        seconds: dict[str, float] = {}
        for (_, before), (part, after) in pairwise(marks):
            spent_s = before.elapsed_time(after) / 1000 if self._is_gpu else after - before
            seconds[part] = seconds.get(part, 0.0) + spent_s
        return seconds

    def _mark(self) -> Any:
        if not self._is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def step_flops(model: PreTrainedModel, num_tokens: int) -> float:
    """Operations of a forward and backward over so many tokens: 6 a weight that multiplies, attention not counted.

    4 where adapters learn; of stacked experts those that a token is sent to. Source: Kaplan et al. 2020, section 2.1.
    """
    parameters = list(model.parameters())
    config, names = model.config.get_text_config(), ("num_experts_per_tok", "moe_topk", "top_k_experts")
    sent_to = next(filter(None, (getattr(config, name, None) for name in names)), None)
    inputs: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    # a look-up multiplies nothing, unless its weights are the head's too
    looked_up = 0 if head is not None and head.weight is inputs.weight else inputs.weight.numel()
    used = sum(x.numel() * (sent_to / len(x) if sent_to and x.ndim > 2 else 1) for x in parameters)
    is_whole = all(one.requires_grad for one in parameters)
    return (6.0 if is_whole else 4.0) * (used - looked_up) * num_tokens


def peak_flops(device: torch.device) -> float | None:
    """bfloat16 operations a second by the device's data sheet; None: no sheet (any CPU)."""
    return peak_flops_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
