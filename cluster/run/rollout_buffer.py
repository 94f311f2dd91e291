"""The rollout buffer: scored responses of one iteration, none of them stale, none of them twice."""

from __future__ import annotations

from collections.abc import Iterable

from rlhfspec.core.errors import WeightsError
from rlhfspec.core.records import Rollout, SampleKey


def require_fresh(rollout: Rollout, *, weight_version: int, max_staleness: int) -> None:
    """Raise WeightsError for a response with a token too old for a trainer that is at `weight_version`."""
    completion = rollout.completion
    oldest = min(span.weight_version for span in completion.weight_spans)
    if not 0 <= weight_version - oldest <= max_staleness:
        raise WeightsError(
            f"sample {completion.key.sample_index} holds tokens of weight version {oldest} from "
            f"{completion.instance}; the trainer is at {weight_version} and allows "
            f"{max_staleness} versions between; the instance missed a publication"
        )


def in_order(rollouts: Iterable[Rollout]) -> list[Rollout]:
    """By sample index: never by arrival."""
    return sorted(rollouts, key=lambda rollout: rollout.completion.key.sample_index)


class RolloutBuffer:
    """Collects rollouts in any order and gives them out in the order of their sample index.

    `max_staleness` counts weight versions between sampling and update; 0 is synchronous.
    """

    def __init__(self, *, max_staleness: int) -> None:
        self._max_staleness = max_staleness
        self._rollouts: dict[SampleKey, Rollout] = {}

    def __len__(self) -> int:
        return len(self._rollouts)

    def add(self, rollout: Rollout, *, weight_version: int) -> None:
        """Take one rollout; `weight_version` is the trainer's.

        Raises WeightsError for a sample that is there already, or with a token that is too old.
        """
        key = rollout.completion.key
        if key in self._rollouts:
            raise WeightsError(f"sample {key.sample_index} came into the rollout buffer twice; expected once")
        require_fresh(rollout, weight_version=weight_version, max_staleness=self._max_staleness)
        self._rollouts[key] = rollout

    def drain(self) -> list[Rollout]:
        """Take everything out, ordered by sample index: never by arrival."""
        rollouts = in_order(self._rollouts.values())
        self._rollouts.clear()
        return rollouts
