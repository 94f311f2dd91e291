"""Response lengths to simulate: drawn by name, or recorded."""

from __future__ import annotations

from typing import Literal

import numpy as np

from rlhfspec.core.errors import ConfigError
from rlhfspec.policies.simulate.simulation_records import Samples

WorkloadName = Literal["balanced", "long_tail", "skewed"]
WORKLOADS: tuple[WorkloadName, ...] = ("balanced", "long_tail", "skewed")

TAIL_SIGMA = 0.8
"Log-normal: the 99th percentile is 6.4 times the median."
TAIL_MEDIAN_SHARE = 1 / 6
"Median as a share of the limit."


def drawn_lengths(
    name: WorkloadName, num_samples: int, num_instances: int, *, max_new_tokens: int, seed: int
) -> np.ndarray:
    """[n] lengths in order of arrival.

    balanced: log-normal, every run of K samples has one length, so that each instance gets the same lengths.
    long_tail: log-normal, independent.
    skewed: log-normal, the longest K-th part of them where static binding gives them all to the first instance.

    Raises ConfigError for an unknown name.
    """
    random = np.random.default_rng(seed)
    drawn = random.lognormal(np.log(TAIL_MEDIAN_SHARE * max_new_tokens), TAIL_SIGMA, num_samples)
    lengths = np.clip(np.rint(drawn), 1, max_new_tokens).astype(np.int64)
    match name:
        case "balanced":
            return np.repeat(lengths, num_instances)[:num_samples]
        case "long_tail":
            return lengths
        case "skewed":
            return skew(lengths, num_instances)
    raise ConfigError(f"no lengths '{name}'; expected one of: {', '.join(WORKLOADS)}")


def skew(lengths: np.ndarray, num_instances: int) -> np.ndarray:
    """Put the longest K-th part of the lengths on every K-th place: static binding gives them to one instance."""
    order = np.sort(lengths)[::-1]
    num_long = -(-len(lengths) // num_instances)
    first = np.arange(len(lengths)) % num_instances == 0
    skewed = np.empty_like(lengths)
    # within each group the order is a fixed shuffle: arrival says nothing of the length
    random = np.random.default_rng(len(lengths))
    skewed[first] = random.permutation(order[:num_long])
    skewed[~first] = random.permutation(order[num_long:])
    return skewed


def samples_of(
    lengths: np.ndarray, *, prompt_tokens: int = 0, speed_sigma: float = 0.0, seed: int = 0
) -> Samples:
    """Samples of these lengths; `speed_sigma` spreads their speeds around 1."""
    random = np.random.default_rng([seed, 1])
    return Samples(
        response_tokens=np.maximum(np.asarray(lengths, dtype=np.int64), 1),
        prompt_tokens=np.full(len(lengths), prompt_tokens, dtype=np.int64),
        speed=np.exp(random.normal(0.0, speed_sigma, len(lengths))),
    )
