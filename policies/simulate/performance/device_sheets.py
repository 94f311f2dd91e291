"""Data sheets of devices: dense operations, memory, links, and the page that each number stands on."""

from __future__ import annotations

from dataclasses import dataclass

from policies.simulate.performance.contradiction import ContradictionError


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSheet:
    """One GPU; bytes a second of a link are of one direction."""

    name: str
    bf16_flops: float
    "a second, without sparsity"
    fp8_flops: float | None
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


SHEETS = {
    sheet.name: sheet
    for sheet in (
        DeviceSheet(
            name="A100",
            bf16_flops=312e12,
            fp8_flops=None,
            memory_bytes=80e9,
            memory_bytes_per_s=2.039e12,
            link_bytes_per_s=300e9,
            domain_gpus=8,
            network_bytes_per_s=25e9,
            source="NVIDIA A100 80GB SXM data sheet (2021); DGX A100: one 200 Gbit/s port a GPU",
        ),
        DeviceSheet(
            name="L40S",
            bf16_flops=362e12,
            fp8_flops=733e12,
            memory_bytes=48e9,
            memory_bytes_per_s=864e9,
            link_bytes_per_s=32e9,
            domain_gpus=8,
            network_bytes_per_s=25e9,
            source="NVIDIA L40S data sheet (2023): PCIe 4.0 x16, no NVLink; OVX L40S: 400 Gbit/s for two GPUs",
        ),
        DeviceSheet(
            name="H100",
            bf16_flops=989e12,
            fp8_flops=1979e12,
            memory_bytes=80e9,
            memory_bytes_per_s=3.35e12,
            link_bytes_per_s=450e9,
            domain_gpus=8,
            network_bytes_per_s=50e9,
            source="NVIDIA H100 SXM data sheet (2023); DGX H100: one 400 Gbit/s port a GPU",
        ),
        DeviceSheet(
            name="H200",
            bf16_flops=989e12,
            fp8_flops=1979e12,
            memory_bytes=141e9,
            memory_bytes_per_s=4.8e12,
            link_bytes_per_s=450e9,
            domain_gpus=8,
            network_bytes_per_s=50e9,
            source="NVIDIA H200 SXM data sheet (2024); DGX H200: one 400 Gbit/s port a GPU",
        ),
        DeviceSheet(
            name="B200",
            bf16_flops=2250e12,
            fp8_flops=4500e12,
            memory_bytes=180e9,
            memory_bytes_per_s=8e12,
            link_bytes_per_s=900e9,
            domain_gpus=8,
            network_bytes_per_s=50e9,
            source="NVIDIA DGX B200 data sheet (2024): an eighth of the system; one 400 Gbit/s port a GPU",
        ),
        DeviceSheet(
            name="GB200",
            bf16_flops=2500e12,
            fp8_flops=5000e12,
            memory_bytes=186e9,
            memory_bytes_per_s=8e12,
            link_bytes_per_s=900e9,
            domain_gpus=72,
            network_bytes_per_s=50e9,
            source="NVIDIA GB200 NVL72 data sheet (2024): a 72nd of the rack; one 400 Gbit/s port a GPU",
        ),
    )
}
