"""Drafters that need no model of their own, under the adaptive policy, on SmolLM2-135M-Instruct with chat prompts.

`worst_over_plain`: one response a prompt at temperature 1, where little repeats: drafting may not cost anything.
`suffix_repeat_over_plain`: eight responses a prompt at temperature 0.6, the second time over the same prompts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

from benchmarks.real.model import real_workload
from benchmarks.support.result import write_result
from benchmarks.support.timing import Figures, Rate, interleaved, ratios
from benchmarks.support.workload import Workload
from core.config import EngineConfig, SpeculationConfig
from core.records import Completion, SampleRequest, SamplingParams
from engine.build import build_engine
from engine.calibration.engine_provenance import provenance_of
from engine.calibration.profiler import MAX_PROFILED_NODES, Placeholder, make_verification_profile
from engine.calibration.random_chains import RandomChains
from engine.engine import Engine
from profiles.profile import Profile

BATCH_SIZES = {"quick": (8,), "default": (1, 8), "full": (1, 4, 8, 16)}
MAX_NEW_TOKENS = {"quick": 48, "default": 96, "full": 128}
ROUNDS = {"quick": 1, "default": 2, "full": 4}
PROFILE_S = {"quick": 12.0, "default": 30.0, "full": 60.0}
GROUP = 8
REPEATED_PROMPTS = {"quick": 1, "default": 4, "full": 8}
REPEAT_TEMPERATURE = 0.6
CONTESTANTS = {
    "plain": SpeculationConfig(policy="off", drafter="none"),
    "ngram": SpeculationConfig(policy="goodput", drafter="ngram"),
    "suffix": SpeculationConfig(policy="goodput", drafter="suffix"),
}


def run(*, out: Path, mode: str, data: Path | None) -> int:
    """Write OUT/drafters.json; returns 0, or 1 when a token differs from plain decoding's."""
    console = Console()
    most = max(*BATCH_SIZES[mode], REPEATED_PROMPTS[mode])
    workload = real_workload(most, data=data, max_new_tokens=MAX_NEW_TOKENS[mode], console=console)
    if workload is None:
        return 0
    figures, rows = Figures(), []
    mismatches = 0
    worst: list[float] = []
    for size in BATCH_SIZES[mode]:
        engines = _Engines(workload, size, PROFILE_S[mode])
        requests = workload.requests()[:size]
        taken = interleaved({name: engines.rate(name, [requests]) for name in CONTESTANTS}, ROUNDS[mode])
        mismatches += engines.mismatches
        for name in ("ngram", "suffix"):
            worst.append(figures.keep(f"{name}_over_plain_b{size}", ratios(taken, name, "plain")))
        rows += _rows(f"b{size}", taken)
    engines = _Engines(workload, GROUP, PROFILE_S[mode])
    first, second = (
        _grouped(workload.requests()[: REPEATED_PROMPTS[mode]], number * 10_000) for number in (0, 1)
    )
    taken = interleaved({name: engines.rate(name, [first, second]) for name in CONTESTANTS}, ROUNDS[mode])
    mismatches += engines.mismatches
    for name in ("ngram", "suffix"):
        figures.keep(f"{name}_repeat_over_plain", ratios(taken, name, "plain"))
        figures.values[f"{name}_repeat_acceptance_length"] = engines.acceptance_length[name]
    rows += _rows("repeat", taken)
    figures.values |= {"worst_over_plain": min(worst), "mismatches": float(mismatches)}
    pq.write_table(pa.Table.from_pylist(rows), out / "drafters.parquet")
    provenance = {
        "mode": mode,
        "rounds": ROUNDS[mode],
        "num_threads": 1,
        "data": data.name if data else None,
    }
    write_result(out, "drafters", figures.values, figures.intervals, provenance=provenance)
    console.print(figures.values)
    return 1 if mismatches else 0


class _Engines:
    """New engines for every round: what one round has said must not help the next."""

    def __init__(self, workload: Workload, num_slots: int, profile_s: float) -> None:
        self._workload = workload
        self._target = workload.target("float32")
        self._config = EngineConfig(max_running_samples=num_slots, probe=False)
        self._plain: dict[int, list[int]] = {}
        self.mismatches = 0
        self.acceptance_length: dict[str, float] = {}
        self._profile = self._profiled(profile_s)

    def rate(self, name: str, epochs: Sequence[Sequence[SampleRequest]]) -> Rate:
        """Tokens a second of the last of some epochs, which follow each other in one engine."""

        def measured() -> float:
            engine = self._engine(CONTESTANTS[name], self._profile)
            for requests in epochs[:-1]:
                self._compare(engine.generate(requests))
            before, started = engine.stats, time.perf_counter()
            done = engine.generate(epochs[-1])
            seconds = time.perf_counter() - started
            self._compare(done)
            spent = engine.stats - before
            self.acceptance_length[name] = spent.mean_acceptance_length
            return spent.num_emitted_tokens / seconds

        return measured

    def _compare(self, done: Sequence[Completion]) -> None:
        for completion in done:
            tokens = completion.token_ids.tolist()
            self.mismatches += self._plain.setdefault(completion.key.sample_index, tokens) != tokens

    def _engine(self, speculation: SpeculationConfig, profile: Profile | None, **more) -> Engine:
        return build_engine(
            self._target,
            None,
            engine=self._config,
            speculation=speculation,
            max_total_tokens=self._workload.max_total_tokens,
            vocab_size=self._workload.vocab_size,
            profile=profile,
            **more,
        )

    def _profiled(self, budget_s: float) -> Profile:
        workload = self._workload
        engine = self._engine(
            CONTESTANTS["suffix"],
            None,
            drafter=RandomChains(workload.vocab_size),
            policy=Placeholder(MAX_PROFILED_NODES),
        )
        provenance = provenance_of(
            self._target,
            None,
            engine=self._config,
            dtype="float32",
            sampling=workload.sampling,
            max_total_tokens=workload.max_total_tokens,
        )
        return make_verification_profile(engine, workload.requests(), provenance, budget_s=budget_s).profile


def _grouped(requests: Sequence[SampleRequest], first: int) -> list[SampleRequest]:
    """Several responses to each prompt; their keys count from `first`."""
    return [
        replace(
            request,
            key=replace(request.key, sample_index=first + number * GROUP + place),
            sampling=_at(request.sampling),
        )
        for number, request in enumerate(requests)
        for place in range(GROUP)
    ]


def _at(sampling: SamplingParams) -> SamplingParams:
    return replace(sampling, temperature=REPEAT_TEMPERATURE)


def _rows(part: str, taken: dict[str, list[float]]) -> list[dict[str, object]]:
    return [
        {"part": part, "contestant": name, "tokens_per_s": value}
        for name, values in taken.items()
        for value in values
    ]
