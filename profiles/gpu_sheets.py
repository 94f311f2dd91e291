"""Data sheets of GPUs: what each does at most, for simulated clusters and for the share that an update uses."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class GPUSheet:
    """One GPU; bytes a second of a link are of one direction."""

    name: str
    bf16_flops: float
    "a second, without sparsity"
    fp8_flops: float | None = None
    "None: it has none"
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    "to the other GPUs of its domain"
    domain_gpus: int
    "joined by that link"
    network_bytes_per_s: float
    "beyond the domain"
    source: str

    def bandwidth(self, gpus: int) -> float:
        """Bytes a second between so many GPUs: of the network where one domain does not hold them."""
        return self.link_bytes_per_s if gpus <= self.domain_gpus else self.network_bytes_per_s


_TABLES = tomllib.loads(Path(__file__).with_name("gpu_sheets.toml").read_text())
SHEETS = {name: GPUSheet(name=name, **table) for name, table in _TABLES.items()}


def peak_flops_of(name: str) -> float | None:
    """Peak bfloat16 operations a second of the GPU of this name; None for forms that no sheet here describes."""
    words = set(re.split(r"[\s-]", name))
    if words & {"PCIe", "NVL", "MIG"}:
        return None
    return next((sheet.bf16_flops for key, sheet in SHEETS.items() if key in words), None)
