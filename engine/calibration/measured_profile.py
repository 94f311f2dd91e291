"""A profile measured for what is about to decode: an engine of its own, which ends with it."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.config import EngineConfig, SpeculationConfig
from ...core.records import SampleRequest
from ...profiles.provenance import Provenance
from ..build import build_engine
from ..drafters.head.head_weights import HeadWeights
from ..model.compute_backend import ComputeBackend
from ..model.invariance_probe import KeptVerdicts
from ..weights.causal_lm import CausalLM
from .profiler import (
    MAX_PROFILED_NODES,
    MadeProfile,
    Placeholder,
    Progress,
    make_profile,
    make_verification_profile,
)
from .random_chains import RandomChains


def measured_profile(
    target: CausalLM,
    draft: CausalLM | HeadWeights | None,
    requests: Sequence[SampleRequest],
    provenance: Provenance,
    *,
    engine: EngineConfig,
    speculation: SpeculationConfig,
    vocab_size: int | None,
    budget_s: float,
    progress: Progress = lambda what, share: None,
    backend: ComputeBackend | None = None,
    verdicts: KeptVerdicts | None = None,
) -> MadeProfile:
    """Measure, on this thread's number of threads: verification alone where drafts are looked up.

    Arguments and errors as `build_engine` and `make_profile`.
    """
    looks_up, ids = speculation.looks_up, vocab_size or int(target.config.get_text_config().vocab_size)
    made = build_engine(
        target,
        draft,
        engine=engine,
        speculation=speculation.without_look_up,
        policy=Placeholder(MAX_PROFILED_NODES),
        max_total_tokens=provenance.max_total_tokens,
        vocab_size=vocab_size,
        drafter=RandomChains(ids) if looks_up else None,
        backend=backend,
        verdicts=verdicts,
    )
    make = make_verification_profile if looks_up else make_profile
    return make(made, requests, provenance, budget_s=budget_s, progress=progress)
