"""How a learned model's weights go out: under the names, in the types and with the config they came with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from core.records import WeightManifest
from engine.weights.chunks import checksum_of, pack_tensors, unique_tensors


@dataclass(frozen=True, slots=True)
class PublishedForm:
    """Taken from the manifest of a model's first weights; the model itself learns in float32."""

    first: WeightManifest

    def tensors(self, model: PreTrainedModel) -> list[tuple[str, Tensor]]:
        """The model's weights as they are published: name order, tied ones once, rounded to nearest."""
        dtypes = {spec.name: torch.__dict__[spec.dtype] for spec in self.first.tensors}
        return [(name, tensor.to(dtypes[name])) for name, tensor in unique_tensors(model)]

    def pack(
        self, model: PreTrainedModel, *, name: Literal["target", "draft"], weight_version: int
    ) -> tuple[WeightManifest, list[np.ndarray]]:
        """Freeze the weights into chunks. Raises NotFiniteError."""
        return pack_tensors(
            self.tensors(model),
            hf_config_json=self.first.hf_config_json,
            name=name,
            weight_version=weight_version,
        )

    def checksum(self, model: PreTrainedModel) -> str:
        """The checksum that the published weights have."""
        return checksum_of(tensor for _, tensor in self.tensors(model))
