"""Gauges and counters of one instance for the node's metrics port (`ray_rlhfspec_*`), labels `run` and `actor`.

Ray's agent forgets a gauge that was not set for two export intervals (20 s): an idle instance says the same again.
One that stops sets its gauges to 0, since the last values stay at the port for so long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ...core.decode_records import GenerationStats, InstanceLoad
from ..remote import run_metrics

REFRESH_S = 1.0
"Who reads the port does so every few seconds, and the decode thread pays for each time."
REPEAT_S = 5.0
"Half of Ray's export interval."


class InstanceGauges:
    """Publishes an instance's load; counters get the difference to the last one."""

    def __init__(self, instance: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._instance = instance
        self._last = GenerationStats()
        self._clock = clock
        self._refreshed_s = clock() - REFRESH_S
        self._values: dict[str, float] = {}
        self._exported_s = clock()
        self._lock = threading.Lock()

    def update(self, load: InstanceLoad) -> None:
        """Publish the load; while samples run, once in REFRESH_S."""
        now_s = self._clock()
        if load.num_running and now_s - self._refreshed_s < REFRESH_S:
            return
        self._refreshed_s = now_s
        new, self._last = load.stats - self._last, load.stats
        for name, amount in (
            ("emitted_tokens", new.num_emitted_tokens),
            ("sample_steps", new.num_sample_steps),
            ("draft_tokens", new.num_draft_tokens),
            ("accepted_tokens", new.num_accepted_tokens),
            ("accepted_looked_up_tokens", new.num_accepted_looked_up),
            ("completions", new.num_completions),
            ("move_seconds", new.move_s),
            ("preemptions", new.num_preemptions),
        ):
            run_metrics.add(name, amount, actor=self._instance)
        if new.num_sample_steps:
            self._set(instance_acceptance_length_tokens=new.mean_acceptance_length)
        self._set(
            # measured while samples ran: it says nothing of an instance that has none
            instance_goodput_tokens_per_second=load.goodput_tokens_per_s if load.num_running else 0.0,
            instance_running_samples=load.num_running,
            instance_waiting_samples=load.num_waiting,
            instance_context_tokens=load.context_tokens,
            instance_weight_version=load.weight_version,
            instance_drafter_alarm=bool(load.drafter_alarm),
            instance_ranks=load.num_ranks,
        )

    def repeat(self) -> None:
        """Say what was said last once more, where that is REPEAT_S ago; from any thread."""
        with self._lock:
            if self._clock() - self._exported_s >= REPEAT_S:
                self._export(self._values)

    def close(self) -> None:
        """Set every gauge that was set to 0."""
        self._set(**dict.fromkeys(self._values, 0))

    def _set(self, **values: float) -> None:
        with self._lock:
            self._values |= values
            self._export(values)

    def _export(self, values: dict[str, float]) -> None:
        self._exported_s = self._clock()
        for name, value in values.items():
            run_metrics.set_value(name, value, actor=self._instance)
