"""Forced moves change no bit: whole rollouts of long samples, moved at random in both directions at once.

Of the real model most samples are drafted by a draft model in trees, some by each other drafter; the head is one made
in a minute or two. Tokens and log-probabilities are compared bit by bit with plain decoding, and plain decoding with a
plain Hugging Face forward.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from ...core.config import EngineConfig, ReallocationConfig, SpeculationConfig
from ...core.records import Completion, SampleKey, SampleRequest
from ...policies.migration.move_messages import MoveOutcome
from ..support.actor_pool import ActorPool, RolloutOutcome, bench_ray
from ..support.draft_head import bench_head
from ..support.harness import Bench
from ..support.reference import compare_with_reference, count_mismatches
from ..support.workload import Workload, real_workload
from .forced import ForcedMoves

SPECULATION = SpeculationConfig(policy="fixed", num_nodes=6, depth=4, branching=2)
MAX_ROLLOUTS = 12
SAMPLINGS: tuple[dict[str, float], ...] = ({"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9})
MAX_NEW_TOKENS = {"quick": 64, "default": 128, "full": 128}
NUM_PROMPTS = {"quick": 4, "default": 120, "full": 240}
SLOTS = 16
AT_ONCE = 48
"Requests of one rollout of the real model."
INTERVAL_S = {"demo": 0.05, "real": 0.5}
"Between forced moves: a decode step of the real model takes a tenth of a second, and samples are to decode in between."
REFERENCE_ONE_IN = {"quick": 2, "default": 4, "full": 4}
REFERENCE_TOLERANCE = 1e-4
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
class MoveTally:
    """Sums over rollouts under forced moves, whose samples are compared with the same ones unmoved."""

    samples: int = 0
    tokens: int = 0
    differing_samples: int = 0
    differing_tokens: int = 0
    missing_samples: int = 0
    migrations: int = 0
    recomputations: int = 0
    kept: int = 0
    alarms: int = 0
    accepted_draft_tokens: int = 0
    most_moves_of_a_sample: int = 0
    why_kept: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: RolloutOutcome, expected: Mapping[SampleKey, Completion], num_asked: int) -> None:
        """Count one rollout."""
        done = outcome.completions
        moved = [move for move in outcome.moves if move.outcome == MoveOutcome.MOVED]
        self.samples += len(done)
        self.tokens += sum(completion.num_tokens for completion in done.values())
        self.differing_samples += count_mismatches(done, expected)
        self.differing_tokens += sum(_differing(done[key], expected[key]) for key in done)
        self.missing_samples += num_asked - len(done)
        self.migrations += sum(move.order.mode == "migrate" for move in moved)
        self.recomputations += sum(move.order.mode == "recompute" for move in moved)
        self.kept += len(outcome.moves) - len(moved)
        self.alarms += len(outcome.alarms)
        self.accepted_draft_tokens += sum(each.num_accepted_tokens for each in done.values())
        most = max(Counter(move.order.key for move in moved).values(), default=0)
        self.most_moves_of_a_sample = max(self.most_moves_of_a_sample, most)
        others = (move for move in outcome.moves if move.outcome != MoveOutcome.MOVED)
        self.why_kept.update(move.why_ended[:80] for move in others)


def forced_moves(workload: Workload, *, at_least: int, transport: str) -> MoveTally:
    """Move until so many migrations have ended well; compare every sample with the run without moves."""
    workload = replace(
        workload, sampling=replace(workload.sampling, stop_token_ids=()), prompts=workload.prompts[:40]
    )
    tally, requests = MoveTally(), workload.requests()
    with ActorPool(
        workload,
        engine=EngineConfig(max_running_samples=32, probe=False),
        speculation=SPECULATION,
        migration=ReallocationConfig.model_validate({"transport": transport, "transfer_share": 1.0}),
    ) as pool:
        expected = pool.rollout(requests).completions
        for seed in range(MAX_ROLLOUTS):
            policy = ForcedMoves(rate=0.3, seed=seed, recompute_share=0.1)
            outcome = pool.rollout(requests, reallocation=policy, interval_s=INTERVAL_S["demo"])
            tally.add(outcome, expected, len(requests))
            if tally.migrations >= at_least:
                break
    return tally


def run_real(bench: Bench) -> int:
    """Write OUT/exactness_real.json; returns 1 when anything differed, 0 also when there is no model."""
    mode, console, figures = bench.mode, bench.console, bench.figures.values
    workload = real_workload(
        NUM_PROMPTS[mode], data=bench.data, max_new_tokens=MAX_NEW_TOKENS[mode], console=console
    )
    if workload is None:
        return 0
    tally, requests = MoveTally(), _requests(workload)
    with bench_ray("bench-exactness-real"):
        alone = workload.engine(max_running_samples=SLOTS).generate(requests)
        plain = {completion.key: completion for completion in alone}
        console.print(f"plain decoding: {sum(done.num_tokens for done in alone):,} tokens")
        _move(workload, requests, plain, tally, bench)
        for name, speculation in OTHERS.items():
            before = tally.accepted_draft_tokens
            console.print(f"drafter {name}")
            _move(workload, requests[:AT_ONCE], plain, tally, bench, speculation)
            figures[f"{name}_accepted_tokens"] = float(tally.accepted_draft_tokens - before)
    figures |= {each.name: float(getattr(tally, each.name)) for each in fields(tally)[:-1]}
    figures |= _referred(workload, requests[:: REFERENCE_ONE_IN[mode]], plain, bench)
    bench.write()
    faults = tally.differing_samples + tally.missing_samples + figures["reference_mismatches"]
    exact = faults == 0 and figures["logprob_max_abs_error"] <= REFERENCE_TOLERANCE
    return 0 if exact and tally.migrations > 0 else 1


def _referred(
    workload: Workload,
    requests: Sequence[SampleRequest],
    plain: Mapping[SampleKey, Completion],
    bench: Bench,
) -> dict[str, float]:
    """Plain decoding beside a teacher-forced Hugging Face forward."""
    model = workload.target("float32")
    results = [
        compare_with_reference(model, request, plain[request.key], workload.vocab_size)
        for request in requests
    ]
    for line in (line for result in results for line in result.evidence):
        bench.console.print(line)
    return {
        "reference_tokens": float(sum(plain[request.key].num_tokens for request in requests)),
        "reference_mismatches": float(sum(result.num_mismatches for result in results)),
        "near_ties": float(sum(result.num_near_ties for result in results)),
        "logprob_max_abs_error": max(result.logprob_max_abs_error for result in results),
    }


def _requests(workload: Workload) -> list[SampleRequest]:
    """Both samplings of every prompt, shuffled; without stop tokens, so that samples live long enough to move."""
    requests = [
        replace(request, sampling=replace(request.sampling, stop_token_ids=()))
        for index, changes in enumerate(SAMPLINGS)
        for request in workload.requests(index * len(workload.prompts), **changes)
    ]
    random.Random(0).shuffle(requests)
    return requests


def _move(
    workload: Workload,
    requests: Sequence[SampleRequest],
    plain: Mapping[SampleKey, Completion],
    tally: MoveTally,
    bench: Bench,
    speculation: SpeculationConfig = TREE,
) -> None:
    with ActorPool(
        workload,
        engine=EngineConfig(max_running_samples=SLOTS, probe=False),
        speculation=speculation,
        migration=ReallocationConfig(transfer_share=1.0),
        head=bench_head(workload) if speculation.drafter == "head" else None,
    ) as pool:
        for first in range(0, len(requests), AT_ONCE):
            some = requests[first : first + AT_ONCE]
            moves = ForcedMoves(rate=0.3, seed=first, recompute_share=0.1)
            outcome = pool.rollout(some, reallocation=moves, interval_s=INTERVAL_S["real"])
            tally.add(outcome, plain, len(some))
            bench.console.print(
                f"{tally.tokens:,} tokens, {tally.migrations} migrations, {tally.recomputations} recomputations, "
                f"{tally.differing_samples} samples differ"
            )


def _differing(a: Completion, b: Completion) -> int:
    """Positions whose tokens differ; positions that only one of them has count too."""
    both = min(a.num_tokens, b.num_tokens)
    return int((a.token_ids[:both] != b.token_ids[:both]).sum()) + abs(a.num_tokens - b.num_tokens)
