"""Drafters side by side on one target: engines, profiles, rates, and acceptance by depth."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from transformers import PreTrainedModel

from benchmarks.support.timing import Rate
from benchmarks.support.workload import Workload
from rlhfspec.core.config import EngineConfig, SpeculationConfig
from rlhfspec.core.records import Completion, SampleRequest
from rlhfspec.engine.build import build_engine
from rlhfspec.engine.calibration.engine_provenance import provenance_of
from rlhfspec.engine.calibration.profiler import (
    MAX_PROFILED_NODES,
    Placeholder,
    make_profile,
    make_verification_profile,
)
from rlhfspec.engine.calibration.random_chains import RandomChains
from rlhfspec.engine.drafters.head.head_weights import HeadWeights
from rlhfspec.engine.engine import Engine
from rlhfspec.profiles.profile import Profile

PLAIN = "plain"
TREE = {"num_nodes": 8, "depth": 3, "branching": 3}
CHAIN = {"num_nodes": 8, "depth": 8, "branching": 1}
"Of the table: at most eight nodes, of drafters that know trees, and of look-ups."
PAIRS = {"head_suffix": {"drafter": "head", "look_up": "suffix"}}
"Of a drafter that computes and one that looks up: their settings."


@dataclass(frozen=True, slots=True, kw_only=True)
class Depths:
    """What a fixed plan gave, one sample at a time."""

    mean_length: float
    by_depth: list[float]
    "of drafts that were right to the level before, the share that was right at this one too"
    level_share: float
    "seconds of a level of the draft over a plain decode step"


class Contestants:
    """One target with all that can draft for it, at one number of slots."""

    def __init__(
        self, workload: Workload, head: HeadWeights | None, *, num_slots: int, profile_s: float
    ) -> None:
        self._workload = workload
        self._target = workload.target("float32")
        self._drafts: dict[str, PreTrainedModel | HeadWeights | None] = {
            PLAIN: None,
            "suffix": None,
            "model": workload.draft("float32"),
        }
        if head is not None:
            self._drafts |= dict.fromkeys(("head", *PAIRS), head)
        self._config = EngineConfig(max_running_samples=num_slots, probe=False)
        self._profile_s = profile_s
        self._profiles: dict[str, Profile] = {}
        self._expected: dict[int, list[int]] = {}
        self.mismatches = 0
        self.acceptance_length: dict[str, float] = {}

    @property
    def names(self) -> list[str]:
        """All that draft."""
        return [name for name in self._drafts if name != PLAIN]

    def rate(self, name: str, epochs: Sequence[Sequence[SampleRequest]], *, at_once: int) -> Rate:
        """Tokens a second of the last of some epochs, which follow each other in a new engine, by `goodput`.

        So many samples run at once, and all of them end before the next ones begin.
        """
        adaptive = {} if name == PLAIN else {"policy": "goodput"}

        def measured() -> float:
            engine = self.engine(name, **adaptive)
            for requests in epochs[:-1]:
                self._compare(engine.generate(requests))
            last, done = epochs[-1], []
            before, started = engine.stats, time.perf_counter()
            for first in range(0, len(last), at_once):
                done += engine.generate(last[first : first + at_once])
            seconds = time.perf_counter() - started
            self._compare(done)
            spent = engine.stats - before
            self.acceptance_length[name] = spent.mean_acceptance_length
            return spent.num_emitted_tokens / seconds

        return measured

    def depths(self, name: str, requests: Sequence[SampleRequest]) -> Depths:
        """Decode one sample at a time by the table's plan."""
        plan = CHAIN if name == "suffix" else TREE
        engine = self.engine(name, policy="fixed", **plan)
        engine.step_log = []
        for request in requests:
            self._compare(engine.generate([request]))
        records = [record for record in engine.step_log if record.budget.depth == plan["depth"]]
        accepted = np.array([record.num_accepted_tokens for record in records])
        reached = [float((accepted >= depth).mean()) for depth in range(plan["depth"] + 1)]
        level_s = np.median([record.draft_s for record in records]) / plan["depth"]
        return Depths(
            mean_length=1.0 + float(accepted.mean()),
            by_depth=[b / a for a, b in pairwise(reached) if a > 0],
            level_share=float(level_s) / self.plain_step_s,
        )

    @cached_property
    def plain_step_s(self) -> float:
        """Seconds of a plain decode step of one sample."""
        engine = self.engine(PLAIN)
        engine.step_log = []
        self._compare(engine.generate(self._workload.requests()[:2]))
        return float(np.median([record.step_s for record in engine.step_log]))

    def engine(self, name: str, **speculation: object) -> Engine:
        """A new engine: what one round has said must not help the next."""
        drafts = PAIRS.get(name, {"drafter": "none" if name == PLAIN else name})
        settings = SpeculationConfig.model_validate(
            {"policy": "off" if name == PLAIN else "fixed", **drafts, **speculation}
        )
        profile = self.profile(name) if settings.policy == "goodput" else None
        return self._build(settings, self._drafts[name], profile=profile)

    def _compare(self, done: Sequence[Completion]) -> None:
        """A sample's tokens are those that were first seen of it, whatever drafted: keys tell samples apart."""
        for completion in done:
            tokens = completion.token_ids.tolist()
            self.mismatches += self._expected.setdefault(completion.key.sample_index, tokens) != tokens

    def _build(
        self, settings: SpeculationConfig, draft: PreTrainedModel | HeadWeights | None, **more
    ) -> Engine:
        return build_engine(
            self._target,
            draft,
            engine=self._config,
            speculation=settings,
            max_total_tokens=self._workload.max_total_tokens,
            vocab_size=self._workload.vocab_size,
            **more,
        )

    def profile(self, name: str) -> Profile:
        """What the policy goes by; a pair has that of what computes."""
        kept = PAIRS.get(name, {"drafter": name})["drafter"]
        if kept not in self._profiles:
            self._profiles[kept] = self._measured(kept)
        return self._profiles[kept]

    def _measured(self, name: str) -> Profile:
        workload, draft, looks_up = self._workload, self._drafts[name], name == "suffix"
        settings = SpeculationConfig.model_validate({"drafter": name, "policy": "goodput"})
        engine = self._build(
            settings,
            draft,
            policy=Placeholder(MAX_PROFILED_NODES),
            drafter=RandomChains(workload.vocab_size) if looks_up else None,
        )
        provenance = provenance_of(
            self._target,
            draft,
            engine=self._config,
            dtype="float32",
            sampling=workload.sampling,
            max_total_tokens=workload.max_total_tokens,
        )
        make = make_verification_profile if looks_up else make_profile
        # on other samples than those that are measured
        requests = workload.requests(first_index=100_000)
        return make(engine, requests, provenance, budget_s=self._profile_s).profile
