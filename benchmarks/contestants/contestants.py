"""Drafters side by side on one target: engines, profiles, rates, acceptance by depth, rollouts, training runs.

The head is made once from other prompts than those it is measured on, and kept in the cache.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.moving.rollouts import requests_of
from benchmarks.rlhf import Metrics, train
from benchmarks.support.actor_pool import ActorPool, bench_ray
from benchmarks.support.result import ROOT
from benchmarks.support.timing import Figures, Rate
from benchmarks.support.workload import Workload, default_cache_dir, job
from rlhfspec.core.config import EngineConfig, ReallocationConfig, SpeculationConfig
from rlhfspec.core.files import whole_folder
from rlhfspec.core.records import Completion, Prompt, SampleRequest
from rlhfspec.engine.build import build_engine
from rlhfspec.engine.calibration.engine_provenance import provenance_of
from rlhfspec.engine.calibration.profiler import (
    MAX_PROFILED_NODES,
    Placeholder,
    make_profile,
    make_verification_profile,
)
from rlhfspec.engine.calibration.random_chains import RandomChains
from rlhfspec.engine.drafters.head.head_weights import HeadWeights, load_head, save_head
from rlhfspec.engine.engine import Engine
from rlhfspec.learning.drafts.make_head import HeadRecipe, make_head
from rlhfspec.policies.simulate.simulation_records import drawn_lengths
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


BUDGET_S = 900.0
NUM_TOKENS = {"quick": 2_000, "default": 36_000, "full": 36_000}
FACTS_FILE = "made.json"


def head_folder(workload: Workload, mode: str) -> Path:
    """Where it is kept."""
    return default_cache_dir() / (f"bench-head-{workload.name}" + ("-quick" if mode == "quick" else ""))


def bench_head(workload: Workload, mode: str) -> tuple[HeadWeights, dict[str, float]]:
    """Return a head made from the workload's own prompts, at temperature 1, and what making it took."""
    folder = head_folder(workload, mode)
    target = workload.target("float32")
    if not (folder / "config.json").is_file():
        with job("making a draft head") as tick:
            made = make_head(
                target,
                workload.prompts,
                sampling=replace(workload.sampling, max_new_tokens=256),
                vocab_size=workload.vocab_size,
                budget_s=BUDGET_S,
                recipe=HeadRecipe(num_tokens=NUM_TOKENS[mode]),
                progress=tick,
            )
        facts = {
            "head_make_s": made.seconds,
            "head_own_tokens": float(made.num_tokens),
            "head_weights_m": made.head.num_trained / 1e6,
        }
        with whole_folder(folder) as partial:
            save_head(partial, made.head)
            (partial / FACTS_FILE).write_text(json.dumps(facts))
    layers = int(target.config.get_text_config().num_hidden_layers)
    return load_head(folder, num_target_layers=layers), json.loads((folder / FACTS_FILE).read_text())


CODE = (
    "Write a Python function that returns the longest common prefix of a list of strings.",
    "Write a SQL query that finds the three best paid employees of every department.",
    "Explain what this does and rewrite it without recursion: def f(n): return n if n < 2 else f(n-1) + f(n-2)",
    "Write a JavaScript function that debounces another function.",
    "Implement a queue with two stacks in Java.",
    "Write a bash script that renames all .jpeg files in a folder to .jpg.",
    "Write unit tests for a function that parses dates in the form YYYY-MM-DD.",
    "Write a C function that reverses a linked list in place.",
)
CHAT = (
    "What should I see in Lisbon in two days?",
    "Write a short poem about the first snow.",
    "My neighbour plays loud music at night. How do I ask them to stop politely?",
    "Summarise the plot of Romeo and Juliet in five sentences.",
    "Give me a recipe for pancakes without eggs.",
    "What is the difference between weather and climate?",
    "Help me write a thank-you note to my teacher.",
    "Which exercises help against back pain?",
)


def other_prompts(tokenizer: PreTrainedTokenizerBase, questions: tuple[str, ...]) -> list[Prompt]:
    """The questions as chat turns."""
    prompts = []
    for number, question in enumerate(questions):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        prompts.append(Prompt(prompt_id=number, token_ids=np.array(ids, dtype=np.int64), text=question))
    return prompts


CONFIG = ROOT / "configs" / "smollm2_grpo.yaml"
ITERATIONS = {"default": 12, "full": 12}
ROUNDS = {"default": 1, "full": 3}
LAST = 3
"Iterations that acceptance is told of."
SHAPE = (
    "speculation.drafter=head",
    "speculation.policy=fixed",
    "speculation.num_nodes=4",
    "speculation.depth=2",
    "speculation.branching=2",
)
WAYS = {"frozen": ("drafter_training.refit=false",), "adapted": ("drafter_training.spot=on",)}


def adapted_over_frozen(out: Path, mode: str, head: Path, figures: Figures) -> int:
    """Keep the figures of both; returns how many samples' rewards differ, for no token depends on the head."""
    common = [*SHAPE, f"models.draft={head}", f"run.iterations={ITERATIONS[mode]}"]
    acceptance, step_s, generate_s = ([], [], [])
    differing = 0
    for number in range(ROUNDS[mode]):
        runs: dict[str, Metrics] = {}
        for name in WAYS if number % 2 == 0 else reversed(WAYS):
            runs[name] = train(CONFIG, out, name, [*common, *WAYS[name]])
        adapted, frozen = runs["adapted"], runs["frozen"]
        acceptance.append(_ended(adapted) / _ended(frozen))
        # of every iteration but the first, whose actors are still warming up
        pairs = list(zip(adapted[1:], frozen[1:], strict=True))
        step_s += [a["time/iteration_s"] / f["time/iteration_s"] for a, f in pairs]
        generate_s += [a["time/generate_s"] / f["time/generate_s"] for a, f in pairs]
        differing += sum(a["reward/mean"] != f["reward/mean"] for a, f in zip(adapted, frozen, strict=True))
        figures.values["head_published_share"] = statistics.fmean(
            row.get("draft/refit_taken", 0.0) for row in adapted
        )
        figures.values["frozen_acceptance_length"] = _ended(frozen)
        figures.values["reward_shift"] = frozen[-1]["reward/mean"] - frozen[0]["reward/mean"]
    figures.keep("adapted_over_frozen_acceptance", acceptance)
    figures.keep("adapted_step_time_over_frozen", step_s)
    figures.keep("spot_rollout_slowdown", generate_s)
    return differing


def _ended(metrics: Metrics) -> float:
    """Mean acceptance length of the last iterations."""
    return statistics.fmean(row["rollout/mean_acceptance_length"] for row in metrics[-LAST:])


INSTANCES = 2
SAMPLES = {"default": 32, "full": 64}
MAX_TOKENS = {"default": 128, "full": 256}
ROLLOUT_ROUNDS = {"default": 2, "full": 3}
PROFILE_S = 40.0


def head_rollouts(workload: Workload, head: HeadWeights, mode: str) -> tuple[list[float], int]:
    """Return plain decoding's seconds over the head's, round by round, and how many samples' tokens differ."""
    samples, most = SAMPLES[mode], MAX_TOKENS[mode]
    prompts = [workload.prompts[index % len(workload.prompts)] for index in range(samples)]
    sampling = replace(workload.sampling, max_new_tokens=most)
    workload = replace(workload, prompts=prompts, sampling=sampling)
    lengths = drawn_lengths("long_tail", samples, INSTANCES, max_new_tokens=most, seed=0)
    engine = EngineConfig(max_running_samples=samples // INSTANCES, probe=False)
    profile = Contestants(workload, head, num_slots=samples // INSTANCES, profile_s=PROFILE_S).profile("head")
    ways = {
        "plain": (SpeculationConfig(policy="off", drafter="none"), None),
        "head": (SpeculationConfig(policy="goodput", drafter="head"), head),
    }
    taken: list[float] = []
    expected: dict[int, list[int]] = {}
    differing = 0
    with bench_ray("bench-drafters"):
        pools = {
            name: ActorPool(
                workload,
                engine=engine,
                speculation=speculation,
                migration=ReallocationConfig(),
                head=drafts,
                profile=None if drafts is None else profile,
                num_cpus=0.4,
            )
            for name, (speculation, drafts) in ways.items()
        }
        try:
            for number in range(ROLLOUT_ROUNDS[mode] + 1):
                seconds = {}
                for name in ways if number % 2 == 0 else reversed(ways):
                    outcome = pools[name].rollout(requests_of(workload, lengths))
                    seconds[name] = outcome.seconds
                    for completion in outcome.completions.values():
                        tokens = completion.token_ids.tolist()
                        known = expected.setdefault(completion.key.sample_index, tokens)
                        differing += known != tokens
                # the first round warms up
                if number:
                    taken.append(seconds["plain"] / seconds["head"])
        finally:
            for pool in pools.values():
                pool.close()
    return taken, differing
