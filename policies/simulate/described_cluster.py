"""What a simulated cluster's config stands for: dimensions read, devices looked up, an instance put together.

Every assumption made on the way is a row of one table: its value, and where it is from.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...core.settings.simulated_cluster import QWEN_7B, SimulatedClusterConfig
from ...profiles.gpu_sheets import SHEETS
from ...profiles.transfer import PrefillModel, TransferModel
from .analytic_instance import (
    AnalyticInstance,
    Draft,
    accepted_nodes,
    even_acceptance,
)
from .model_dimensions import (
    ModelDimensions,
    dimensions_of,
    head_dimensions,
    read_dimensions,
)
from .roofline import ContradictionError, Reached, Roofline, flops_of
from .simulated_instance import SharedMachine
from .simulation_records import (
    MoveTruth,
    Samples,
    WorkloadName,
    drawn_lengths,
    samples_of,
)
from .training_cost import most_slots

DEEPEST = 16
"Levels up to which the adaptive choice looks."
H100_CLASS = SimulatedClusterConfig.model_validate(
    {
        "device": {
            "name": "H100",
            "memory_share": 0.7,
            "compute_share": 0.5,
            # half of one 400 Gbit/s port
            "link_share": 0.5,
            "layer_s": 0.0,
        },
        # a 0.5B draft model: 1 GB of weights and the launch of its kernels take 0.8 ms
        "drafter": {"depth": 8, "acceptance": (0.8,), "level_s": 5e-4, "step_s": 0.0},
    }
)
"What `rlhfspec simulate` takes where no profile is given."
H100_LABEL = (
    "H100-class (analytic, not measured): Qwen2.5-7B, bf16, 70% of the memory's and 50% of the products' rate"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedCluster:
    """The parts."""

    config: SimulatedClusterConfig
    instance: AnalyticInstance
    recorded: np.ndarray | None = None
    "lengths to draw from"
    batches: tuple[Samples, ...] = ()
    "the samples of each step themselves, again and again, instead of drawn ones"
    training_s: tuple[float, ...] = ()
    "of each of these batches, where they are known"

    @property
    def target(self) -> ModelDimensions:
        """The policy's."""
        return self.instance.target.model

    @property
    def machine(self) -> SharedMachine | None:
        """What instances and trainer share; None where each has its own."""
        pools = self.config.pools
        if pools.cores is None:
            return None
        return SharedMachine(
            cores=pools.cores,
            slowdown=pools.core_slowdown,
            background=pools.background,
            resting=pools.resting_background,
        )

    def moves(self, *, prompt_s: float = 0.0, prompt_token_s: float | None = None) -> MoveTruth:
        """What moves take, where a prompt takes these seconds and a token of it those, or as the sheet has it."""
        target = self.instance.target
        token_s = target.prefill_token_s() if prompt_token_s is None else prompt_token_s
        link = target.sheet.network_bytes_per_s * self.config.device.link_share
        return MoveTruth(
            kv_bytes_per_token=target.kv_bytes_per_token,
            transfer=TransferModel(latency_s=0.02, bytes_per_s=link, open_s=0.5),
            prefill=PrefillModel(fixed_s=0.01 + prompt_s, token_s=token_s, token_squared_s=token_s * 1e-5),
            downtime_s=0.02,
        )

    def slots(self, mean_tokens: float) -> int:
        """Samples of so many tokens that run at once on an instance. Raises ConfigError without room for one."""
        config, draft = self.config, self.instance.draft
        if config.pools.slots is not None:
            return config.pools.slots
        room = most_slots(
            self.instance.target,
            None if draft is None else draft.roofline,
            context_tokens=mean_tokens,
            spare_memory=config.device.spare_memory,
        )
        return min(room, -(-config.lengths.samples // config.pools.instances))

    def samples(self, step: int) -> Samples:
        """One step's samples, drawn for it alone."""
        if self.batches:
            return self.batches[step % len(self.batches)]
        wanted = self.config.lengths
        seed = wanted.seed + step
        count, instances = wanted.samples, self.config.pools.instances
        if self.recorded is not None:
            drawn = np.random.default_rng(seed).choice(self.recorded, count)
            lengths = np.minimum(drawn, wanted.max_new_tokens)
        elif wanted.draw == "equal":
            lengths = np.full(count, wanted.max_new_tokens)
        else:
            name: WorkloadName = wanted.draw
            lengths = drawn_lengths(name, count, instances, max_new_tokens=wanted.max_new_tokens, seed=seed)
        made = samples_of(
            lengths, prompt_tokens=wanted.prompt_tokens, speed_sigma=wanted.speed_sigma, seed=seed
        )
        if wanted.group_samples == 1:
            return made
        return replace(made, group=np.arange(count) // wanted.group_samples)


def describe(config: SimulatedClusterConfig, recorded: np.ndarray | None = None) -> DescribedCluster:
    """Put the parts together. Raises ConfigError for dimensions that cannot be read, ContradictionError for others."""
    model, device, pools = config.model, config.device, config.pools
    sheet = SHEETS[device.name]
    if model.config is not None:
        dimensions = read_dimensions(Path(model.config).expanduser())
    else:
        dimensions = dimensions_of(model.dimensions or QWEN_7B, origin="model.dimensions")
    flops_of(sheet, model.precision)
    reached = Reached(
        memory=device.memory_share,
        compute=device.compute_share,
        link=device.link_share,
        layer_s=device.layer_s,
        collective_s=device.collective_s,
    )
    target = Roofline(
        model=dimensions,
        sheet=sheet,
        gpus=pools.tensor_parallel,
        precision=model.precision,
        cache_bytes=model.cache_bytes,
        reached=reached,
        split=pools.split,
    )
    if pools.split == "expert" and not dimensions.experts:
        raise ContradictionError(
            "pools.split expert: the model has no experts; expected num_experts in its config, or tensor"
        )
    return DescribedCluster(
        config=config,
        instance=AnalyticInstance(target=target, draft=_draft(config, target)),
        recorded=recorded,
    )


def _draft(config: SimulatedClusterConfig, target: Roofline) -> Draft | None:
    drafter = config.drafter
    if drafter.kind == "none":
        return None
    if drafter.config is not None:
        model = read_dimensions(Path(drafter.config).expanduser())
    else:
        model = head_dimensions(target.model, layers=drafter.layers, vocabulary=drafter.vocab_size)
    levels = drafter.depth
    nodes = drafter.nodes or levels
    given = drafter.acceptance or (even_acceptance(drafter.acceptance_length, levels),)
    accepted = accepted_nodes(given, max(DEEPEST, levels))
    tokens = drafter.acceptance_length if drafter.acceptance is None else 1.0 + float(accepted[levels])
    return Draft(
        roofline=Roofline(
            model=model,
            sheet=target.sheet,
            gpus=drafter.tensor_parallel or target.gpus,
            precision="bf16",
            cache_bytes=target.cache_bytes,
            reached=target.reached,
            split=target.split,
        ),
        accepted=accepted,
        level_s=drafter.level_s,
        step_s=drafter.step_s,
        nodes=nodes,
        levels=levels,
        width=drafter.width,
        tokens=tokens,
    )


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
