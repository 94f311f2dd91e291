"""The pairs on which drafting is judged: the demo pair, and a target twice as deep with the same draft.

`large` is the demo target grown to 16 layers that compute the same function (`learning.models.net2net`): the same
tokens and acceptance at twice the cost, so that its draft costs under a twentieth of a target forward.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from transformers import LlamaForCausalLM

from benchmarks.speed.speculation import make_draft
from benchmarks.support.workload import Workload, default_cache_dir, demo_workload, gsm8k_workload
from rlhfspec.core.config import EngineConfig, SpeculationConfig
from rlhfspec.core.records import SampleRequest
from rlhfspec.engine.build import build_engine
from rlhfspec.engine.calibration.engine_provenance import provenance_of
from rlhfspec.engine.calibration.profiler import (
    MAX_PROFILED_NODES,
    SHAPES,
    MadeProfile,
    Placeholder,
    make_profile,
    record_drafts,
    yield_curves,
)
from rlhfspec.engine.engine import Engine
from rlhfspec.engine.weights.loading import load_causal_lm
from rlhfspec.learning.models.make import PairPaths
from rlhfspec.learning.models.net2net import deepen
from rlhfspec.policies.drafting.draft_policy import DraftPolicy
from rlhfspec.profiles.acceptance import fit_acceptance
from rlhfspec.profiles.profile import Profile
from rlhfspec.profiles.quality import acceptance_quality
from rlhfspec.profiles.recording import DraftRecording, join_nodes

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
    return build_engine(
        workload.target("float32"),
        make_draft(workload, draft),
        engine=EngineConfig(max_running_samples=batch_size, probe=False),
        speculation=contestant if is_setting else SpeculationConfig(),
        policy=None if is_setting else contestant,
        profile=profile,
        max_total_tokens=workload.max_total_tokens,
        vocab_size=workload.vocab_size,
    )


def profile_of(workload: Workload, *, budget_s: float) -> MadeProfile:
    """Measure the pair with its good draft, up to MAX_SAMPLES samples."""
    engine = engine_for(workload, Placeholder(MAX_PROFILED_NODES), batch_size=MAX_SAMPLES)
    provenance = provenance_of(
        workload.target("float32"),
        workload.draft("float32"),
        engine=EngineConfig(max_running_samples=MAX_SAMPLES),
        dtype="float32",
        sampling=workload.sampling,
        max_total_tokens=workload.max_total_tokens,
    )
    return make_profile(engine, profile_requests(workload), provenance, budget_s=budget_s)


def with_other_draft(
    workload: Workload, profile: Profile, draft: str, *, budget_s: float
) -> tuple[Profile, list[DraftRecording]]:
    """Return the profile of another draft of the same architecture: costs stay, acceptance is measured anew."""
    engine = engine_for(workload, Placeholder(MAX_PROFILED_NODES), batch_size=MAX_SAMPLES, draft=draft)
    requests = profile_requests(workload)
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


def profile_requests(workload: Workload) -> list[SampleRequest]:
    """Requests whose keys no measured run uses: profiles are fitted on other samples."""
    return workload.requests(first_index=100_000)


def _large_pair(small: PairPaths) -> PairPaths:
    folder: Path = default_cache_dir() / f"large-{small.target.parent.name}"
    if not (folder / "config.json").is_file():
        target = load_causal_lm(str(small.target), "float32")
        assert isinstance(target, LlamaForCausalLM)
        deepen(target, num_layers=LARGE_LAYERS).save_pretrained(folder)
        for path in small.target.glob("*token*"):
            (folder / path.name).write_bytes(path.read_bytes())
    return PairPaths(target=folder, draft=small.draft)
