"""Gauges and counters of one instance for the node's metrics port (`ray_rlhfspec_*`), tagged `instance`.

Series of dead actors stay at the port for over a minute, so an instance sets its gauges to 0 when it
stops; aggregate by `instance` over living ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ray.util.metrics import Counter, Gauge

from core.decode_records import GenerationStats, InstanceLoad

REFRESH_S = 1.0
"Who reads the port does so every few seconds, and the decode thread pays for each time."


class InstanceGauges:
    """Publishes an instance's load; counters get the difference to the last one."""

    def __init__(self, instance: str, clock: Callable[[], float] = time.monotonic) -> None:
        tags = {"instance": instance}
        self._emitted = Counter(
            "rlhfspec_emitted_tokens", description="Response tokens emitted.", tag_keys=("instance",)
        )
        self._emitted.set_default_tags(tags)
        self._move_s = Counter(
            "rlhfspec_move_seconds",
            description="Seconds the decode thread gave to moving samples.",
            tag_keys=("instance",),
        )
        self._move_s.set_default_tags(tags)
        self._preemptions = Counter(
            "rlhfspec_preemptions",
            description="Running samples that had to wait because the caches were full.",
            tag_keys=("instance",),
        )
        self._preemptions.set_default_tags(tags)
        self._gauges = {
            name: Gauge(f"rlhfspec_{name}", description=text, tag_keys=("instance",))
            for name, text in _GAUGES.items()
        }
        for gauge in self._gauges.values():
            gauge.set_default_tags(tags)
        self._last = GenerationStats()
        self._clock = clock
        self._refreshed_s = clock() - REFRESH_S

    def update(self, load: InstanceLoad) -> None:
        """Publish the load; while samples run, once in REFRESH_S."""
        now_s = self._clock()
        if load.num_running and now_s - self._refreshed_s < REFRESH_S:
            return
        self._refreshed_s = now_s
        new = load.stats - self._last
        if new.num_emitted_tokens > 0:
            self._emitted.inc(new.num_emitted_tokens)
        if new.move_s > 0.0:
            self._move_s.inc(new.move_s)
        if new.num_preemptions > 0:
            self._preemptions.inc(new.num_preemptions)
        self._last = load.stats
        self._set(
            goodput_tokens_per_s=load.goodput_tokens_per_s,
            mean_acceptance_length=load.stats.mean_acceptance_length,
            running_samples=load.num_running,
            waiting_samples=load.num_waiting,
            context_tokens=load.context_tokens,
            weight_version=load.weight_version,
        )

    def close(self) -> None:
        """Set every gauge to 0."""
        self._set(**dict.fromkeys(_GAUGES, 0))

    def _set(self, **values: float) -> None:
        for name, value in values.items():
            self._gauges[name].set(float(value))


_GAUGES = {
    "goodput_tokens_per_s": "Emitted tokens per second, as the engine last measured it.",
    "mean_acceptance_length": "Tokens emitted per sample and decode step since the start.",
    "running_samples": "Samples in the running batch.",
    "waiting_samples": "Samples accepted but not yet running.",
    "context_tokens": "Committed tokens of the running samples.",
    "weight_version": "Version of the target weights.",
}
