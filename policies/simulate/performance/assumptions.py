"""Every assumption of a simulated cluster in one table: value, and where it is from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from core.settings.simulated_cluster import SimulatedClusterConfig
from policies.simulate.performance.described_cluster import DescribedCluster
from policies.simulate.performance.training_cost import STATE_BYTES

PLAIN_RATES = (
    "fit to plain decoding of Qwen2.5-7B, batch 1, on A100, H100 and B200 (arXiv 2511.16665, table 2)"
)
DRAFT_RATES = (
    "median of what EAGLE-3 adds beyond that to seven dense Qwen3 models, batch 1, vLLM (AngelSlim 0.3)"
)
ASSUMED = "assumed"

SOURCES = {
    "device.memory_share": PLAIN_RATES,
    "device.compute_share": f"{ASSUMED}: products of some hundred rows reach 0.5 to 0.75",
    "device.link_share": f"{ASSUMED}: of one direction",
    "device.layer_s": PLAIN_RATES,
    "device.collective_s": f"{ASSUMED}: a small all-reduce over NVLink, one kernel",
    "device.spare_memory": f"{ASSUMED}: activations, buffers, fragmentation",
    "drafter.acceptance_length": f"{ASSUMED}: EAGLE-3 on Qwen3 yields 1.8 to 2.2 at depth 2 (AngelSlim 0.3, README)",
    "drafter.level_s": DRAFT_RATES,
    "drafter.step_s": DRAFT_RATES,
    "lengths.speed_sigma": f"{ASSUMED}: as in `rlhfspec simulate`",
    "pools.report_s": f"{ASSUMED}: the scheduler hears of ended samples at once",
    "pools.message_s": f"{ASSUMED}: short beside a decode step",
    "learner.mfu": "38 to 43% of bfloat16 on H100 (Llama 3, arXiv 2407.21783, table 4)",
    "learner.forward_mfu": f"{ASSUMED}: as in the update",
    "learner.recompute": f"{ASSUMED}: activations of long samples are not kept",
    "learner.log_probability_passes": f"{ASSUMED}: the old policy's",
    "learner.tokens_per_gpu": ASSUMED,
    "learner.overlap": f"{ASSUMED}: FSDP gathers the next layer while one computes",
    "step.other_s": f"{ASSUMED}: data, rewards, preparation",
}
"Of the defaults; what differs from its default is the config's."

MODELLED = (
    (
        "weights and products",
        "whichever is longer",
        "roofline; a forward's own order of kernels is not modelled",
    ),
    (
        "experts",
        "routed evenly",
        "expected distinct experts of a batch; real routers are uneven and read fewer",
    ),
    ("chain's acceptance", "one probability a level", "where only a mean length is known"),
    ("prompts", "computed when a slot takes the sample", "no chunked prefill; shared within a group only"),
    ("spread of speeds", "with drafts only", "plain decoding makes a token a step of every sample"),
    (
        "training state",
        f"{STATE_BYTES:.0f} bytes a parameter",
        "bf16 weight and gradient, fp32 copy and moments",
    ),
    ("activations", "not counted in memory", "recomputed"),
    ("pipeline parallel", "not modelled", "an instance's GPUs split matrices or experts (pools.split)"),
    ("caches of a sample", "its mean length", "paged; what runs out waits"),
)


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
            name="policy",
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
        value = _value(config, section, name)
        if section == "drafter" and (cluster.instance.draft is None or profiled):
            continue
        if name == "acceptance_length" and config.drafter.acceptance is not None:
            value, source = config.drafter.acceptance, "the config"
        same = value == _value(plain, section, name)
        rows.append(Assumption(name=key, value=_text(value), source=source if same else "the config"))
    rows += [Assumption(name=name, value=value, source=source) for name, value, source in MODELLED]
    return rows


def _value(config: SimulatedClusterConfig, section: str, name: str) -> Any:
    return getattr(getattr(config, section), name)


def _text(value: Any) -> str:
    if isinstance(value, float) and 0.0 < value < 0.01:
        return f"{value * 1e6:.0f} us"
    return str(value)
