"""The rule: an instance is added where it saves more than its start is worth, and leaves where it is not missed.

What the n-th instance saves is counted in this rollout from the moment it can have joined, and in some of those to come
from their beginning. It is added where that passes a hurdle, and given up where half the hurdle is not reached for the
idle timeout: what is given up at one moment would not be added at the same moment.
"""

from __future__ import annotations

from .scaling_records import Limits, PoolFacts, Resize

GAIN_SHARE = 0.05
"Of a rollout's time: what an instance must save at least,"
START_SHARE = 0.5
"and of the seconds of its start: they are paid for and deliver nothing."
LEAST_S = 0.01
"No less is worth a start, however quick."
ROLLOUTS_AHEAD = 4
"Rollouts to come that count at most: a pool that has grown may be told to shrink before the others."
HYSTERESIS = 0.5
"Share of the hurdle below which an instance is one too many."


def decide(facts: PoolFacts, limits: Limits) -> Resize | None:
    """What to change now; None: nothing. Equal facts give equal answers."""
    coming = facts.num_coming
    if coming < limits.least:
        if facts.starts.is_blocked:
            return None
        return Resize(
            target=limits.least, reason=f"the pool has {coming} of at least {limits.least} instances"
        )
    if coming > limits.least:
        shrunk = _shrink(facts, limits)
        if shrunk is not None:
            return shrunk
    return _grow(facts, limits)


def has_surplus(facts: PoolFacts, limits: Limits) -> bool:
    """Whether one instance less would do for the open samples; the policy counts for how long."""
    return facts.num_open > 0 and facts.num_coming > limits.least and _is_surplus(facts, facts.num_coming)


def _grow(facts: PoolFacts, limits: Limits) -> Resize | None:
    coming, starts = facts.num_coming, facts.starts
    idle = any(candidate.num_samples == 0 for candidate in facts.candidates)
    # what idles already would have taken samples if there were any to give
    if not facts.num_open or starts.is_blocked or (idle and starts.num_starting == 0):
        return None
    target = coming
    while target < limits.most and _worth_s(facts, target + 1) >= _hurdle_s(facts, target):
        target += 1
    if target == coming:
        return None
    now_s = facts.forecast.finish_s(coming)
    then_s = facts.forecast.finish_s(target, now=coming, start_up_s=starts.start_up_s)
    whole_s = facts.forecast.finish_s(target)
    ahead = (
        f", and {whole_s:.1f} s in each of {starts.rollouts_ahead} rollouts to come"
        if starts.rollouts_ahead
        else ""
    )
    return Resize(
        target=target,
        reason=(
            f"{facts.num_open} open samples take {now_s:.1f} s with {coming} instances, {then_s:.1f} s with {target} "
            f"that start in {starts.start_up_s:.1f} s{ahead}"
        ),
    )


def _shrink(facts: PoolFacts, limits: Limits) -> Resize | None:
    coming = facts.num_coming
    if not facts.num_open:
        # as long as a start takes: whoever comes back next rollout has then cost at most twice what idling had
        patience_s = max(
            limits.idle_timeout_s, facts.starts.start_up_s if facts.starts.rollouts_ahead else 0.0
        )
        idle = [one for one in facts.candidates if one.num_samples == 0 and one.idle_s >= patience_s]
        idle.sort(key=lambda one: (-one.idle_s, one.instance))
        leave = tuple(one.instance for one in idle[: max(facts.num_alive - limits.least, 0)])
        if not leave:
            return None
        return Resize(
            target=coming - len(leave),
            leave=leave,
            reason=f"{', '.join(leave)} had nothing to do for {idle[0].idle_s:.0f} s and no sample is open",
        )
    if facts.surplus_s < limits.idle_timeout_s or not _is_surplus(facts, coming):
        return None
    less_s, now_s = facts.forecast.finish_s(coming - 1), facts.forecast.finish_s(coming)
    reason = (
        f"{facts.num_open} open samples take {less_s:.1f} s with {coming - 1} instances and {now_s:.1f} s with "
        f"{coming}, for {facts.surplus_s:.0f} s now"
    )
    if facts.starts.num_starting:
        return Resize(target=coming - 1, reason=f"{reason}: one that starts is not waited for")
    if not facts.candidates or facts.num_alive <= limits.least:
        return None
    emptiest = min(facts.candidates, key=lambda one: (one.num_samples, -one.idle_s, one.instance))
    return Resize(
        target=coming - 1, leave=(emptiest.instance,), reason=f"{reason}: {emptiest.instance} leaves"
    )


def _is_surplus(facts: PoolFacts, num_instances: int) -> bool:
    loss_s = facts.forecast.finish_s(num_instances - 1) - facts.forecast.finish_s(num_instances)
    return (1 + _ahead(facts)) * loss_s < HYSTERESIS * _hurdle_s(facts, num_instances)


def _worth_s(facts: PoolFacts, num_instances: int) -> float:
    """Seconds that the last of so many saves, in this rollout and in those that count."""
    forecast, coming, start_up_s = facts.forecast, facts.num_coming, facts.starts.start_up_s
    here_s = forecast.finish_s(num_instances - 1, now=coming, start_up_s=start_up_s) - forecast.finish_s(
        num_instances, now=coming, start_up_s=start_up_s
    )
    later_s = forecast.finish_s(num_instances - 1) - forecast.finish_s(num_instances)
    return here_s + _ahead(facts) * later_s


def _hurdle_s(facts: PoolFacts, num_instances: int) -> float:
    share_s = GAIN_SHARE * (1 + _ahead(facts)) * facts.forecast.finish_s(num_instances)
    return max(share_s, START_SHARE * facts.starts.start_up_s, LEAST_S)


def _ahead(facts: PoolFacts) -> int:
    return min(facts.starts.rollouts_ahead, ROLLOUTS_AHEAD)
