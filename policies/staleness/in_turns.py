"""In turns: a batch is sampled, then learned from, and no sample waits beside an update; staleness is 0."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from ...core.errors import ConfigError, NumericsError
from ...core.records import Completion, Reward, Rollout, SampleKey, SampleRequest, Unscored
from .rollout_schedule import Schedule


class UsefulGroups:
    """Groups that teach: for each whose rewards are all equal, one more prompt, while the others are still generated.

    Source: Yu et al. 2025 (DAPO), section 3.2. There a whole batch is sampled again; here a further prompt is asked for
    as soon as a group turns out useless, so it fills the tail. What is kept does not depend on who finishes first:
    prompts are asked for in the order of the cursor, one for each useless group, and all that were asked for are
    awaited. So the batch is the useful ones among the fewest first prompts that hold enough of them.
    """

    def __init__(
        self,
        next_group: Callable[[], list[SampleRequest]],
        samples: Sequence[SampleRequest | Completion],
        *,
        max_extra: int,
        metric: str | None = None,
        num_groups: int | None = None,
    ) -> None:
        """Of these samples; `next_group` gives the requests of a further prompt, `max_extra` are asked for at most.

        `num_groups` are learned from; None: as many as there are at first.
        `metric` is the part of the reward that is to differ; None: the reward before shaping, which tells a long
        right answer from a short one where both are right.
        """
        self._metric = metric
        self._next_group = next_group
        self._left = max_extra
        self._open: dict[int, int] = defaultdict(int)
        self._rewards: dict[int, list[float]] = defaultdict(list)
        self._expect(samples)
        self._num_wanted = num_groups or len(self._open)

    def scored(self, rollout: Rollout) -> list[SampleRequest]:
        """Take note of a sample's reward; what is to be sampled besides. Raises ConfigError: no such part."""
        return self.ended(rollout.completion.group_id, self._judged(rollout.reward))

    def after(self, group_id: int, outcome: Rollout | Unscored) -> list[SampleRequest]:
        """The same of a sample that may be left out."""
        return self.scored(outcome) if isinstance(outcome, Rollout) else self.ended(group_id, None)

    def ended(self, group_id: int, reward: float | None) -> list[SampleRequest]:
        """The same by the number itself, None of a sample that is left out."""
        self._open[group_id] -= 1
        if reward is not None:
            self._rewards[group_id].append(reward)
        if self._open[group_id] or self.is_useful(group_id) or not self._left:
            return []
        self._left -= 1
        requests = self._next_group()
        self._expect(requests)
        return requests

    def is_useful(self, group_id: int) -> bool:
        """Whether the rewards of a group differ."""
        return len(set(self._rewards[group_id])) > 1

    def batch(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """What is learned from: the useful groups, filled up with others where too few are.

        Raises NumericsError when none is useful, which says more of prompts and rewards than of this batch.
        """
        groups = sorted(self._open)
        useful = [group for group in groups if self.is_useful(group)]
        if not useful:
            raise NumericsError(
                f"of {len(groups)} prompts none has samples with different rewards (algorithm.dynamic_sampling), so "
                "nothing can be learned from them; expected some that are neither too easy nor too hard: look at the "
                "rewards in rollouts/, choose other prompts, or raise rollout.samples_per_prompt"
            )
        rest = [group for group in groups if not self.is_useful(group)]
        chosen = set((useful + rest)[: self._num_wanted])
        return [rollout for rollout in rollouts if rollout.completion.group_id in chosen]

    def metrics(self) -> dict[str, float]:
        """For `metrics.jsonl`."""
        num_useful = sum(self.is_useful(group) for group in self._open)
        return {
            "rollout/num_groups_sampled": float(len(self._open)),
            "rollout/num_groups_useful": float(num_useful),
        }

    def _judged(self, reward: Reward) -> float:
        if self._metric is None:
            return reward.parts.get("unshaped", reward.value)
        if self._metric not in reward.parts:
            raise ConfigError(
                f"algorithm.dynamic_sampling_metric '{self._metric}' is no part of the reward; its parts are "
                f"{', '.join(sorted(reward.parts)) or 'none'}; name one of them, or leave it out"
            )
        return reward.parts[self._metric]

    def _expect(self, samples: Sequence[SampleRequest | Completion]) -> None:
        for one in samples:
            self._open[one.group_id] += 1


class InTurns(Schedule):
    """A phase asks for the batch of its update, and for further prompts where groups teach nothing."""

    scores_in_phase = True

    def __init__(
        self,
        next_requests: Callable[[], Sequence[SampleRequest]],
        *,
        num_iterations: int = 1,
        useful_groups: Callable[[Sequence[SampleRequest]], UsefulGroups] | None = None,
        peek: Callable[[], list[SampleRequest]] | None = None,
    ) -> None:
        """`next_requests`: a further batch's; `useful_groups`: of a batch, where useless groups are replaced.

        `peek`: what `next_requests` will give, where attempts are to be made at it; None: none are.
        """
        super().__init__(num_iterations=num_iterations, max_staleness=0)
        self._next_requests, self._useful_groups, self._peek = next_requests, useful_groups, peek
        self._groups: UsefulGroups | None = None

    def begin(self, phase: int) -> list[SampleRequest]:
        """See `Schedule.begin`."""
        requests = self._next_requests()
        if self._useful_groups is not None:
            self._groups = self._useful_groups(requests)
        return self._whole_turns(self._begin_batch(phase, requests).values())

    def ahead(self, phase: int) -> list[SampleRequest]:
        """See `Schedule.ahead`."""
        return self._peek() if self._peek is not None and phase + 1 < self.num_iterations else []

    def ended(self, key: SampleKey, outcome: Rollout | Unscored) -> list[SampleRequest]:
        """See `Schedule.ended`."""
        sample = self._sample(key)
        super().ended(key, outcome)
        if self._groups is None:
            return []
        further = self._groups.after(sample.request.group_id, outcome)
        return self._whole_turns(self._begin_batch(sample.batch, further).values())

    def has(self, batch: int) -> bool:
        """See `Schedule.has`."""
        return batch in self._ready and not self._open and not self._unscored

    def take(self, batch: int) -> list[Rollout]:
        """See `Schedule.take`. Raises NumericsError where no group teaches: all is left out then."""
        self._require_none([*self._open, *self._unscored], batch)
        rollouts = self._fresh(batch, self._ready.pop(batch).values())
        return rollouts if self._groups is None else self._chosen(rollouts, self._groups.batch)

    def metrics(self) -> dict[str, float]:
        """Of dynamic sampling."""
        return {} if self._groups is None else self._groups.metrics()
