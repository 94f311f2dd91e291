"""Draft policies side by side: pairs, constant batches, whole rollouts, a drafter that dies, refits.

`large` is the demo target grown to 16 layers that compute the same function (`rlhfspec.learning.models.net2net`): the
same tokens and acceptance at twice the cost, so that its draft costs under a twentieth of a target forward. What is
timed at a constant batch are decode steps with a full batch only.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from ...core.config import SpeculationConfig
from ...core.decode_records import PLAIN as PLAIN_BUDGET
from ...core.decode_records import Budget, DecodeState, GenerationStats, StepRecord
from ...core.errors import ConfigError
from ...core.records import SampleRequest
from ...engine.calibration.profiler import (
    MAX_PROFILED_NODES,
    SHAPES,
    MadeProfile,
    Placeholder,
    record_drafts,
    yield_curves,
)
from ...engine.drafters.model_drafter import ModelDrafter
from ...engine.engine import Engine
from ...engine.model.llama_model import LlamaModel
from ...engine.weights.loading import load_causal_lm
from ...learning.models.make import PairPaths
from ...learning.models.net2net import deepen
from ...policies.drafting.baselines import (
    bounded_tree,
    clip_depth,
    max_tree_nodes,
    narrowest_width,
)
from ...policies.drafting.draft_policy import DraftPolicy
from ...profiles.acceptance import fit_acceptance
from ...profiles.profile import Profile
from ...profiles.quality import acceptance_quality
from ...profiles.recording import DraftRecording, join_nodes
from ..speed.rates import make_draft
from ..support.timing import Rate, engine_rate, hugging_face_rate, interleaved
from ..support.workload import (
    PROFILE_INDEX,
    Workload,
    default_cache_dir,
    demo_workload,
    gsm8k_workload,
)

Row = tuple[int, int, int, int]
"max_batch, num_nodes, depth, branching"

DEFAULT_TABLE: tuple[Row, ...] = (
    (1, 16, 8, 2),
    (4, 8, 8, 1),
    (20, 4, 4, 1),
    (32, 2, 2, 1),
)
"""TLT's released ranges (1, 2 to 4, 5 to 20, more) and its switch-on rule: nothing is drafted above 32 samples.

The shapes are ours, in proportion to its trees of 64 nodes for GPUs; a lone sample alone affords breadth.
"""


class BatchTablePolicy:
    """The first row whose `max_batch` holds the batch decides; above the last row nothing is drafted."""

    def __init__(self, table: tuple[Row, ...] = DEFAULT_TABLE, *, max_nodes: int, max_depth: int) -> None:
        """Make the policy.

        Args:
            table: rows of max_batch, num_nodes, depth, branching; num_nodes 0 is plain decoding. A chain
                (branching 1) has no more nodes than levels.
            max_nodes: most draft nodes verified per sample; larger rows are cut.
            max_depth: most levels drafted; deeper rows are cut.

        Raises:
            ConfigError: the rows' batch sizes do not ascend.
        """
        sizes = [row[0] for row in table]
        if sizes != sorted(set(sizes)) or min(sizes, default=1) < 1:
            raise ConfigError(f"the batch sizes of a batch table must ascend from 1 or more, got {sizes}")
        self._rows = [
            (
                size,
                bounded_tree(
                    num_nodes, depth, branching, f"batch table: up to {size} samples", max_nodes, max_depth
                ),
            )
            for size, num_nodes, depth, branching in table
        ]
        self._above = replace(PLAIN_BUDGET, reason=f"batch table: more than {max(sizes, default=0)} samples")
        self.max_nodes = max((budget.num_nodes for _, budget in self._rows), default=0)

    def plan(self, state: DecodeState) -> Budget:
        """Return the row's tree, no deeper than the longest remaining response minus the bonus."""
        budget = next((tree for size, tree in self._rows if state.num_samples <= size), self._above)
        cut = clip_depth(budget, state.max_remaining_tokens - 1)
        if cut.is_plain and not budget.is_plain:
            return replace(PLAIN_BUDGET, reason=f"{budget.reason}; one token remains")
        return cut

    def observe(self, record: StepRecord) -> None:
        """Learn nothing: the table looks at the batch alone."""


class CapacityPolicy:
    """Nodes per sample = capacity / samples - 1, bounded by the largest tree: a capacity is a batch's flat part.

    FastGRPO (arXiv 2509.21792), section on concurrency-aware speculation: each of B samples may verify
    floor(capacity / B) tokens, the root included.
    """

    def __init__(self, *, capacity_tokens: int, max_nodes: int, depth: int, branching: int) -> None:
        self._capacity_tokens = capacity_tokens
        self._depth = depth
        self._branching = branching
        self.max_nodes = max_nodes

    def plan(self, state: DecodeState) -> Budget:
        """Return the tree that fits this batch's share of the capacity; plain decoding when none does."""
        share = self._capacity_tokens // max(state.num_samples, 1)
        num_nodes = min(share - 1, self.max_nodes)
        if num_nodes < 1:
            return PLAIN_BUDGET
        branching = min(self._branching, num_nodes)
        depth = num_nodes if branching == 1 else min(self._depth, num_nodes)
        width = narrowest_width(num_nodes, depth, branching)
        num_nodes = min(num_nodes, max_tree_nodes(depth, branching, width))
        budget = Budget(
            num_nodes=num_nodes,
            depth=depth,
            branching=branching,
            width=width,
            reason=f"capacity {self._capacity_tokens} over {state.num_samples} samples",
        )
        return clip_depth(budget, state.max_remaining_tokens - 1)

    def observe(self, record: StepRecord) -> None:
        """Learn nothing: the rule looks at the batch alone."""


Contestant = SpeculationConfig | DraftPolicy
"By its settings, or a policy that is no setting."
LARGE_LAYERS = 16
MAX_SAMPLES = 64
NUM_PROMPTS = 96


def pair_workload(name: str, num_prompts: int = NUM_PROMPTS, data: Path | None = None) -> Workload:
    """Return the `demo` or the `large` pair with prompts of the chain task, or one made from real text."""
    if data is not None:
        return gsm8k_workload(data, num_prompts)
    workload = demo_workload(num_prompts)
    if name == "demo":
        return workload
    return replace(workload, name=name, paths=_large_pair(workload.paths))


def engine_for(
    workload: Workload,
    contestant: Contestant,
    *,
    batch_size: int,
    draft: str = "good",
    profile: Profile | None = None,
) -> Engine:
    """Build an engine of `batch_size` slots on one thread; the probe has its own tests."""
    is_setting = isinstance(contestant, SpeculationConfig)
    return workload.engine(
        contestant if is_setting else SpeculationConfig(),
        make_draft(workload, draft),
        parts={"policy": None if is_setting else contestant, "profile": profile},
        max_running_samples=batch_size,
        probe=False,
    )


def profile_of(workload: Workload, *, budget_s: float) -> MadeProfile:
    """Measure the pair with its good draft, up to MAX_SAMPLES samples."""
    engine = engine_for(workload, Placeholder(MAX_PROFILED_NODES), batch_size=MAX_SAMPLES)
    return workload.profile(engine, workload.draft("float32"), budget_s=budget_s)


def with_other_draft(
    workload: Workload, profile: Profile, draft: str, *, budget_s: float
) -> tuple[Profile, list[DraftRecording]]:
    """Return the profile of another draft of the same architecture: costs stay, acceptance is measured anew."""
    engine = engine_for(workload, Placeholder(MAX_PROFILED_NODES), batch_size=MAX_SAMPLES, draft=draft)
    requests = workload.requests(PROFILE_INDEX)
    drafts = [
        record_drafts(engine, requests, branching, width, levels, budget_s=budget_s / len(SHAPES))
        for branching, width, levels in SHAPES
    ]
    acceptance = fit_acceptance(join_nodes([some.nodes() for some in drafts]))
    changed = replace(
        profile,
        acceptance=acceptance,
        yields=yield_curves(drafts, acceptance),
        quality=profile.quality | acceptance_quality(drafts),
    )
    return changed, drafts


def _large_pair(small: PairPaths) -> PairPaths:
    folder: Path = default_cache_dir() / f"large-{small.target.parent.name}"
    if not (folder / "config.json").is_file():
        target = load_causal_lm(str(small.target), "float32")
        assert isinstance(target, LlamaForCausalLM)
        deepen(target, num_layers=LARGE_LAYERS).save_pretrained(folder)
        for path in small.target.glob("*token*"):
            (folder / path.name).write_bytes(path.read_bytes())
    return PairPaths(target=folder, draft=small.draft)


FIXED = {
    "chain 2": SpeculationConfig(policy="fixed", num_nodes=2),
    "chain 4": SpeculationConfig(policy="fixed", num_nodes=4),
    "chain 8": SpeculationConfig(policy="fixed", num_nodes=8),
    "chain 12": SpeculationConfig(policy="fixed", num_nodes=12),
    "chain 16": SpeculationConfig(policy="fixed", num_nodes=16, depth=16),
    "tree 8": SpeculationConfig(policy="fixed", num_nodes=8, depth=5, branching=2),
}
WEAK_FIXED = {name: FIXED[name] for name in ("chain 2", "chain 4", "tree 8")} | {
    "chain 3": SpeculationConfig(policy="fixed", num_nodes=3)
}
OTHERS: dict[str, Contestant] = {
    "capacity": CapacityPolicy(capacity_tokens=24, max_nodes=16, depth=16, branching=1),
    "batch_table": BatchTablePolicy(max_nodes=16, max_depth=16),
    "bandit": SpeculationConfig(policy="bandit"),
}
MAIN_FIXED = {name: FIXED[name] for name in ("chain 4", "chain 8", "chain 12", "chain 16")}
PLAIN = {"plain": SpeculationConfig(policy="off")}
GOODPUT = {"goodput": SpeculationConfig(policy="goodput")}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """One batch size: rates of every round by policy, and what goodput spent on choosing."""

    batch_size: int
    rates: Mapping[str, Sequence[float]]
    select_s: float
    "seconds a decode step"
    select_share: float

    def median(self, name: str) -> float:
        """Tokens per second."""
        return statistics.median(self.rates[name])

    def best(self, names: Sequence[str]) -> str:
        """The fastest of some policies in the median."""
        return max(names, key=self.median)


def constant_batch(
    workload: Workload,
    policies: Mapping[str, Contestant],
    profile: Profile,
    batch_size: int,
    rounds: int,
    *,
    draft: str = "good",
) -> BatchResult:
    """Time every policy on a batch that is kept full from a queue."""
    engines = {
        name: engine_for(workload, contestant, batch_size=batch_size, draft=draft, profile=profile)
        for name, contestant in policies.items()
    }
    requests = workload.requests()[: batch_size + 4 + min(batch_size, 12)]
    rates = interleaved(
        {name: _full_batch_rate(engine, requests, batch_size) for name, engine in engines.items()}, rounds
    )
    adaptive = engines.get("goodput")
    stats = adaptive.stats if adaptive else None
    return BatchResult(
        batch_size=batch_size,
        rates=rates,
        select_s=stats.select_s / stats.num_decode_steps if stats else 0.0,
        select_share=stats.select_s / stats.busy_s if stats else 0.0,
    )


def _full_batch_rate(engine: Engine, requests: Sequence[SampleRequest], batch_size: int) -> Rate:
    def rate() -> float:
        tokens, seconds = 0, 0.0
        for request in requests:
            engine.submit(request)
        while engine.has_work and (engine.num_waiting or engine.num_running == batch_size):
            engine.step()
            record = engine.step_records[-1]
            if record.num_samples == batch_size:
                tokens += record.num_emitted_tokens
                seconds += record.step_s
        engine.cancel_all()
        return tokens / seconds

    return rate


SAMPLES = 64


def whole_rollout(
    workload: Workload,
    policies: Mapping[str, Contestant],
    profile: Profile,
    rounds: int,
    *,
    draft: str = "good",
    hugging_face: bool = False,
) -> tuple[dict[str, list[float]], GenerationStats]:
    """Return tokens per second of every round by policy, and the statistics of `goodput`."""
    requests = workload.requests()[:SAMPLES]
    engines = {
        name: engine_for(workload, contestant, batch_size=SAMPLES, draft=draft, profile=profile)
        for name, contestant in policies.items()
    }
    taken = interleaved({name: engine_rate(engine, requests) for name, engine in engines.items()}, rounds)
    if hugging_face:
        # seven times as slow as ours: taken next to the others, once a round
        rate = hugging_face_rate(
            workload.target("float32"), requests, batch_size=SAMPLES, pad_token_id=workload.pad_token_id
        )
        taken["hf"] = [rate() for _ in range(rounds)]
    return taken, engines["goodput"].stats


def best_of(taken: Mapping[str, Sequence[float]], names: Sequence[str]) -> str:
    """The fastest of some policies in the median."""
    return max(names, key=lambda name: sorted(taken[name])[len(taken[name]) // 2])


BATCH_SIZE = 8
HEALTHY_STEPS = 100
STEPS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadDrafter:
    """What happened after the weights became zero."""

    suspended_after_steps: int
    alarm: str
    cost_share: float
    "seconds beyond plain decoding after the death, over the seconds of the whole run"


def plant_dead_drafter(workload: Workload, profile: Profile) -> DeadDrafter:
    """Decode STEPS steps with a full batch; zero the draft model's weights after HEALTHY_STEPS of them."""
    engine = engine_for(workload, SpeculationConfig(policy="goodput"), batch_size=BATCH_SIZE, profile=profile)
    drafter = engine.drafter
    assert isinstance(drafter, ModelDrafter)
    model = drafter.runner.model
    assert isinstance(model, LlamaModel)
    records = []
    number = 0
    suspended_at = None
    while len(records) < STEPS:
        while engine.num_waiting < BATCH_SIZE:
            request = workload.requests()[number % len(workload.prompts)]
            engine.submit(replace(request, key=replace(request.key, sample_index=number)))
            number += 1
        if len(records) == HEALTHY_STEPS:
            drafter.runner.load({name: torch.zeros(shape) for name, shape in model.shapes.items()})
            drafter.drop()
        engine.step()
        records.append(engine.step_records[-1])
        if suspended_at is None and "suspended" in records[-1].budget.reason:
            suspended_at = len(records) - 1
    engine.cancel_all()
    after = records[HEALTHY_STEPS:]
    plain_s = statistics.median(record.step_s for record in after if record.budget.is_plain)
    wasted = sum(record.step_s - plain_s for record in after if not record.budget.is_plain)
    return DeadDrafter(
        suspended_after_steps=(suspended_at if suspended_at is not None else STEPS) - HEALTHY_STEPS,
        alarm=engine.drafter_alarm,
        cost_share=wasted / sum(record.step_s for record in records),
    )
