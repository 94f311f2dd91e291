"""How a learned model's weights go out: in the types and with the config they came with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from core.records import WeightManifest
from engine.weights.chunks import checksum_of, pack_tensors


@dataclass(frozen=True, slots=True)
class PublishedForm:
    """Taken from the manifest of a model's first weights; the model itself learns in float32."""

    first: WeightManifest

    def tensors(self, weights: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """A model's weights as they are published, rounded to nearest."""
        dtypes = {spec.name: torch.__dict__[spec.dtype] for spec in self.first.tensors}
        return [(name, tensor.to(dtypes[name])) for name, tensor in weights]

    def pack(
        self, weights: Iterable[tuple[str, Tensor]], *, name: Literal["target", "draft"], weight_version: int
    ) -> tuple[WeightManifest, list[np.ndarray]]:
        """Freeze the weights into chunks. Raises NotFiniteError."""
        return pack_tensors(
            self.tensors(weights),
            hf_config_json=self.first.hf_config_json,
            name=name,
            weight_version=weight_version,
        )

    def checksum(self, weights: Iterable[tuple[str, Tensor]]) -> str:
        """The checksum that the published weights have."""
        return checksum_of(tensor for _, tensor in self.tensors(weights))
