"""Seconds of one forward of decoding: weights read or products computed, whichever is longer, caches, links, starts.

forward = max(weights / memory, products / compute) + caches / memory + layers x start + 2 x layers x all-reduce
"""

from __future__ import annotations

from dataclasses import dataclass

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

    @property
    def weight_bytes(self) -> float:
        """Of all parameters, on all GPUs together."""
        return self.model.total * PRECISION_BYTES[self.precision]

    @property
    def kv_bytes_per_token(self) -> float:
        """On all GPUs together, as long as each has a head of its own; copies are not counted."""
        return self.model.kv_bytes_per_token(self.cache_bytes)

    @property
    def cache_share(self) -> float:
        """Part of a sample's caches on one GPU: heads are split, and copied beyond their number."""
        return 1.0 / min(self.gpus, self.model.kv_heads)

    def forward_s(self, samples: float, tokens_per_sample: float, context_tokens: float) -> float:
        """Seconds of a forward.

        Args:
            samples: in the batch.
            tokens_per_sample: of this forward, such as 1 in plain decoding, n + 1 to verify n nodes.
            context_tokens: of all samples together, before it.
        """
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
