"""The real model's samples under forced moves between two instances, by every drafter, against plain decoding alone.

Most are drafted by a draft model in trees, some by each other drafter; the head is one made in a minute or two.
Tokens and log-probabilities are compared bit by bit; those of plain decoding with a plain Hugging Face forward too.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from rich.console import Console

from benchmarks.contestants.made_head import bench_head
from benchmarks.moving.exact import count_mismatches
from benchmarks.support.actor_pool import ActorPool, bench_ray
from benchmarks.support.reference import compare_with_reference
from benchmarks.support.result import write_result
from benchmarks.support.timing import new_engine
from benchmarks.support.workload import Workload, real_workload
from rlhfspec.core.config import EngineConfig, ReallocationConfig, SpeculationConfig
from rlhfspec.core.records import Completion, SampleKey, SampleRequest
from rlhfspec.policies.migration.move_messages import MoveOutcome
from rlhfspec.policies.reallocation.forced import ForcedMoves

SAMPLINGS: tuple[dict[str, float], ...] = ({"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9})
MAX_NEW_TOKENS = {"quick": 64, "default": 128, "full": 128}
NUM_PROMPTS = {"quick": 4, "default": 120, "full": 240}
SLOTS = 16
AT_ONCE = 48
"Requests of one rollout."
INTERVAL_S = 0.5
"Between forced moves: a decode step takes a tenth of a second, and samples are to decode in between."
REFERENCE_ONE_IN = {"quick": 2, "default": 4, "full": 4}
REFERENCE_TOLERANCE = 1e-4
PLAIN = SpeculationConfig(policy="off")
TREE = SpeculationConfig(policy="fixed", num_nodes=4, depth=3, branching=2)
OTHERS = {
    "head": SpeculationConfig(policy="fixed", drafter="head", num_nodes=4, depth=3, branching=2),
    "head_suffix": SpeculationConfig(
        policy="fixed", drafter="head", look_up="suffix", num_nodes=4, depth=3, branching=2
    ),
    "suffix": SpeculationConfig(policy="fixed", drafter="suffix", num_nodes=6),
}
"Drafters that decode the first rollout's requests again."


@dataclass(slots=True, kw_only=True)
class RealTally:
    """Sums over everything compared."""

    samples: int = 0
    tokens: int = 0
    differing_samples: int = 0
    differing_tokens: int = 0
    missing_samples: int = 0
    migrations: int = 0
    recomputations: int = 0
    accepted_draft_tokens: int = 0
    reference_tokens: int = 0
    reference_mismatches: int = 0
    near_ties: int = 0
    logprob_max_abs_error: float = 0.0

    @property
    def exact(self) -> bool:
        """True when nothing differed and something was moved."""
        faults = self.differing_samples + self.missing_samples + self.reference_mismatches
        return faults == 0 and self.logprob_max_abs_error <= REFERENCE_TOLERANCE and self.migrations > 0


def run_exactness(*, out: Path, mode: str, data: Path | None, console: Console) -> int:
    """Write OUT/exactness_real.json; returns 1 when anything differed, 0 also when there is no model."""
    workload = real_workload(
        NUM_PROMPTS[mode], data=data, max_new_tokens=MAX_NEW_TOKENS[mode], console=console
    )
    if workload is None:
        return 0
    tally = RealTally()
    requests = _requests(workload)
    with bench_ray("bench-exactness-real"):
        plain = _plainly(workload, requests)
        console.print(f"plain decoding: {sum(done.num_tokens for done in plain.values()):,} tokens")
        _move(workload, requests, plain, tally, console)
        accepted = {}
        for name, speculation in OTHERS.items():
            before = tally.accepted_draft_tokens
            console.print(f"drafter {name}")
            _move(workload, requests[:AT_ONCE], plain, tally, console, speculation)
            accepted[f"{name}_accepted_tokens"] = float(tally.accepted_draft_tokens - before)
    model = workload.target("float32")
    for request in requests[:: REFERENCE_ONE_IN[mode]]:
        result = compare_with_reference(model, request, plain[request.key], workload.vocab_size)
        tally.reference_tokens += plain[request.key].num_tokens
        tally.reference_mismatches += result.num_mismatches
        tally.near_ties += result.num_near_ties
        tally.logprob_max_abs_error = max(tally.logprob_max_abs_error, result.logprob_max_abs_error)
        for line in result.evidence:
            console.print(line)
    figures = {field.name: float(getattr(tally, field.name)) for field in fields(tally)} | accepted
    write_result(
        out, "exactness_real", figures, provenance={"mode": mode, "data": data.name if data else None}
    )
    console.print(figures)
    return 0 if tally.exact else 1


def _requests(workload: Workload) -> list[SampleRequest]:
    """Both samplings of every prompt, shuffled; without stop tokens, so that samples live long enough to move."""
    requests = [
        request
        for index, changes in enumerate(SAMPLINGS)
        for request in workload.requests(index * len(workload.prompts), **changes)
    ]
    random.Random(0).shuffle(requests)
    return [_without_stops(request) for request in requests]


def _without_stops(request: SampleRequest) -> SampleRequest:
    return replace(request, sampling=replace(request.sampling, stop_token_ids=()))


def _plainly(workload: Workload, requests: Sequence[SampleRequest]) -> dict[SampleKey, Completion]:
    engine = new_engine(
        workload.target("float32"),
        None,
        PLAIN,
        batch_size=SLOTS,
        max_total_tokens=workload.max_total_tokens,
        vocab_size=workload.vocab_size,
    )
    return {completion.key: completion for completion in engine.generate(requests)}


def _move(
    workload: Workload,
    requests: Sequence[SampleRequest],
    plain: Mapping[SampleKey, Completion],
    tally: RealTally,
    console: Console,
    speculation: SpeculationConfig = TREE,
) -> None:
    pool = ActorPool(
        workload,
        engine=EngineConfig(max_running_samples=SLOTS, probe=False),
        speculation=speculation,
        migration=ReallocationConfig(transfer_share=1.0),
        head=bench_head(workload, "quick")[0] if speculation.drafter == "head" else None,
    )
    try:
        for first in range(0, len(requests), AT_ONCE):
            some = requests[first : first + AT_ONCE]
            moves = ForcedMoves(rate=0.3, seed=first, recompute_share=0.1)
            outcome = pool.rollout(some, reallocation=moves, interval_s=INTERVAL_S)
            done = outcome.completions
            moved = [move for move in outcome.moves if move.outcome == MoveOutcome.MOVED]
            tally.migrations += sum(move.order.mode == "migrate" for move in moved)
            tally.recomputations += sum(move.order.mode == "recompute" for move in moved)
            tally.samples += len(done)
            tally.tokens += sum(completion.num_tokens for completion in done.values())
            tally.accepted_draft_tokens += sum(each.num_accepted_tokens for each in done.values())
            tally.missing_samples += len(some) - len(done)
            tally.differing_samples += count_mismatches(done, plain)
            tally.differing_tokens += sum(_differing(done[key], plain[key]) for key in done)
            console.print(
                f"{tally.tokens:,} tokens, {tally.migrations} migrations, {tally.recomputations} recomputations, "
                f"{tally.differing_samples} samples differ"
            )
    finally:
        pool.close()


def _differing(a: Completion, b: Completion) -> int:
    """Positions whose tokens differ; positions that only one of them has count too."""
    both = min(a.num_tokens, b.num_tokens)
    return int((a.token_ids[:both] != b.token_ids[:both]).sum()) + abs(a.num_tokens - b.num_tokens)
