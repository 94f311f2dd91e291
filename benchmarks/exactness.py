"""Same key, same tokens: every plan, batch, order of admission and place gives the same bits (design 3.1).

For each pair (demo; with `--data` one made from that file too), dtype and sampling: plain decoding alone, then a
chain and two trees of a draft model, every other drafter (look-ups, a head made for it in some seconds),
mixtures, and the adaptive policy (profile, online correction, a draft model or head exchanged half way as a refit
would) under other batch sizes and orders of admission, then two Ray actors; then in groups of two and four ranks, and
moved between groups. Tokens and both log-probabilities are compared bitwise with plain decoding on one rank; plain
decoding in float32 is compared with a teacher-forced Hugging Face forward.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from rich.table import Table

from ..cluster.observe.console import PipeConsole
from ..core.config import (
    EngineConfig,
    SpeculationConfig,
)
from ..core.decode_records import GenerationStats
from ..core.records import Completion, SampleKey, SampleRequest
from ..core.weight_records import WeightManifest
from ..engine.calibration.profiler import MAX_PROFILED_NODES, Placeholder
from ..engine.drafters.head.head_weights import HeadWeights
from ..engine.drafters.head.published_head import pack_head
from ..engine.engine import Engine
from ..engine.group.ranks import GroupRanks
from ..engine.weights.chunks import pack_weights, unpack_weights
from ..profiles.profile import Profile
from .moving.between_groups import groups, move_between
from .moving.exact import run_real
from .support.actor_pool import bench_ray, generate_on_two_actors
from .support.draft_head import bench_head
from .support.harness import Bench
from .support.reference import compare_with_reference, count_mismatches
from .support.workload import Workload, demo_workload, gsm8k_workload, model_p


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One way to decode."""

    name: str
    batch_size: int
    speculation: SpeculationConfig


PLANS = (
    Plan(name="plain", batch_size=5, speculation=SpeculationConfig(policy="off")),
    Plan(name="plain, other batch", batch_size=16, speculation=SpeculationConfig(policy="off")),
    Plan(name="chain n=4", batch_size=3, speculation=SpeculationConfig(policy="fixed", num_nodes=4)),
    Plan(
        name="tree n=8 b=2",
        batch_size=8,
        speculation=SpeculationConfig(policy="fixed", num_nodes=8, depth=5, branching=2),
    ),
    Plan(
        name="tree n=16 b=3",
        batch_size=12,
        speculation=SpeculationConfig(policy="fixed", num_nodes=16, depth=6, branching=3),
    ),
    Plan(
        name="suffix",
        batch_size=6,
        speculation=SpeculationConfig(policy="fixed", drafter="suffix", num_nodes=6),
    ),
    Plan(
        name="head, tree n=8 b=3",
        batch_size=7,
        speculation=SpeculationConfig(policy="fixed", drafter="head", num_nodes=8, depth=4, branching=3),
    ),
    Plan(
        name="head beside look-ups",
        batch_size=8,
        speculation=SpeculationConfig(
            policy="fixed", drafter="head", look_up="suffix", num_nodes=8, depth=4, branching=2
        ),
    ),
)
ADAPTIVE = (
    Plan(name="goodput, draft exchanged", batch_size=9, speculation=SpeculationConfig(policy="goodput")),
    Plan(
        name="goodput beside look-ups, draft exchanged",
        batch_size=6,
        speculation=SpeculationConfig(policy="goodput", look_up="suffix"),
    ),
    Plan(
        name="goodput, head beside look-ups, head exchanged",
        batch_size=7,
        speculation=SpeculationConfig(policy="goodput", drafter="head", look_up="suffix"),
    ),
    Plan(
        name="goodput, look-ups alone",
        batch_size=8,
        speculation=SpeculationConfig(policy="goodput", drafter="suffix"),
    ),
)
"By a measured profile."
ACTOR_PLAN = PLANS[3]


SAMPLINGS: tuple[dict[str, float], ...] = ({}, {"top_p": 0.9}, {"temperature": 0.0})
REFERENCE_TOLERANCE = 1e-4
HEAD_PROMPTS = 64
"That the head is made from, at least."
KEEP_ONE_IN = {"float32": 1, "bfloat16": 4}
"Requests decoded in each dtype: bfloat16 is slow on processors without instructions for it."


PROFILE_S = 8.0
MOVES = {"quick": 40, "default": 200, "full": 1000}
"Between the groups of each pair."
GROUP_TOKENS = 40
"Of a response of model P, whose vocabulary four ranks can share."


@dataclass(slots=True, kw_only=True)
class Tally:
    """Sums over everything compared."""

    samples: int = 0
    tokens: int = 0
    accepted_draft_tokens: int = 0
    accepted_rank2_plus: int = 0
    accepted_looked_up: int = 0
    "beside a drafter that computes"
    moves_between_groups: int = 0
    mismatches: int = 0
    reference_mismatches: int = 0
    near_ties: int = 0
    logprob_max_abs_error: float = 0.0


def run(bench: Bench) -> int:
    """Run the benchmark, or on the real model; returns 1 when anything differed."""
    console, data = bench.console, bench.data
    if bench.is_real:
        return run_real(bench)
    num_prompts = {"quick": 6, "default": 24, "full": 128}[bench.mode]
    subjects = [_with_head(demo_workload(max(num_prompts, HEAD_PROMPTS)), num_prompts)]
    if data is not None:
        few = num_prompts // 2
        subjects.append(_with_head(gsm8k_workload(data, max(few, HEAD_PROMPTS)), few))
    else:
        console.print("no --data given: the pair made from real prompts is skipped")
    tally, rows = Tally(), bench.rows
    with bench_ray("bench-exactness"):
        for workload, head in subjects:
            for dtype in ("float32", "bfloat16"):
                rows += _compare_all(workload, head, dtype, tally, console)
    large = model_p(num_prompts, new_tokens=GROUP_TOKENS)
    for workload, head, sizes in ((*subjects[0], (1, 2)), (large, None, (1, 2, 4))):
        rows += _compare_groups(workload, head, sizes, tally, bench)
    _print(rows, console)
    bench.figures.values |= {name: float(getattr(tally, name)) for name in Tally.__dataclass_fields__}
    bench.write()
    exact = tally.mismatches == 0 and tally.reference_mismatches == 0
    return 0 if exact and tally.logprob_max_abs_error <= REFERENCE_TOLERANCE else 1


def _with_head(workload: Workload, num_prompts: int) -> tuple[Workload, HeadWeights]:
    """The workload's first prompts, and a head that all of them make in some seconds; it is kept."""
    return replace(workload, prompts=workload.prompts[:num_prompts]), bench_head(workload)


def _requests(workload: Workload) -> list[SampleRequest]:
    return [
        request
        for index, changes in enumerate(SAMPLINGS)
        for request in workload.requests(index * len(workload.prompts), **changes)
    ]


def _compare_groups(
    workload: Workload, head: HeadWeights | None, sizes: Sequence[int], tally: Tally, bench: Bench
) -> list[dict]:
    """Every plan in groups, and samples that move between them; without a head the plans that need none."""
    requests, rows = _requests(workload), list[dict]()
    plain, _ = _generate(workload, head, "float32", PLANS[0], requests)
    plans = [plan for plan in PLANS if head is not None or plan.speculation.drafter != "head"]

    def compared(plan: str, done: Mapping[SampleKey, Completion], stats: GenerationStats) -> None:
        rows.append(_row(workload, "float32", plan, plain, done, stats, tally))
        bench.console.print(f"{workload.name} {plan}: {rows[-1]['mismatches']} mismatches")

    with groups(sizes) as ranks:
        for size, plan in product(sizes, plans):
            if size > 1:
                mixed = _shuffled(requests, plan.name)
                compared(
                    f"{plan.name}, {size} ranks",
                    *_generate(workload, head, "float32", plan, mixed, ranks[size]),
                )
        plan = PLANS[3] if head is not None else PLANS[5]
        engines = [_engine(workload, head, "float32", plan, plan.speculation, of) for of in ranks.values()]
        done, moves = move_between(engines, _shuffled(requests, "groups"), at_most=MOVES[bench.mode])
    tally.moves_between_groups += moves
    assert done.keys() == plain.keys()
    compared(f"{plan.name}, {moves} moves between groups of {sizes}", done, _stats_of(done))
    return rows


def _compare_all(
    workload: Workload, head: HeadWeights, dtype: str, tally: Tally, console: PipeConsole
) -> list[dict]:
    requests = _requests(workload)[:: KEEP_ONE_IN[dtype]]
    rows = []
    plain: Mapping[SampleKey, Completion] = {}
    for plan in PLANS:
        done, stats = _generate(workload, head, dtype, plan, _shuffled(requests, plan.name))
        if not plain:
            plain = done
            if dtype == "float32":
                _check_reference(workload, requests, plain, tally, console)
        else:
            rows.append(_row(workload, dtype, plan.name, plain, done, stats, tally))
            console.print(f"{workload.name} {dtype} {plan.name}: {rows[-1]['mismatches']} mismatches")
    profiles: dict[str, Profile] = {}
    for plan in ADAPTIVE:
        done, stats = _generate_adaptively(
            workload, head, dtype, plan, profiles, _shuffled(requests, plan.name)
        )
        rows.append(_row(workload, dtype, plan.name, plain, done, stats, tally))
        console.print(f"{workload.name} {dtype} {plan.name}: {rows[-1]['mismatches']} mismatches")
    done = generate_on_two_actors(
        workload,
        _shuffled(requests, "actors"),
        dtype=dtype,
        engine=_engine_config(ACTOR_PLAN),
        speculation=ACTOR_PLAN.speculation,
    )
    busy = {completion.instance for completion in done.values()}
    name = f"{ACTOR_PLAN.name} on {len(busy)} Ray actors"
    rows.append(_row(workload, dtype, name, plain, done, _stats_of(done), tally))
    console.print(f"{workload.name} {dtype} {name}: {rows[-1]['mismatches']} mismatches")
    return rows


def _stats_of(done: Mapping[SampleKey, Completion]) -> GenerationStats:
    """What completions say of their drafts."""
    return GenerationStats(
        num_accepted_tokens=sum(completion.num_accepted_tokens for completion in done.values()),
        num_sample_steps=sum(completion.num_decode_steps for completion in done.values()),
    )


def _generate(
    workload: Workload,
    head: HeadWeights | None,
    dtype: str,
    plan: Plan,
    requests: Sequence[SampleRequest],
    ranks: GroupRanks | None = None,
) -> tuple[dict[SampleKey, Completion], GenerationStats]:
    engine = _engine(workload, head, dtype, plan, plan.speculation, ranks)
    done = {completion.key: completion for completion in engine.generate(requests)}
    return done, engine.stats


def _engine(
    workload: Workload,
    head: HeadWeights | None,
    dtype: str,
    plan: Plan,
    speculation: SpeculationConfig,
    ranks: GroupRanks | None = None,
    **more: Any,
) -> Engine:
    drafts = {"model": partial(workload.draft, dtype), "head": lambda: head}
    return workload.engine(
        speculation,
        drafts[speculation.drafter]() if speculation.has_draft else None,
        dtype=dtype,
        parts=more,
        ranks=ranks,
        max_running_samples=plan.batch_size,
    )


def _generate_adaptively(
    workload: Workload,
    head: HeadWeights,
    dtype: str,
    plan: Plan,
    profiles: dict[str, Profile],
    requests: Sequence[SampleRequest],
) -> tuple[dict[SampleKey, Completion], GenerationStats]:
    """Decode by a profile, measured where `profiles` has none; half way another draft arrives, with samples open."""
    drafter = plan.speculation.drafter if plan.speculation.has_draft else "model"
    if drafter not in profiles:
        profiles[drafter] = _measured(workload, head, dtype, plan, drafter)
    adaptive = _engine(workload, head, dtype, plan, plan.speculation, profile=profiles[drafter])
    for request in requests:
        adaptive.submit(request)
    done: dict[SampleKey, Completion] = {}
    exchanged = not plan.speculation.has_draft
    while adaptive.has_work:
        if not exchanged and len(done) >= len(requests) // 2:
            exchanged = True
            manifest, chunks = _next_head(head) if drafter == "head" else _next_draft(workload, dtype)
            adaptive.load_weights(manifest, unpack_weights(manifest, chunks))
        done |= {completion.key: completion for completion in adaptive.step()}
    return done, adaptive.stats


def _measured(workload: Workload, head: HeadWeights, dtype: str, plan: Plan, drafter: str) -> Profile:
    """The profile of a drafter that computes; look-ups go by its costs of verification."""
    settings = SpeculationConfig.model_validate({"policy": "goodput", "drafter": drafter})
    engine = _engine(workload, head, dtype, plan, settings, policy=Placeholder(MAX_PROFILED_NODES))
    draft = head if drafter == "head" else workload.draft(dtype)
    return workload.profile(engine, draft, dtype=dtype, budget_s=PROFILE_S).profile


def _next_draft(workload: Workload, dtype: str) -> tuple[WeightManifest, list[np.ndarray]]:
    """The draft model, a little moved, as version 1."""
    model = workload.draft(dtype)
    with torch.no_grad():
        for weight, moved in zip(model.parameters(), _moved(model.parameters()), strict=True):
            weight.copy_(moved)
    return pack_weights(model, name="draft", weight_version=1)


def _next_head(head: HeadWeights) -> tuple[WeightManifest, list[np.ndarray]]:
    """The head, a little moved, as version 1."""
    trained = dict(zip(head.trained, _moved(head.trained.values()), strict=True))
    return pack_head(head.with_trained(trained), weight_version=1)


def _moved(weights: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [weight + torch.randn_like(weight) * weight.std(correction=0) * 0.1 for weight in weights]


def _engine_config(plan: Plan) -> EngineConfig:
    return EngineConfig(max_running_samples=plan.batch_size)


def _shuffled(requests: Sequence[SampleRequest], name: str) -> list[SampleRequest]:
    order = list(requests)
    random.Random(name).shuffle(order)
    return order


def _row(
    workload: Workload,
    dtype: str,
    plan: str,
    plain: Mapping[SampleKey, Completion],
    done: Mapping[SampleKey, Completion],
    stats: GenerationStats,
    tally: Tally,
) -> dict:
    mismatches = count_mismatches(plain, done)
    tokens = sum(completion.num_tokens for completion in done.values())
    tally.samples += len(done)
    tally.tokens += tokens
    tally.mismatches += mismatches
    tally.accepted_draft_tokens += stats.num_accepted_tokens
    tally.accepted_rank2_plus += stats.num_accepted_rank2_plus
    tally.accepted_looked_up += stats.num_accepted_looked_up
    return {
        "pair": workload.name,
        "dtype": dtype,
        "plan": plan,
        "samples": len(done),
        "tokens": tokens,
        "accepted": stats.num_accepted_tokens,
        "accepted_rank2_plus": stats.num_accepted_rank2_plus,
        "accepted_looked_up": stats.num_accepted_looked_up,
        "tokens_per_step": tokens / max(stats.num_sample_steps, 1),
        "mismatches": mismatches,
    }


def _check_reference(
    workload: Workload,
    requests: Sequence[SampleRequest],
    plain: Mapping[SampleKey, Completion],
    tally: Tally,
    console: PipeConsole,
) -> None:
    model = workload.target("float32")
    for request in requests:
        result = compare_with_reference(model, request, plain[request.key], workload.vocab_size)
        tally.reference_mismatches += result.num_mismatches
        tally.near_ties += result.num_near_ties
        for line in result.evidence:
            console.print(f"{workload.name} against the reference: {line}")
        tally.logprob_max_abs_error = max(tally.logprob_max_abs_error, result.logprob_max_abs_error)


def _print(rows: list[dict], console: PipeConsole) -> None:
    table = Table(title="tokens and log-probabilities against plain decoding, bitwise")
    for name in rows[0]:
        table.add_column(name.replace("_", " "))
    for row in rows:
        table.add_row(*(f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()))
    console.print(table)
