"""The profile of a run: in the folder that the config names, in the cache, or measured before Ray starts.

Measured by the process that starts the run, on its machine. Instances on other hardware need a profile made there
with `rlhfspec profile`; every instance compares its own hardware and refuses one that does not match. Instances on
GPUs always do: the starting process may have no GPU, and if it has one, memory that it took would be missing there.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from ...actors.remote.process_metrics import give_back_free_memory
from ...core.config import Config
from ...core.errors import ConfigError, ProfileError
from ...core.records import SampleKey, SampleRequest, Stream
from ...engine.calibration.engine_provenance import provenance_of
from ...engine.calibration.measured_profile import measured_profile
from ...engine.calibration.profiler import MadeProfile
from ...engine.group.dealing import dealt, local_ranks
from ...engine.model.invariance_probe import KeptVerdicts
from ...engine.numerics import on_threads
from ...engine.weights.loading import load_causal_lm, num_token_ids
from ...engine.weights.stored_weights import load_weights
from ...learning.data.prompts import sampling_params
from ...learning.models.make import require_writable
from ...profiles.profile import Profile, load_profile, save_profile
from ...profiles.provenance import Provenance
from ..observe.console import Reporter
from .drafts import DraftModel, what_drafts
from .inputs import Inputs

AUTO = "auto"
AUTO_BUDGET_S = 40.0
MAX_PROMPTS = 64
BUSY = 0.25
"Relative error of the first sweep's fit to the second's verifications beyond which a machine was not idle."


class RunProfile:
    """What the policy `goodput` goes by in one run."""

    def __init__(self, config: Config, inputs: Inputs) -> None:
        self._models, self._engine, self._speculation = config.models, config.engine, config.speculation
        self._inputs, self._drafts, self._on_gpu = inputs, what_drafts(config), config.decodes_on_gpu
        self._cache = Path(config.run.cache_dir).expanduser()
        self._folder = self._cache / "profiles"
        sampling = sampling_params(config.sampling, inputs.tokenizer, model=config.models.target)
        self._sampling = replace(sampling, stop=())  # costs and acceptance are those of responses that go on
        self._seed, self._num_ranks = config.run.seed, config.cluster.generation.tensor_parallel

    def known(self) -> Profile | None:
        """Read the profile in the folder that the config names; None where the policy needs none or it is `auto`.

        Models are loaded only to compare the profile with them.
        Raises ProfileError: the folder holds no profile, or one of something else; `auto` with instances on GPUs.
        ConfigError: `auto`, and what is measured could not be kept.
        """
        if not self._speculation.needs_profile:
            return None
        is_auto = self._speculation.profile == AUTO
        if self._on_gpu and is_auto:
            raise ProfileError(
                "speculation.profile auto measures in the process that starts the run, but the instances decode on "
                "GPUs; expected a profile measured on one: run `rlhfspec profile --config FILE --out DIR` on a node "
                "with such a GPU and set speculation.profile=DIR, or take speculation.policy=fixed, which needs none"
            )
        if is_auto:
            self._require_cache()
            return None
        folder = Path(self._speculation.profile).expanduser()
        profile = load_profile(folder)
        if not self._on_gpu or torch.cuda.is_available():
            # else there is nothing to compare with here: the instances compare
            profile.provenance.require_match(self.described(), where=f"the profile in {folder}")
        return profile

    def resolve(self, report: Reporter) -> Profile | None:
        """Return what `known` reads, the cache has, or is measured now; None: none is needed. Raises as `known`."""
        profile = self.known()
        if profile is not None or not self._speculation.needs_profile:
            return profile
        described = self.described()
        folder = self._folder / described.key
        with suppress(ProfileError):
            profile = load_profile(folder)
        if profile is None:
            require_writable(folder, "run.cache_dir")
            made = self.measure(described, report, budget_s=AUTO_BUDGET_S)
            profile = made.profile
            save_profile(profile, folder, made.costs, made.drafts)
            # of the engine that was measured; this process lasts as long as the run
            give_back_free_memory()
            report.note(f"profile {folder} (used again while pair, machine and sampling stay)")
        missed = profile.quality.get("verify_cost_median_rel_error", 0.0)
        if missed > BUSY:
            report.note(
                f"the profile's second sweep is {missed:.0%} off the fit to its first in the median, expected at most "
                f"{BUSY:.0%}: drafting may be chosen where it loses; remove {folder} and start again on an idle machine"
            )
        return profile

    def described(self) -> Provenance:
        """Read what is to be profiled and describe it. Raises ProfileError when nothing drafts."""
        models, drafts = self._models, self._drafts
        if self._speculation.drafter == "none":
            raise ProfileError(
                "a profile needs a target and what drafts for it; set models.draft, or speculation.drafter=suffix"
            )
        return provenance_of(
            load_weights(models.target, models.dtype, trust_remote_code=models.trust_remote_code),
            drafts.weights() if isinstance(drafts, DraftModel) else drafts and drafts.read(),
            engine=self._engine,
            dtype=models.dtype,
            sampling=self._sampling,
            max_total_tokens=self._inputs.max_total_tokens,
            num_ranks=self._num_ranks,
        )

    def measure(self, provenance: Provenance, report: Reporter, *, budget_s: float) -> MadeProfile:
        """Measure a profile with a progress bar, on the threads and ranks an instance would have."""
        vocab_size, models = num_token_ids(self._inputs.tokenizer), self._models
        target = load_causal_lm(models.target, models.dtype, trust_remote_code=models.trust_remote_code)
        with on_threads(self._engine.num_threads), local_ranks(provenance.num_ranks) as ranks:
            of = "target" if self._speculation.looks_up else "pair"
            with report.job(f"profile of the {of} on this machine") as tick:
                return measured_profile(
                    target if ranks is None else dealt(target, ranks, vocab_size),
                    self._drafts and self._drafts.read(),
                    self._requests(),
                    provenance,
                    engine=self._engine,
                    speculation=self._speculation,
                    vocab_size=vocab_size,
                    budget_s=budget_s,
                    progress=tick,
                    verdicts=KeptVerdicts(self._cache / "probes"),
                )

    def _require_cache(self) -> None:
        """Raise ConfigError where nothing can be kept in the cache and the profile is not there already."""
        try:
            require_writable(self._folder / "new", "run.cache_dir")
        except ConfigError:
            folder = self._folder / self.described().key
            try:
                load_profile(folder)
            except ProfileError:
                require_writable(folder, "run.cache_dir")

    def _requests(self) -> list[SampleRequest]:
        """The first prompts of the data set, with the run's sampling and keys of their own."""
        return [
            SampleRequest(
                key=SampleKey(run_seed=self._seed, stream=Stream.BENCH, sample_index=index),
                prompt=prompt,
                sampling=self._sampling,
            )
            for index, prompt in enumerate(self._inputs.dataset.prompts[:MAX_PROMPTS])
        ]
