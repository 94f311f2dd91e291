"""Builds an engine from manifests: the module from the config, the weights from the chunks.

An instance never opens a model path: the first weights arrive as every later version does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from transformers.modeling_utils import PreTrainedModel

from actors.actor_messages import GenerationSpec, LoadedWeights
from core.records import WeightManifest
from engine.build import build_engine
from engine.calibration.engine_provenance import here
from engine.drafters.model_drafter import ModelDrafter
from engine.engine import Engine
from engine.model.kept_verdicts import KeptVerdicts
from engine.weights.chunks import load_into, model_checksum, weight_views
from engine.weights.loading import build_causal_lm


class ManifestHost:
    """Holds an instance's models, and the engine once all of them have weights."""

    def __init__(self, spec: GenerationSpec) -> None:
        self._spec = spec
        self._models: dict[str, PreTrainedModel] = {}
        self._versions: dict[str, int] = {}
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine | None:
        """The engine; None until the first version of every model has been loaded."""
        return self._engine

    def load_weights(self, manifest: WeightManifest, chunks: Sequence[np.ndarray]) -> LoadedWeights:
        """Load one version of one model, and read back what decodes from now on.

        Raises WeightsError when chunks and manifest do not match, a sample is open, or a laid-out copy is not what was
        loaded.
        """
        tensors = weight_views(manifest, chunks)
        if self._engine is not None:
            self._engine.load_weights(manifest, tensors)
            self._require_copies_hold([manifest.model])
        else:
            model = build_causal_lm(manifest.hf_config_json, self._spec.dtype)
            load_into(model, tensors)
            self._models[manifest.model] = model
            self._versions[manifest.model] = manifest.weight_version
            self._build_when_complete()
        return LoadedWeights(
            instance=self._spec.instance,
            model=manifest.model,
            weight_version=manifest.weight_version,
            checksum=model_checksum(self._models[manifest.model]),
        )

    def _require_copies_hold(self, models: Iterable[str]) -> None:
        """Raises WeightsError when a copy that the engine decodes from is not what was loaded."""
        if self._engine is None:
            return
        drafter = self._engine.drafter
        for model in models:
            who = f"{model} weights of {self._spec.instance}"
            if model == "target":
                self._engine.runner.require_copies_hold(who)
            elif isinstance(drafter, ModelDrafter):
                drafter.runner.require_copies_hold(who)

    def _build_when_complete(self) -> None:
        if set(self._models) < set(self._spec.model_names):
            return
        self._check_profile()
        self._engine = build_engine(
            self._models["target"],
            self._models.get("draft"),
            engine=self._spec.engine,
            speculation=self._spec.speculation,
            max_total_tokens=self._spec.max_total_tokens,
            vocab_size=self._spec.vocab_size,
            instance=self._spec.instance,
            weight_version=self._versions["target"],
            drafter_version=self._versions.get("draft", 0),
            profile=self._spec.profile,
            verdicts=self._verdicts(),
        )
        if self._spec.step_log:
            self._engine.step_log = []
        # those that arrived before were confirmed when nothing was laid out yet
        self._require_copies_hold(self._models)

    def _verdicts(self) -> KeptVerdicts | None:
        cache = self._spec.cache_dir
        return None if cache is None else KeptVerdicts(Path(cache).expanduser() / "probes")

    def _check_profile(self) -> None:
        """Require the profile's hardware here. Weights may have moved on. Raises ProfileError naming what differs."""
        profile = self._spec.profile
        if profile is None or "draft" not in self._models:
            return
        measured = profile.provenance
        running = here(
            measured,
            self._models["target"],
            self._models["draft"],
            engine=self._spec.engine,
            dtype=self._spec.dtype,
        )
        measured.require_match(running, where=f"the profile given to {self._spec.instance}", weights=False)
