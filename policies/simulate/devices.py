"""Data sheets of devices: dense operations, memory, links, and the page that each number stands on."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from rlhfspec.core.errors import ConfigError


class ContradictionError(ConfigError):
    """Values that are good each by itself and cannot be together: a sweep goes on with the other combinations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSheet:
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

    def flops(self, precision: str) -> float:
        """Operations a second in `bf16` or `fp8`. Raises ContradictionError where the device has no such products."""
        if precision == "bf16":
            return self.bf16_flops
        if self.fp8_flops is None:
            raise ContradictionError(f"model.precision fp8: {self.name} multiplies no 8-bit floats; use bf16")
        return self.fp8_flops

    def bandwidth(self, gpus: int) -> float:
        """Bytes a second between so many GPUs: of the network where one domain does not hold them."""
        return self.link_bytes_per_s if gpus <= self.domain_gpus else self.network_bytes_per_s


def _sheets() -> dict[str, DeviceSheet]:
    tables = tomllib.loads(Path(__file__).with_name("devices.toml").read_text())
    return {name: DeviceSheet(name=name, **table) for name, table in tables.items()}


SHEETS = _sheets()
