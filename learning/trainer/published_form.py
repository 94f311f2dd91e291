"""How a learned model's weights go out: in the types and with the config they came with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlhfspec.core.weight_records import DigestKind, WeightManifest
from rlhfspec.engine.weights.chunks import CHUNK_BYTES, WeightPacker, checksum_of


@dataclass(frozen=True, slots=True)
class PublishedForm:
    """Taken from the manifest of a model's first weights; the model itself learns in float32."""

    first: WeightManifest

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The type that each tensor is rounded to."""
        return {spec.name: torch.__dict__[spec.dtype] for spec in self.first.tensors}

    def packer(
        self,
        *,
        name: Literal["target", "draft"],
        weight_version: int,
        rooms: int | Sequence[Tensor] = 1,
        device: torch.device | None = None,
        kind: DigestKind = "xxh3",
        chunk_bytes: int = CHUNK_BYTES,
    ) -> WeightPacker:
        """What packs a version chunk by chunk, each written over the one that is `rooms` before; see `WeightPacker`."""
        return WeightPacker(
            name=name,
            weight_version=weight_version,
            hf_config_json=self.first.hf_config_json,
            dtypes=self.dtypes,
            rooms=rooms,
            device=device,
            kind=kind,
            chunk_bytes=chunk_bytes,
        )

    def checksum(self, weights: Iterable[tuple[str, Tensor]], *, like: str = "") -> str:
        """The checksum that the published weights have, of the kind of `like`; one tensor at a time is rounded."""
        dtypes = self.dtypes
        return checksum_of((tensor.detach().to(dtypes[name]) for name, tensor in weights), like=like)
