"""How much a simulation would play, and a limit: absurd numbers are refused before they take a night."""

from __future__ import annotations

from collections.abc import Sequence

from core.errors import ConfigError
from core.settings.simulated_cluster import SimulatedClusterConfig

MOST_SAMPLES = 20_000_000
"Of all rollouts together: an hour or two on one core."
POLLS = 200
"Of a rollout, where no interval is given."
MOST_POLLS = 100_000


LEAST_FREE = 6
"Batches that a free schedule plays at least, those that fill and empty it aside."


def num_free_batches(steps: int, staleness: int) -> int:
    """Batches that a free schedule plays for so many steps."""
    return max(LEAST_FREE, steps) + 2 * (staleness + 1)


def num_played(config: SimulatedClusterConfig) -> int:
    """Samples of all rollouts; each is played plainly, and once more where something drafts."""
    step = config.step
    is_free = step.staleness > 0 and step.schedule == "free"
    batches = num_free_batches(step.steps, step.staleness) if is_free else step.steps
    return config.lengths.samples * batches * (1 if config.drafter.kind == "none" else 2)


def require_bounded(configs: Sequence[SimulatedClusterConfig]) -> int:
    """Samples of all these simulations together. Raises ConfigError for more than anybody waits for."""
    total = sum(map(num_played, configs))
    if total > MOST_SAMPLES:
        largest = max(configs, key=num_played)
        among = f" in {len(configs)} combinations" if len(configs) > 1 else ""
        raise ConfigError(
            f"{total:,} samples would be played{among}, at most {largest.lengths.samples:,} lengths.samples x "
            f"{largest.step.steps} step.steps; expected at most {MOST_SAMPLES:,}, which take an hour or two: lower one "
            "of them, or try fewer combinations"
        )
    return total


def require_few_polls(poll_interval_s: float, least_s: float) -> None:
    """Raise ConfigError where a rollout that takes at least `least_s` would be looked at absurdly often."""
    if least_s / poll_interval_s > MOST_POLLS:
        raise ConfigError(
            f"reallocation.poll_interval_s {poll_interval_s:g} would look {least_s / poll_interval_s:,.0f} times at a "
            f"rollout of {least_s:.0f} s; expected at most {MOST_POLLS:,} looks: leave it out for {POLLS} of them"
        )
