"""Every assumption of a simulated cluster in one table: value, and where it is from."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhfspec.core.settings.simulated_cluster import SimulatedClusterConfig
from rlhfspec.policies.simulate.described_cluster import DescribedCluster

_TABLES = tomllib.loads(Path(__file__).with_name("assumptions.toml").read_text())
SOURCES = {
    f"{section}.{key}": text for section, keys in _TABLES["sources"].items() for key, text in keys.items()
}
"Of the defaults; what differs from its default is the config's."
MODELLED = tuple((row["name"], row["value"], row["source"]) for row in _TABLES["modelled"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """One row."""

    name: str
    value: str
    source: str


def assumptions(cluster: DescribedCluster, *, profiled: bool = False) -> list[Assumption]:
    """Return the table; `profiled` where a measured profile decodes."""
    config, sheet = cluster.config, cluster.instance.target.sheet
    plain = SimulatedClusterConfig()
    rows = [
        Assumption(
            name=sheet.name,
            value=(
                f"{sheet.bf16_flops / 1e12:.0f} bf16 and "
                f"{'no' if sheet.fp8_flops is None else f'{sheet.fp8_flops / 1e12:.0f}'} fp8 TFLOP/s, "
                f"{sheet.memory_bytes_per_s / 1e12:.2f} TB/s, {sheet.memory_bytes / 1e9:.0f} GB, link "
                f"{sheet.link_bytes_per_s / 1e9:.0f} GB/s to {sheet.domain_gpus}, network "
                f"{sheet.network_bytes_per_s / 1e9:.0f} GB/s"
            ),
            source=sheet.source,
        ),
        Assumption(
            name="target model",
            value=(
                f"{cluster.target.total / 1e9:.2f}B parameters, {cluster.target.active / 1e9:.2f}B active, "
                f"{cluster.instance.target.kv_bytes_per_token / 1024:.0f} KiB of caches a token"
            ),
            source="its config.json" if config.model.config else "model.dimensions, Qwen2.5-7B by default",
        ),
    ]
    if profiled:
        rows.append(
            Assumption(
                name="decoding",
                value="measured costs and acceptance",
                source=f"the profile {config.device.profile}; the sheet serves training, publication and memory",
            )
        )
    for key, source in SOURCES.items():
        section, name = key.split(".")
        value, default = (getattr(getattr(one, section), name) for one in (config, plain))
        if section == "drafter" and (cluster.instance.draft is None or profiled):
            continue
        if name == "acceptance_length" and config.drafter.acceptance is not None:
            value, source = config.drafter.acceptance, "the config"
        rows.append(
            Assumption(name=key, value=_text(value), source=source if value == default else "the config")
        )
    rows += [Assumption(name=name, value=value, source=source) for name, value, source in MODELLED]
    return rows


def _text(value: Any) -> str:
    if isinstance(value, float) and 0.0 < value < 0.01:
        return f"{value * 1e6:.0f} us"
    return str(value)
