"""The profile of a run: read by the check (`known_profile`), found in the cache, or measured before Ray starts.

Measured by the process that starts the run, on its machine. Instances on other hardware need a profile made there
with `rlhfspec profile`; every instance compares its own hardware and refuses one that does not match. Instances on
GPUs always do: the starting process may have no GPU, and if it has one, memory that it took would be missing there.
"""

from __future__ import annotations

from cluster.preflight.inputs import Inputs
from cluster.preflight.known_profile import (
    AUTO,
    ProfiledRun,
    cache_folder,
    describe,
    known_profile,
    needs_profile,
)
from cluster.reporting.console import Reporter
from core.config import Config
from core.errors import ProfileError
from core.records import SampleKey, SampleRequest, Stream
from engine.build import build_engine
from engine.calibration.profiler import (
    MAX_PROFILED_NODES,
    MadeProfile,
    Placeholder,
    make_profile,
    make_verification_profile,
)
from engine.calibration.random_chains import RandomChains
from engine.numerics import on_threads
from engine.weights.loading import num_token_ids
from learning.data.prompts import sampling_params
from learning.pairs.make import require_writable
from profiles.profile import Profile, load_profile, save_profile

AUTO_BUDGET_S = 40.0
MAX_PROMPTS = 64


def resolve_profile(config: Config, inputs: Inputs, report: Reporter) -> Profile | None:
    """Return the run's profile: the one that the check has read, else that in the cache, else one measured now.

    None when the policy needs none. Raises as `known_profile`.
    """
    if inputs.profile is not None or not needs_profile(config):
        return inputs.profile
    if config.speculation.profile != AUTO or config.decodes_on_gpu:
        return known_profile(config, inputs)
    described = describe(config, inputs)
    folder = cache_folder(config, described)
    try:
        return load_profile(folder)
    except ProfileError:
        pass
    require_writable(folder, "run.cache_dir")
    made = measure(config, inputs, described, report, budget_s=AUTO_BUDGET_S)
    save_profile(made.profile, folder, made.costs, made.drafts)
    report.note(f"profile {folder} (used again while pair, machine and sampling stay)")
    return made.profile


def measure(
    config: Config, inputs: Inputs, run: ProfiledRun, report: Reporter, *, budget_s: float
) -> MadeProfile:
    """Measure a profile with a progress bar, on the threads an instance would have."""
    with on_threads(config.engine.num_threads):
        engine = build_engine(
            run.target,
            run.draft,
            engine=config.engine,
            speculation=config.speculation.without_look_up,
            policy=Placeholder(MAX_PROFILED_NODES),
            max_total_tokens=run.max_total_tokens,
            vocab_size=num_token_ids(inputs.tokenizer),
            drafter=RandomChains(num_token_ids(inputs.tokenizer)) if config.speculation.looks_up else None,
        )
        if config.speculation.looks_up:
            with report.job("profile of the target on this machine") as tick:
                return make_verification_profile(
                    engine, _requests(config, inputs), run.provenance, budget_s=budget_s, progress=tick
                )
        with report.job("profile of the pair on this machine") as tick:
            return make_profile(
                engine, _requests(config, inputs), run.provenance, budget_s=budget_s, progress=tick
            )


def _requests(config: Config, inputs: Inputs) -> list[SampleRequest]:
    """The first prompts of the data set, with the run's sampling and keys of their own."""
    sampling = sampling_params(config.sampling, inputs.tokenizer, model=config.models.target)
    count = min(len(inputs.dataset), MAX_PROMPTS)
    return [
        SampleRequest(
            key=SampleKey(run_seed=config.run.seed, stream=Stream.BENCH, sample_index=index),
            prompt=inputs.dataset.prompts[index],
            sampling=sampling,
        )
        for index in range(count)
    ]
