"""The size of a simulated pool: which instances are there, who starts and who leaves, by the policy that a run has."""

from __future__ import annotations

import numpy as np

from rlhfspec.policies.reallocation.pool_records import Move, MoveMode, PoolView
from rlhfspec.policies.scaling.scaling_policy import ScalingPolicy
from rlhfspec.policies.scaling.scaling_records import Limits, Resize, Starts
from rlhfspec.policies.scheduling.leaving import take_emptiest
from rlhfspec.policies.simulate.simulation_records import PoolSetup


class SimulatedSize:
    """Instances are numbered; those beyond the first come later, and a number that has left is not used again."""

    def __init__(self, setup: PoolSetup) -> None:
        elastic = self._elastic = setup.elastic
        # an instance may leave and another come: names are not used twice
        self.most = setup.num_instances if elastic is None else setup.num_instances + 4 * elastic.most
        self.start_up_s = elastic.start_up_s if elastic is not None else 0.0
        self.is_there = np.arange(self.most) < setup.num_instances
        self.admits = self.is_there.copy()
        self.resizes: list[tuple[float, Resize]] = []
        self._since_s = np.where(self.is_there, 0.0, np.nan)
        self._until_s = np.full(self.most, np.nan)
        self._idle_since_s = np.full(self.most, np.nan)
        self._next, self._num_starting = setup.num_instances, 0
        self._policy = None
        if elastic is not None:
            limits = Limits(least=elastic.least, most=elastic.most, idle_timeout_s=elastic.idle_timeout_s)
            self._policy = ScalingPolicy(setup.curve.copy(), limits)

    def note_finished(self, num_response_tokens: int) -> None:
        """The policy learns."""
        if self._policy is not None:
            self._policy.note_finished(num_response_tokens)

    def plan(self, view: PoolView) -> list[int]:
        """Let the policy decide; numbers of the instances that start now."""
        if self._policy is None or self._elastic is None:
            return []
        starts = Starts(
            num_starting=self._num_starting,
            start_up_s=self.start_up_s,
            rollouts_ahead=self._elastic.rollouts_ahead,
            is_blocked=self._next >= self.most,
        )
        staying = [one.instance for one in view.instances if not one.is_leaving]
        change = self._policy.plan(view, starts, may_leave=staying[self._elastic.least :])
        if change is None:
            return []
        self.resizes.append((view.now_s, change))
        for one in view.instances:
            if one.instance in change.leave:
                self.admits[_number(one.instance)] = False
        count = min(change.target - len(staying) - self._num_starting, self.most - self._next)
        begun = list(range(self._next, self._next + max(count, 0)))
        self._next += len(begun)
        self._num_starting += len(begun)
        for k in begun:
            self._since_s[k] = view.now_s
        return begun

    def joined(self, k: int) -> None:
        """An instance has started."""
        self._num_starting -= 1
        self.is_there[k] = self.admits[k] = True

    def look(self, k: int, now_s: float, *, is_empty: bool) -> None:
        """Note for how long an instance has been idle; let it go when it is empty and leaves."""
        if not is_empty:
            self._idle_since_s[k] = np.nan
        elif np.isnan(self._idle_since_s[k]):
            self._idle_since_s[k] = now_s
        if is_empty and self.is_there[k] and not self.admits[k]:
            self.is_there[k], self._until_s[k] = False, now_s

    def idle_s(self, k: int, now_s: float) -> float:
        """Seconds for which an instance has had nothing to do."""
        since_s = self._idle_since_s[k]
        return 0.0 if np.isnan(since_s) else now_s - float(since_s)

    def moves_away(self, view: PoolView) -> tuple[Move, ...]:
        """Samples of leaving instances to free slots of others, the emptiest first."""
        room = {one.instance: one.num_free_slots for one in view.instances if not one.is_leaving}
        away: list[Move] = []
        for one in view.instances:
            for key in one.keys if one.is_leaving else ():
                target = take_emptiest(room)
                if target is None:
                    return tuple(away)
                away.append(
                    Move(
                        key=key,
                        source=one.instance,
                        destination=target,
                        mode=MoveMode.MIGRATE,
                        gain_s=0.0,
                        reason=f"{one.instance} leaves",
                    )
                )
        return tuple(away)

    def instance_s(self, now_s: float) -> float:
        """Instances times seconds up to now: what the rollout is paid for, starts included."""
        until_s = np.where(np.isnan(self._until_s), now_s, self._until_s)
        return float(np.nansum(until_s - self._since_s))


def _number(instance: str) -> int:
    return int(instance.rsplit("-", 1)[1])
