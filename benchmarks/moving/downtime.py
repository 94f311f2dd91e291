"""What a migration costs the sample that moves and those that stay: downtime, bytes by stage, slower steps.

Samples of about 512 tokens on a target of 29M parameters move one or two at a time between two instances that go on
decoding. A decode step that overlaps a transfer is compared with the nearest ones of as many samples on the same
instance that overlap none, NEAR_STEPS away at most: the machine's pace drifts. The first step prefills and is no step
of the same shape.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from transformers import LlamaForCausalLM

from ...actors.trace_events import TraceEvent
from ...core.config import EngineConfig, ReallocationConfig, SpeculationConfig
from ...core.records import Prompt
from ...engine.weights.loading import load_causal_lm
from ...learning.models.make import PairPaths
from ...learning.models.net2net import deepen, widen
from ...policies.migration.move_messages import MoveOutcome
from ..support.actor_pool import ActorPool
from ..support.reference import count_mismatches
from ..support.workload import Workload, default_cache_dir, demo_workload
from .forced import ForcedMoves

LAYERS = 10
MAX_POSITIONS = 4096
"Beyond what it was trained on it writes nonsense, at the same speed."


def wide_workload(num_prompts: int, *, prompt_tokens: int, new_tokens: int) -> Workload:
    """Prompts of exactly `prompt_tokens` tokens, several of the chain task behind one another; no stop tokens."""
    per_prompt = max(1, prompt_tokens // 4)
    workload = demo_workload(num_prompts + per_prompt)
    rows = [prompt.token_ids for prompt in workload.prompts]
    prompts = [
        Prompt(prompt_id=number, token_ids=np.concatenate(rows[number : number + per_prompt])[:prompt_tokens])
        for number in range(num_prompts)
    ]
    return replace(
        workload,
        name="wide",
        paths=wide_pair(workload.paths),
        prompts=prompts,
        sampling=replace(workload.sampling, max_new_tokens=new_tokens, stop_token_ids=()),
    )


def wide_pair(small: PairPaths) -> PairPaths:
    """Return the larger pair, made on the first call and found in the cache on later ones."""
    folder = default_cache_dir() / f"wide-{small.target.parent.name}"
    if not (folder / "config.json").is_file():
        target = load_causal_lm(str(small.target), "float32")
        assert isinstance(target, LlamaForCausalLM)
        grown = deepen(widen(target, factor=2), num_layers=LAYERS)
        grown.config.max_position_embeddings = MAX_POSITIONS
        grown.save_pretrained(folder)
        for path in small.target.glob("*token*"):
            (folder / path.name).write_bytes(path.read_bytes())
    return PairPaths(target=folder, draft=small.draft)


PROMPT_TOKENS = 400
NEW_TOKENS = 240
SAMPLES = 8
NEAR_STEPS = 12


@dataclass(slots=True, kw_only=True)
class Moved:
    """One entry a migration, or a pair of decode steps."""

    downtime_s: list[float] = field(default_factory=list)
    downtime_steps: list[float] = field(default_factory=list)
    context_tokens: list[float] = field(default_factory=list)
    stage1_bytes: list[float] = field(default_factory=list)
    stage2_bytes: list[float] = field(default_factory=list)
    stage1_s: list[float] = field(default_factory=list)
    attach_s: list[float] = field(default_factory=list)
    step_pairs: list[tuple[float, float]] = field(default_factory=list)
    "(overlapping a transfer, not)"
    mismatches: int = 0

    @property
    def slowdown(self) -> float:
        """Step that overlaps a transfer over its partners, minus 1, in the median: single steps are held up at will."""
        overlapped, alone = np.array(self.step_pairs).T
        return float(np.median(overlapped / alone) - 1.0)

    @property
    def mean_slowdown(self) -> float:
        """The same of the sums."""
        overlapped, alone = np.array(self.step_pairs).T
        return float(overlapped.sum() / alone.sum() - 1.0)


def move_while_decoding(*, rollouts: int, plain: bool = False) -> Moved:
    """Run rollouts with rare random migrations and collect what they cost."""
    workload = wide_workload(SAMPLES, prompt_tokens=PROMPT_TOKENS, new_tokens=NEW_TOKENS)
    moved = Moved()
    with ActorPool(
        workload,
        engine=EngineConfig(max_running_samples=2 * SAMPLES, probe=False),
        speculation=SpeculationConfig(policy="off")
        if plain
        else SpeculationConfig(policy="fixed", num_nodes=6, depth=6),
        migration=ReallocationConfig(),
    ) as pool:
        requests = workload.requests()
        expected = pool.rollout(requests).completions
        # opens both channels
        pool.rollout(requests, reallocation=ForcedMoves(rate=0.05, seed=99))
        for seed in range(rollouts):
            outcome = pool.rollout(requests, reallocation=ForcedMoves(rate=0.01, seed=seed))
            moved.mismatches += count_mismatches(outcome.completions, expected)
            for record in outcome.moves:
                if record.outcome == MoveOutcome.MOVED:
                    destination = outcome.spans[record.order.destination]
                    _keep(moved, record.metrics, destination)
            for spans in outcome.spans.values():
                moved.step_pairs += _step_pairs(spans)
    return moved


def _keep(moved: Moved, figures: dict[str, float], destination: Sequence[TraceEvent]) -> None:
    moved.downtime_s.append(figures["downtime_s"])
    moved.downtime_steps.append(figures["downtime_s"] / _median_step_s(destination))
    for name in ("context_tokens", "stage1_bytes", "stage2_bytes", "stage1_s", "attach_s"):
        getattr(moved, name).append(figures[name])


def _median_step_s(spans: Sequence[TraceEvent]) -> float:
    return float(np.median([span.end_s - span.begin_s for span in spans if span.kind == "step"]))


def _step_pairs(spans: Sequence[TraceEvent]) -> list[tuple[float, float]]:
    """Pair every step that overlaps a transfer with the nearest of as many samples that do not, before and after."""
    transfers = [(span.begin_s, span.end_s) for span in spans if span.kind in ("send", "receive")]
    steps = sorted((span for span in spans if span.kind == "step"), key=lambda span: span.begin_s)[1:]
    overlapping = [any(b < step.end_s and e > step.begin_s for b, e in transfers) for step in steps]
    alone: dict[int, list[int]] = {}
    for number, step in enumerate(steps):
        if not overlapping[number]:
            alone.setdefault(step.num_samples, []).append(number)
    pairs: list[tuple[float, float]] = []
    for number, step in enumerate(steps):
        partners = alone.get(step.num_samples, [])
        place = bisect.bisect_left(partners, number)
        # a neighbour on either side: contexts grow, and growth cancels out
        near = [p for p in partners[max(0, place - 1) : place + 1] if abs(p - number) <= NEAR_STEPS]
        if overlapping[number] and near:
            pairs.append((_seconds(step), float(np.mean([_seconds(steps[p]) for p in near]))))
    return pairs


def _seconds(span: TraceEvent) -> float:
    return span.end_s - span.begin_s
