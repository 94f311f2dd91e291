"""Seconds of one forward of decoding: weights read or products computed, whichever is longer, caches, links, starts.

forward = max(weights / memory, products / compute) + caches / memory + layers x start + layers x 2 collectives

An instance's GPUs split every matrix (`tensor`: two all-reduces a layer), or each holds everything but the experts,
which they split, and has samples of its own (`expert`: tokens go to their experts and back). What a device does at most
stands in `profiles/gpu_sheets.toml`, with the page of each number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ...core.errors import ConfigError
from ...profiles.gpu_sheets import GPUSheet
from .model_dimensions import ModelDimensions


class ContradictionError(ConfigError):
    """Values that are good each by itself and cannot be together: a sweep goes on with the other combinations."""


def flops_of(sheet: GPUSheet, precision: str) -> float:
    """Operations a second in `bf16` or `fp8`. Raises ContradictionError where the GPU has no such products."""
    if precision == "bf16":
        return sheet.bf16_flops
    if sheet.fp8_flops is None:
        raise ContradictionError(f"model.precision fp8: {sheet.name} multiplies no 8-bit floats; use bf16")
    return sheet.fp8_flops


PRECISION_BYTES = {"bf16": 2.0, "fp8": 1.0}
ACTIVATION_BYTES = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """What of a data sheet is reached, and what is fixed."""

    memory: float
    compute: float
    link: float
    layer_s: float
    collective_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """One model on the GPUs of one instance."""

    model: ModelDimensions
    sheet: GPUSheet
    gpus: int
    precision: str
    cache_bytes: float
    "of one number of the caches"
    reached: Reached
    split: Literal["tensor", "expert"] = "tensor"

    @property
    def weight_bytes_per_gpu(self) -> float:
        """Of the parameters that one GPU holds."""
        number_bytes = PRECISION_BYTES[self.precision]
        if self.split == "tensor":
            return self.model.total * number_bytes / self.gpus
        return (self.model.total - self.model.all_experts * (1.0 - 1.0 / self.gpus)) * number_bytes

    @property
    def kv_bytes_per_token(self) -> float:
        """On all GPUs together; copies are not counted."""
        return self.model.kv_bytes_per_token(self.cache_bytes)

    @property
    def cache_share(self) -> float:
        """Part of all samples' caches on the GPU with most: of heads, copied beyond their number, or of samples."""
        if self.split == "expert":
            return 1.0 / self.gpus
        return math.ceil(self.model.kv_heads / self.gpus) / self.model.kv_heads

    def forward_s(self, samples: float, tokens_per_sample: float, context_tokens: float) -> float:
        """Seconds of a forward on the GPU that has most to do.

        Args:
            samples: in the batch.
            tokens_per_sample: of this forward, such as 1 in plain decoding, n + 1 to verify n nodes.
            context_tokens: of all samples together, before it.
        """
        model, reached, tokens = self.model, self.reached, samples * tokens_per_sample
        is_split = self.split == "tensor"
        # with split experts each GPU has samples of its own, and all of the other parameters
        own = 1.0 if is_split else math.ceil(samples / self.gpus) / samples
        part = 1.0 / self.gpus if is_split else 1.0
        held = context_tokens * own
        memory = self.sheet.memory_bytes_per_s * reached.memory
        read = model.always_read * part + model.experts_read(tokens) / self.gpus
        # queries with keys, then weights with values
        attention = 4.0 * model.layers * model.heads * model.head_size * tokens_per_sample * held
        flops = (2.0 * model.always_read * tokens * own + attention) * part
        flops += 2.0 * (model.active - model.always_read) * tokens / self.gpus
        compute = flops_of(self.sheet, self.precision) * reached.compute
        body_s = max(read * PRECISION_BYTES[self.precision] / memory, flops / compute)
        cache_s = held * self.kv_bytes_per_token * (self.cache_share if is_split else 1.0) / memory
        if is_split:
            links_s = model.layers * self.all_reduce_s(tokens)
        else:
            links_s = model.expert_layers * self.exchange_s(tokens * own)
        return body_s + cache_s + model.layers * reached.layer_s + 2.0 * links_s

    def exchange_s(self, tokens: float) -> float:
        """Seconds in which a GPU's tokens go to their experts on the instance's GPUs, or come back."""
        return self._collective_s(tokens * self.model.experts_per_token)

    def all_reduce_s(self, tokens: float) -> float:
        """Seconds of one all-reduce of so many tokens' hidden states over the instance's GPUs (a ring)."""
        return self._collective_s(2.0 * tokens)

    def _collective_s(self, hidden_states: float) -> float:
        """Seconds in which all but the own part of so many hidden states passes each GPU's link."""
        if self.gpus == 1:
            return 0.0
        num_bytes = hidden_states * self.model.hidden * ACTIVATION_BYTES
        link = self.sheet.bandwidth(self.gpus) * self.reached.link
        return self.reached.collective_s + (self.gpus - 1) / self.gpus * num_bytes / link

    def prefill_token_s(self) -> float:
        """Seconds of a prompt's token, in prompts long enough to be computed rather than read."""
        compute = flops_of(self.sheet, self.precision) * self.reached.compute * self.gpus
        return 2.0 * self.model.active / compute
