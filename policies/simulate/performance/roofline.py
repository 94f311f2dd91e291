"""Seconds of one forward of decoding: weights read or products computed, whichever is longer, caches, links, starts.

forward = max(weights / memory, products / compute) + caches / memory + layers x start + layers x 2 collectives

An instance's GPUs split every matrix (`tensor`: two all-reduces a layer), or each holds everything but the experts,
which they split, and has samples of its own (`expert`: tokens go to their experts and back).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from policies.simulate.performance.device_sheets import DeviceSheet
from policies.simulate.performance.model_dimensions import ModelDimensions

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
    sheet: DeviceSheet
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
        """Part of all samples' caches on one GPU: heads are split, and copied beyond their number; or samples are."""
        return 1.0 / (self.gpus if self.split == "expert" else min(self.gpus, self.model.kv_heads))

    def forward_s(self, samples: float, tokens_per_sample: float, context_tokens: float) -> float:
        """Seconds of a forward.

        Args:
            samples: in the batch.
            tokens_per_sample: of this forward, such as 1 in plain decoding, n + 1 to verify n nodes.
            context_tokens: of all samples together, before it.
        """
        if self.split == "expert":
            return self._expert_forward_s(samples, tokens_per_sample, context_tokens)
        tokens = samples * tokens_per_sample
        number_bytes = PRECISION_BYTES[self.precision]
        read_bytes = (self.model.always_read + self.model.experts_read(tokens)) * number_bytes
        memory = self.sheet.memory_bytes_per_s * self.reached.memory
        flops = 2.0 * self.model.active * tokens
        # queries with keys, then weights with values
        flops += (
            4.0
            * self.model.layers
            * self.model.heads
            * self.model.head_size
            * tokens_per_sample
            * context_tokens
        )
        compute = self.sheet.flops(self.precision) * self.reached.compute
        body_s = max(read_bytes / self.gpus / memory, flops / self.gpus / compute)
        cache_s = context_tokens * self.kv_bytes_per_token * self.cache_share / memory
        return body_s + cache_s + self.model.layers * (self.reached.layer_s + 2.0 * self.all_reduce_s(tokens))

    def _expert_forward_s(self, samples: float, tokens_per_sample: float, context_tokens: float) -> float:
        """The same on the GPU with most samples; experts have their even part of all tokens."""
        tokens = samples * tokens_per_sample
        own = math.ceil(samples / self.gpus)
        own_context = context_tokens * own / samples
        number_bytes = PRECISION_BYTES[self.precision]
        memory = self.sheet.memory_bytes_per_s * self.reached.memory
        read_bytes = (self.model.always_read + self.model.experts_read(tokens) / self.gpus) * number_bytes
        flops = 2.0 * self.model.always_read * own * tokens_per_sample
        flops += 2.0 * (self.model.active - self.model.always_read) * tokens / self.gpus
        flops += (
            4.0
            * self.model.layers
            * self.model.heads
            * self.model.head_size
            * tokens_per_sample
            * own_context
        )
        body_s = max(read_bytes / memory, flops / (self.sheet.flops(self.precision) * self.reached.compute))
        cache_s = own_context * self.kv_bytes_per_token / memory
        exchange_s = 2.0 * self.model.expert_layers * self.exchange_s(own * tokens_per_sample)
        return body_s + cache_s + self.model.layers * self.reached.layer_s + exchange_s

    def exchange_s(self, tokens: float) -> float:
        """Seconds in which a GPU's tokens go to their experts on the instance's GPUs, or come back."""
        if self.gpus == 1:
            return 0.0
        num_bytes = tokens * self.model.experts_per_token * self.model.hidden * ACTIVATION_BYTES
        link = self.sheet.bandwidth(self.gpus) * self.reached.link
        return self.reached.collective_s + (self.gpus - 1) / self.gpus * num_bytes / link

    def all_reduce_s(self, tokens: float) -> float:
        """Seconds of one all-reduce of so many tokens' hidden states over the instance's GPUs (a ring)."""
        if self.gpus == 1:
            return 0.0
        num_bytes = tokens * self.model.hidden * ACTIVATION_BYTES
        link = self.sheet.bandwidth(self.gpus) * self.reached.link
        return self.reached.collective_s + 2.0 * (self.gpus - 1) / self.gpus * num_bytes / link

    def prefill_token_s(self) -> float:
        """Seconds of a prompt's token, in prompts long enough to be computed rather than read."""
        compute = self.sheet.flops(self.precision) * self.reached.compute * self.gpus
        return 2.0 * self.model.active / compute
