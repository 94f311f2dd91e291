"""Records of decoding: what a step may know, spends and did, an instance's load and sums."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeState:
    """Facts of earlier decode steps that a draft policy may use. No tensor, no wall clock."""

    decode_step: int
    num_samples: int
    context_tokens: int
    "sum over running samples of committed tokens"
    max_remaining_tokens: int
    num_waiting: int = 0
    weight_version: int = 0
    drafter_version: int = 0
    num_brought: int = 0
    "samples whose requests brought a draft that they agree with so far"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How much to draft and verify in one decode step (design 3.2, phase `plan`).

    `num_nodes` draft nodes per sample are verified; the drafter expands `width` nodes a level for
    `depth` levels and offers `branching` children to each. num_nodes 0 is plain decoding.
    """

    num_nodes: int
    depth: int
    branching: int
    width: int
    reason: str
    refined: bool = False
    "the policy is asked after every level whether to draft another, and at the end which nodes to verify"
    look_up: int = 0
    "tokens looked up for a sample, at most, to stand in place of what is computed for it"

    @property
    def deepest(self) -> int:
        """Levels that a draft may have."""
        return max(self.depth, self.look_up)

    @property
    def is_plain(self) -> bool:
        """True when nothing is drafted."""
        return self.num_nodes == self.look_up == 0


PLAIN = Budget(num_nodes=0, depth=0, branching=0, width=0, reason="plain decoding")


@dataclass(frozen=True, slots=True, kw_only=True)
class LookUpLog:
    """What was looked up beside a drafter that computes."""

    scores: np.ndarray
    "[B, L] float32: estimated acceptance of the whole way to each token; 0 where there is none"
    used: np.ndarray
    "[B] bool: samples of which this was verified, and not what was computed"
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLog:
    """A refined draft: what the policy was shown, what it chose, what the target made of it. C candidates."""

    scores: np.ndarray
    "[B, C] float32: estimated probability that the whole path to the candidate is accepted, level by level"
    level_sizes: tuple[int, ...]
    "candidates of each level; their sum is C"
    num_nodes: np.ndarray
    "[B] candidates verified: the best by score, ties to the earlier"
    num_accepted: np.ndarray
    "[B]"
    look_up: LookUpLog | None = None
    "where a drafter that looks up stands beside one that computes; C is 0 where it was enough"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one decode step saw, decided and did; the policies' food and the replay log's line."""

    state: DecodeState
    budget: Budget
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_rank2_plus: int
    num_emitted_tokens: int
    draft_s: float
    "selection included"
    verify_s: float
    accept_s: float
    other_s: float
    select_s: float = 0.0
    "of these seconds, those spent on choosing: plan, scores, search, bookkeeping"
    draft: DraftLog | None = None
    "of a refined budget that drafted"
    num_accepted_looked_up: int = 0
    "of the tokens accepted, those looked up beside a drafter that computes"

    @property
    def decode_step(self) -> int:
        """Number of the decode step since the engine was built."""
        return self.state.decode_step

    @property
    def num_samples(self) -> int:
        """B."""
        return self.state.num_samples

    @property
    def context_tokens(self) -> int:
        """Committed tokens of the batch before the step."""
        return self.state.context_tokens

    @property
    def step_s(self) -> float:
        """Seconds of the whole decode step."""
        return self.draft_s + self.verify_s + self.accept_s + self.other_s


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStats:
    """Sums over decode steps; ratios are derived late. Add two with `+`."""

    num_decode_steps: int = 0
    num_sample_steps: int = 0
    "sum over decode steps of the samples in them"
    num_prefill_tokens: int = 0
    num_kept_tokens: int = 0
    "that were not prefilled, because caches had been kept since an earlier turn"
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_rank2_plus: int = 0
    num_accepted_looked_up: int = 0
    "beside a drafter that computes"
    num_emitted_tokens: int = 0
    num_completions: int = 0
    num_preemptions: int = 0
    "running samples that had to wait because the caches were full"
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    accept_s: float = 0.0
    other_s: float = 0.0
    select_s: float = 0.0
    "contained in the others"
    move_s: float = 0.0
    "seconds the decode thread gave to moving samples, between decode steps"
    publish_s: float = 0.0
    "seconds it gave to telling the scheduler what it does"

    def __add__(self, other: GenerationStats) -> GenerationStats:
        names = self.__dataclass_fields__
        return GenerationStats(**{n: getattr(self, n) + getattr(other, n) for n in names})

    def __sub__(self, other: GenerationStats) -> GenerationStats:
        names = self.__dataclass_fields__
        return GenerationStats(**{n: getattr(self, n) - getattr(other, n) for n in names})

    @property
    def acceptance_rate(self) -> float:
        """Accepted / verified draft tokens; 0 when nothing was drafted."""
        return self.num_accepted_tokens / max(self.num_draft_tokens, 1)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per sample and decode step, the bonus token included."""
        return self.num_emitted_tokens / max(self.num_sample_steps, 1)

    @property
    def busy_s(self) -> float:
        """Seconds spent in prefill and decode steps."""
        return self.prefill_s + self.draft_s + self.verify_s + self.accept_s + self.other_s


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceLoad:
    """One instance's workload as the scheduler polls it."""

    instance: str
    num_running: int
    num_waiting: int
    num_free_slots: int
    context_tokens: int
    weight_version: int
    drafter_version: int
    decode_step: int
    goodput_tokens_per_s: float
    stats: GenerationStats
    goodput_samples: float = 0.0
    "samples that ran while goodput was measured, in the mean"
    num_slots: int | None = None
    "slots that can be used now: all, or those the caches have room for; None: not known"
    drafter_alarm: str = ""
    "why drafting was suspended here last, with the drafter's checksum, version and age; empty when it never was"
    num_ranks: int = 1
    "to which the target is dealt"
