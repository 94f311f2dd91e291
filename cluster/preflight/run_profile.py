"""The profile of a run: in the folder that the config names, in the cache, or measured before Ray starts.

Measured by the process that starts the run, on its machine. Instances on other hardware need a profile made there
with `rlhfspec profile`; every instance compares its own hardware and refuses one that does not match. Instances on
GPUs always do: the starting process may have no GPU, and if it has one, memory that it took would be missing there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers.modeling_utils import PreTrainedModel

from rlhfspec.cluster.observe.console import Reporter
from rlhfspec.cluster.preflight.inputs import Inputs
from rlhfspec.cluster.weights.first_weights import load_draft_model, read_head, read_mtp
from rlhfspec.core.config import Config
from rlhfspec.core.errors import ConfigError, ProfileError
from rlhfspec.core.records import SampleKey, SampleRequest, Stream
from rlhfspec.engine.build import build_engine
from rlhfspec.engine.calibration.engine_provenance import provenance_of
from rlhfspec.engine.calibration.profiler import (
    MAX_PROFILED_NODES,
    MadeProfile,
    Placeholder,
    make_profile,
    make_verification_profile,
)
from rlhfspec.engine.calibration.random_chains import RandomChains
from rlhfspec.engine.drafters.head.head_weights import HeadWeights
from rlhfspec.engine.numerics import on_threads
from rlhfspec.engine.weights.loading import load_causal_lm, num_token_ids
from rlhfspec.learning.data.prompts import sampling_params
from rlhfspec.learning.models.make import require_writable
from rlhfspec.profiles.profile import Profile, load_profile, save_profile
from rlhfspec.profiles.provenance import Provenance

AUTO = "auto"
AUTO_BUDGET_S = 40.0
MAX_PROMPTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledRun:
    """What a profile of this run is measured with."""

    target: PreTrainedModel
    draft: PreTrainedModel | HeadWeights | None
    "None: drafts are looked up"
    provenance: Provenance
    max_total_tokens: int


def needs_profile(config: Config) -> bool:
    """Whether the policy goes by a profile."""
    return config.speculation.policy == "goodput" and config.speculation.drafter != "none"


def known_profile(config: Config, inputs: Inputs) -> Profile | None:
    """Read the profile in the folder that the config names; None where the policy needs none or it is `auto`.

    Models are loaded only to compare the profile with them.
    Raises ProfileError: the folder holds no profile, or one of something else; `auto` with instances on GPUs.
    ConfigError: `auto`, and what is measured could not be kept.
    """
    if not needs_profile(config):
        return None
    is_auto = config.speculation.profile == AUTO
    if config.decodes_on_gpu and is_auto:
        raise ProfileError(
            "speculation.profile auto measures in the process that starts the run, but the instances decode on GPUs; "
            "expected a profile measured on one: run `rlhfspec profile --config FILE --out DIR` on a node with such "
            "a GPU and set speculation.profile=DIR, or take speculation.policy=fixed, which needs none"
        )
    if is_auto:
        _require_cache(config, inputs)
        return None
    folder = Path(config.speculation.profile).expanduser()
    profile = load_profile(folder)
    if not config.decodes_on_gpu or torch.cuda.is_available():
        # else there is nothing to compare with here: the instances compare
        described = describe(config, inputs)
        profile.provenance.require_match(described.provenance, where=f"the profile in {folder}")
    return profile


def cache_folder(config: Config, described: ProfiledRun) -> Path:
    """Where `auto` keeps the profile of such a run."""
    return Path(config.run.cache_dir).expanduser() / "profiles" / described.provenance.key


def _require_cache(config: Config, inputs: Inputs) -> None:
    """Raise ConfigError where nothing can be kept in the cache and the profile is not there already."""
    try:
        require_writable(Path(config.run.cache_dir).expanduser() / "profiles" / "new", "run.cache_dir")
    except ConfigError:
        folder = cache_folder(config, describe(config, inputs))
        try:
            load_profile(folder)
        except ProfileError:
            require_writable(folder, "run.cache_dir")


def describe(config: Config, inputs: Inputs) -> ProfiledRun:
    """Load what is to be profiled and describe it. Raises ProfileError when nothing drafts."""
    models, speculation = config.models, config.speculation
    if speculation.drafter == "none" or (speculation.names_draft and models.draft is None):
        raise ProfileError(
            "a profile needs a target and what drafts for it; set models.draft, or speculation.drafter=suffix"
        )
    target = load_causal_lm(models.target, models.dtype, trust_remote_code=models.trust_remote_code)
    draft = read_mtp(config).head if speculation.drafter == "mtp" else None
    if models.draft is not None and speculation.names_draft:
        draft = load_draft(models.draft, config)
    max_total_tokens = inputs.max_total_tokens(config)
    return ProfiledRun(
        target=target,
        draft=draft,
        max_total_tokens=max_total_tokens,
        provenance=provenance_of(
            target,
            draft,
            engine=config.engine,
            dtype=models.dtype,
            sampling=sampling_params(config.sampling, inputs.tokenizer, model=config.models.target),
            max_total_tokens=max_total_tokens,
        ),
    )


def load_draft(name: str, config: Config) -> PreTrainedModel | HeadWeights:
    """Load the draft model, or the head on this target, that a run would draft with. Raises ModelError."""
    if config.speculation.drafter == "head":
        # as it is published: instances compare
        return read_head(config, Path(name))
    return load_draft_model(config, name)


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
