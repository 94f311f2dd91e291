"""Trainer actor: a thin Ray shell around `learning.learner.Learner`.

It gets its first weights by manifest, as the generation actors do, so it may run on any machine. New
weights go out as chunks that the actor returns (the caller owns them, so they outlive this actor).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from actors.messages import LoadedWeights, TrainerSpec
from actors.remote import remote
from core.errors import RlhfSpecError
from core.records import Rollout, UpdateReport, WeightManifest
from engine.models import build_causal_lm
from engine.weights import load_into, model_checksum, pack_weights, unpack_weights
from learning.learner import Learner


@remote(max_restarts=0)
class TrainerActor:
    """Owns the policy being trained."""

    def __init__(self, spec: TrainerSpec) -> None:
        self._spec = spec
        self._built: Learner | None = None
        self._packed: list[np.ndarray] = []

    def __repr__(self) -> str:
        return "TrainerActor"

    def load_weights(self, manifest: WeightManifest, *chunks: np.ndarray) -> LoadedWeights:
        """Build the learner around the published model and read its checksum back."""
        torch.set_num_threads(self._spec.trainer.num_threads)
        model = build_causal_lm(manifest.hf_config_json, self._spec.dtype)
        load_into(model, unpack_weights(manifest, chunks))
        self._built = Learner(
            model,
            algorithm=self._spec.algorithm,
            trainer=self._spec.trainer,
            temperature=self._spec.temperature,
            seed=self._spec.seed,
            pad_token_id=self._spec.pad_token_id,
            vocab_size=self._spec.vocab_size,
        )
        return LoadedWeights(
            instance="trainer",
            model=manifest.model,
            weight_version=manifest.weight_version,
            checksum=self.checksum(),
        )

    def update(self, rollouts: Sequence[Rollout]) -> UpdateReport:
        """Do one update; equal rollouts in any order give bitwise equal parameters."""
        return self._learner.update(rollouts)

    def pack(self) -> WeightManifest:
        """Freeze the current weights into chunks and describe them; `chunks` hands them out."""
        learner = self._learner
        manifest, self._packed = pack_weights(
            learner.model, name="target", weight_version=learner.weight_version
        )
        return manifest

    def chunks(self) -> tuple[np.ndarray, ...] | np.ndarray:
        """The packed chunks, to be called with `num_returns` set to their number; then forgotten."""
        packed, self._packed = self._packed, []
        return packed[0] if len(packed) == 1 else tuple(packed)

    def checksum(self) -> str:
        """Checksum over the parameters."""
        return model_checksum(self._learner.model)

    @property
    def _learner(self) -> Learner:
        if self._built is None:
            raise RlhfSpecError("the trainer was asked before it had weights; publish weights to it first")
        return self._built
