"""What may be asked for under a weight version, what an update takes, and the samples between the two.

A phase is what instances sample from one weight version. Between two phases no sample is with an instance: what is no
whole response waits here and is asked for again as a further turn; what is whole may still wait for its reward, which
only the update that learns from it waits for. Which samples a phase asks for and an update learns from is said by
`in_turns`, `recorded` or `free`; a batch is given out in the order of the sample index.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from ...core.errors import RewardError, WeightsError
from ...core.records import Completion, Rollout, SampleKey, SampleRequest, Unscored
from ..scheduling.open_samples import is_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSample:
    """A sample whose response is not whole, or has no reward."""

    batch: int
    "that it belongs to; of a free schedule: the version under which it began"
    request: SampleRequest
    "as the cursor made it"
    so_far: Completion | None = None
    "None: nothing was sampled yet; of one that waits for its reward: the whole response"
    num_turns: int = 0
    "that it was asked for"


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """All that is between instances and trainer at the end of a phase; what a state of the run keeps of it."""

    open_samples: dict[SampleKey, OpenSample] = field(default_factory=dict)
    "whose responses are not whole"
    unscored: dict[SampleKey, OpenSample] = field(default_factory=dict)
    "whose responses are whole and without a reward"
    ready: dict[int, dict[SampleKey, Rollout]] = field(default_factory=dict)
    "scored responses by the same number"
    ended: tuple[tuple[int, int], ...] = ()
    "free schedule: groups whose samples all have a reward, in the order in which they ended, and the number of each"


class Schedule(ABC):
    """Of one run. A batch is taken for its update, and the phase of that number goes on, or begins, beside it."""

    ends_with_update = False
    "a phase's samples are cut when its update is there, wherever they are; else at counts of tokens"
    scores_in_phase = False
    "a phase lasts until all its samples have rewards; else only the update that needs them waits"

    def __init__(self, *, num_iterations: int, max_staleness: int) -> None:
        self.num_iterations = num_iterations
        self.max_staleness = max_staleness
        "weight versions between a token and the update that learns from it, at most"
        self.left_out: list[Rollout] = []
        "scored for the batch that was taken last, and not learned from"
        self.why_unscored = "the notes above say why they were skipped"
        "the last reason for which a sample was left out"
        self._open: dict[SampleKey, OpenSample] = {}
        self._turns: dict[SampleKey, SampleRequest] = {}
        "what instances were asked for, of open samples"
        self._unscored: dict[SampleKey, OpenSample] = {}
        self._unsent: list[SampleKey] = []
        "of those the ones that no reward is computed for: they were restored"
        self._ready: dict[int, dict[SampleKey, Rollout]] = {}

    @property
    def num_phases(self) -> int:
        """Phases that ask for samples, but for one that only fills the pipeline."""
        return self.num_iterations

    @abstractmethod
    def begin(self, phase: int) -> list[SampleRequest]:
        """Begin a phase: what to ask the instances for, none where the run needs no more."""

    @abstractmethod
    def has(self, batch: int) -> bool:
        """Whether a batch is whole and scored."""

    @abstractmethod
    def take(self, batch: int) -> list[Rollout]:
        """Take a batch for its update, in the order of the sample index.

        Raises WeightsError: a token is older than the run allows, or a sample or its reward is missing; RewardError:
        every sample was left out.
        """

    def ahead(self, phase: int) -> list[SampleRequest]:
        """What the next phase will ask for, where that is known and may be begun under the weights that there are."""
        return []

    def needs_filling(self, batch: int) -> bool:
        """Whether instances have to sample for a batch before the phase of its update begins."""
        return False

    @property
    def num_open(self) -> int:
        """Samples that are no whole responses."""
        return len(self._open)

    @property
    def num_cut(self) -> int:
        """Those of them that have begun, and go on in the next phase."""
        return sum(one.so_far is not None for one in self._open.values())

    @property
    def num_unscored(self) -> int:
        """Whole responses without a reward."""
        return len(self._unscored)

    def whole(self, completion: Completion) -> tuple[SampleRequest, Completion] | None:
        """Take what a phase has added to a sample; its request and response, to be scored, where that is whole.

        Raises WeightsError: it is not open, because it came before.
        """
        one = self._open.get(completion.key.sample)
        if one is None:
            raise WeightsError(
                f"sample {completion.key.sample_index} was completed and is not open; expected each once: this is a "
                "fault of the project, please report it"
            )
        done = replace(completion, key=one.request.key, sampled=None)
        if is_whole(self._turns.pop(done.key), completion):
            del self._open[done.key]
            self._unscored[done.key] = replace(one, so_far=done)
            return one.request, done
        so_far = done if done.num_tokens else None
        self._open[done.key] = replace(one, so_far=so_far, num_turns=one.num_turns + 1)
        return None

    def holds(self, key: SampleKey) -> bool:
        """Whether a sample is open or waits for its reward here."""
        return key in self._open or key in self._unscored

    def batch_of(self, key: SampleKey) -> int:
        """The number that a response without a reward goes by: the lower, the sooner it is learned from."""
        return self._sample(key).batch

    def group_sizes(self) -> Counter[int]:
        """By group id, the samples that are open or wait for their reward."""
        waiting = chain(self._open.values(), self._unscored.values())
        return Counter(one.request.group_id for one in waiting)

    def unsent(self) -> list[tuple[SampleRequest, Completion]]:
        """What was restored whole and without a reward: to be scored again, told once."""
        keys, self._unsent = self._unsent, []
        return [(one.request, one.so_far) for key in keys if (one := self._unscored[key]).so_far is not None]

    def ended(self, key: SampleKey, outcome: Rollout | Unscored) -> list[SampleRequest]:
        """Take a sample's scored response, or leave it out, and why. What is to be asked for besides."""
        # an episode is whole when its environment says so, and is scored at once
        self._turns.pop(key, None)
        batch = (self._unscored.pop(key, None) or self._open.pop(key)).batch
        if isinstance(outcome, Rollout):
            self._ready[batch][key] = outcome
        else:
            self.why_unscored = f"the last: {outcome.reason}"
        return []

    def metrics(self) -> dict[str, float]:
        """Of the samples that wait, for `metrics.jsonl`."""
        return {
            "rollout/num_cut_samples": float(self.num_cut),
            "rollout/num_unscored_samples": float(self.num_unscored),
        }

    def in_flight(self) -> InFlight:
        """What is here between two phases; it stays as it is while the schedule goes on."""
        ready = {batch: dict(rollouts) for batch, rollouts in self._ready.items()}
        return InFlight(open_samples=dict(self._open), unscored=dict(self._unscored), ready=ready)

    def restore(self, in_flight: InFlight) -> None:
        """Go on where `in_flight` was taken; the cursor is restored by whoever has it."""
        self._open = dict(in_flight.open_samples)
        self._unscored, self._unsent = dict(in_flight.unscored), list(in_flight.unscored)
        self._ready = {batch: dict(rollouts) for batch, rollouts in in_flight.ready.items()}

    def _sample(self, key: SampleKey) -> OpenSample:
        return self._unscored.get(key) or self._open[key]

    def _begin_batch(self, batch: int, requests: Iterable[SampleRequest]) -> dict[SampleKey, OpenSample]:
        self._ready.setdefault(batch, {})
        begun = {request.key: OpenSample(batch=batch, request=request) for request in requests}
        self._open |= begun
        return begun

    def _turn(self, one: OpenSample, *, most: int) -> SampleRequest:
        """Ask for a sample, up to so many tokens."""
        request, before = one.request, one.so_far
        turn = self._turns[request.key] = replace(
            request,
            # what is asked for twice has two keys; the noise is the sample's
            key=replace(request.key, turn=one.num_turns),
            sampling=replace(request.sampling, max_new_tokens=most),
            # its caches are gone, and it may as well go on elsewhere
            history=None if before is None else replace(before.as_history(), instance=""),
            is_cut_at_limit=most < request.sampling.max_new_tokens,
        )
        return turn

    def _whole_turns(self, samples: Iterable[OpenSample]) -> list[SampleRequest]:
        """Ask for samples up to their ends."""
        return [self._turn(one, most=one.request.sampling.max_new_tokens) for one in samples]

    def _require_none(self, missing: Sequence[SampleKey], batch: int) -> None:
        """Raise WeightsError where samples of a batch are missing."""
        if missing:
            raise WeightsError(
                f"batch {batch} is to be learned from and {len(missing)} of its samples are not whole or not scored, "
                f"sample {missing[0].sample_index} among them; this is a fault of the project, please report it"
            )

    def _fresh(self, batch: int, rollouts: Iterable[Rollout]) -> list[Rollout]:
        """A batch in order. Raises RewardError: it is empty; WeightsError: a token is too old for its update."""
        ordered = in_order(rollouts)
        if not ordered:
            raise RewardError(
                f"none of the samples of iteration {batch + 1} could be scored, and nothing is left to learn from; "
                f"{self.why_unscored}"
            )
        for rollout in ordered:
            require_fresh(rollout, weight_version=batch, max_staleness=self.max_staleness)
        return ordered

    def _chosen(
        self, rollouts: list[Rollout], choose: Callable[[Sequence[Rollout]], list[Rollout]]
    ) -> list[Rollout]:
        """What is learned from; the rest, all of it where `choose` raises, is left out."""
        self.left_out = rollouts
        learned = choose(rollouts)
        keys = {rollout.completion.key for rollout in learned}
        self.left_out = [rollout for rollout in rollouts if rollout.completion.key not in keys]
        return learned


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
