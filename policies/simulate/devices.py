"""Analytic rate curves of devices that are not here: from data sheets, not measured, and labelled so.

decode step = max(read the weights, compute the tokens) + read the KV caches
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from policies.reallocation.rate_curve import RateCurve
from policies.simulate.simulation_records import MoveTruth
from profiles.transfer import PrefillModel, TransferModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What a decode step is limited by, with shares of the data sheet that are usually reached."""

    label: str
    weight_bytes: float
    num_parameters: float
    kv_bytes_per_token: float
    bytes_per_s: float
    flops_per_s: float
    draft_level_s: float
    "one draft token for every sample"
    acceptance: float
    "of each draft token, given the one before"
    max_draft_tokens: int
    link_bytes_per_s: float
    "between two instances"

    def moves(self) -> MoveTruth:
        """What moves take: a prefill is compute, a transfer the link, either is begun by a message or two."""
        token_s = 2.0 * self.num_parameters / self.flops_per_s
        return MoveTruth(
            kv_bytes_per_token=self.kv_bytes_per_token,
            transfer=TransferModel(latency_s=0.02, bytes_per_s=self.link_bytes_per_s, open_s=0.5),
            prefill=PrefillModel(fixed_s=0.01, token_s=token_s, token_squared_s=token_s * 1e-5),
            downtime_s=0.02,
        )

    def step_s(self, num_samples: int, tokens_per_sample: int, context_tokens: int) -> float:
        """Seconds of a decode step that verifies so many tokens of each sample, the root included."""
        read_s = self.weight_bytes / self.bytes_per_s
        compute_s = 2.0 * self.num_parameters * num_samples * tokens_per_sample / self.flops_per_s
        kv_s = num_samples * context_tokens * self.kv_bytes_per_token / self.bytes_per_s
        return max(read_s, compute_s) + kv_s

    def rate_curve(self, *, context_tokens: int, max_samples: int, speculation: bool) -> RateCurve:
        """Goodput over samples; with speculation the chain that is best for each number of samples.

        `context_tokens`: of each sample, where the chain is chosen.
        """
        batches = np.unique(np.rint(np.geomspace(1, max_samples, 48)).astype(int)).tolist()
        rates: list[float] = []
        slopes: list[float] = []
        for batch in batches:
            best, slope = 0.0, 0.0
            for drafted in range(self.max_draft_tokens + 1 if speculation else 1):
                tokens = (1.0 - self.acceptance ** (drafted + 1)) / (1.0 - self.acceptance)
                seconds = self.step_s(batch, drafted + 1, context_tokens) + drafted * self.draft_level_s
                if batch * tokens / seconds > best:
                    best = batch * tokens / seconds
                    slope = self.kv_bytes_per_token / self.bytes_per_s / tokens
            rates.append(best)
            slopes.append(slope)
        contexts = [batch * context_tokens for batch in batches]
        return RateCurve(batches, rates, context_tokens=contexts, context_token_s=slopes)


H100_CLASS = Device(
    label="H100-class (analytic, not measured): 7.6B parameters, bf16, 3.35 TB/s and 989 TFLOP/s at 70% and 50%",
    weight_bytes=15.2e9,
    num_parameters=7.6e9,
    # 28 layers, 4 KV heads of 128, keys and values, 2 bytes: Qwen2.5-7B
    kv_bytes_per_token=28 * 4 * 128 * 2 * 2,
    bytes_per_s=0.7 * 3.35e12,
    flops_per_s=0.5 * 989e12,
    # a 0.5B draft model: 1 GB of weights and the launch of its kernels
    draft_level_s=8e-4,
    acceptance=0.8,
    max_draft_tokens=8,
    # half of one 400 Gbit/s port
    link_bytes_per_s=25e9,
)
