"""`rlhfspec simulate cluster`: a training run on a cluster that is not here."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ...core.outside import user_path
from .arguments import ConfigFile, Overrides
from .declare import Arg
from .simulate import require_file, simulation_bar

if TYPE_CHECKING:
    import numpy as np

    from ...core.settings.simulated_cluster import SimulatedClusterConfig
    from ...policies.simulate.cluster_simulation import ClusterResult
    from ...policies.simulate.sweep import Tried
    from ...profiles.profile import Profile


def cluster(
    *,
    config: ConfigFile | None = None,
    overrides: Overrides,
    sweep: Annotated[
        bool,
        Arg(
            help="try the combinations of the file's `sweep` section, or drafts, split of the GPUs and staleness"
        ),
    ] = False,
    out: Annotated[Path, Arg("FILE", "gets the figures as JSON")] | None = None,
) -> int:
    """A training run on a cluster that is not here.

    Simulate training on a cluster that is not here: rollouts event by event under the policies of real runs, updates,
    publication, the pipeline of bounded staleness, memory. Devices are data sheets or a measured profile.

      rlhfspec simulate cluster                              8 H100 that generate, 8 that train, Qwen2.5-7B
      rlhfspec simulate cluster --set device.name=GB200 --set model.precision=fp8
      rlhfspec simulate cluster --set model.config=path/to/config.json --set step.staleness=1
      rlhfspec simulate cluster --config cluster.yaml --sweep --out sweep.json

    Every key, its default and its meaning: docs/reference/config-simulator.md. What it assumes is printed with its
    source; how far it is from published figures: docs/how-to/simulate.md.
    """
    from ...core.config_io import load_config_of
    from ...core.settings.simulated_cluster import SimulatedClusterConfig
    from ...policies.simulate.cluster_simulation import require_bounded, simulate_cluster
    from ...policies.simulate.described_cluster import assumptions, describe
    from ...profiles.profile import load_profile
    from ..folder.rollouts import read_lengths
    from ..observe.console import PipeConsole, plain_table

    require_file("--out", out)
    setup = load_config_of(SimulatedClusterConfig, config, overrides)
    recorded = None if setup.lengths.file is None else read_lengths(user_path(setup.lengths.file))
    profile = None if setup.device.profile is None else load_profile(user_path(setup.device.profile))
    described = describe(setup, recorded)
    console = PipeConsole(highlight=False)
    rows = assumptions(described, profiled=profile is not None)
    tree: dict[str, Any] = {"schema_version": 1, "config": setup.model_dump(mode="json")}
    if sweep:
        tree |= _sweep(setup, recorded, profile, console)
    else:
        with simulation_bar(require_bounded([setup]), console) as tick:
            made = simulate_cluster(described, profile=profile, progress=tick)
        console.print(_table(made))
        for line in _lines(made, has_draft=described.instance.draft is not None):
            console.print(line, soft_wrap=True)
        tree |= result_tree(made)
    console.print()
    titles = "assumption", "value", "source"
    console.print(plain_table(titles, [(row.name, row.value, row.source) for row in rows], left=titles))
    tree["assumptions"] = [{"name": row.name, "value": row.value, "source": row.source} for row in rows]
    if out is not None:
        from ...core.files import storage_errors

        with storage_errors(out):
            out.write_text(json.dumps(tree, indent=2) + "\n")
        console.print(f"written {out}", soft_wrap=True)
    return 0


def _sweep(
    setup: SimulatedClusterConfig,
    recorded: np.ndarray | None,
    profile: Profile | None,
    console: Any,
) -> dict[str, Any]:
    from ...policies.simulate.cluster_simulation import num_simulated
    from ...policies.simulate.sweep import best, default_axes, planned, sweep

    axes = setup.sweep or default_axes(setup)
    plans = planned(setup, axes, recorded=recorded)
    total = sum(num_simulated(plan.cluster.config) for plan in plans if plan.cluster is not None)
    with simulation_bar(total, console) as tick:
        tried = sweep(setup, axes, recorded=recorded, profile=profile, progress=tick)
    chosen = best(tried)
    console.print(_sweep_table(tried, chosen))
    if chosen is None:
        console.print("none of them fits: see why in the last column")
    else:
        console.print(f"best: {chosen.label}", soft_wrap=True)
    return {
        "sweep": [
            {"values": row.values, "gpus": row.gpus, "refused": row.refused}
            | ({} if row.result is None else result_tree(row.result))
            for row in tried
        ],
        "best": None if chosen is None else chosen.values,
    }


_VALUES = (
    "rollout_speedup",
    "step_speedup",
    "step_bound",
    "rollout_share",
    "publication_s",
    "other_s",
    "slots",
    "mean_tokens",
    "tokens",
)


def result_tree(made: ClusterResult) -> dict[str, Any]:
    """The figures of one simulation, for JSON."""
    fits = {name: getattr(made.memory, name) for name in ("instance_fits", "trainer_fits")}
    return {
        "speculative": made.speculative.tree(),
        "plain": made.plain.tree(),
        "training": asdict(made.training),
        "levels": [list(pair) for pair in made.levels],
        "memory": asdict(made.memory) | fits,
        **{name: getattr(made, name) for name in _VALUES},
    }


def _table(made: ClusterResult) -> Any:
    from ..observe.console import plain_table

    titles = "decoding", "rollout s", "step s", "trainer idle", "instances idle", "moves"
    rows = [
        (
            name,
            f"{phase.rollout_s:.2f}",
            f"{phase.step_s:.2f}",
            f"{phase.trainer_idle:.0%}",
            f"{phase.instances_idle:.0%}",
            f"{phase.moves:.0f}",
        )
        for name, phase in (("plain", made.plain), ("speculative", made.speculative))
    ]
    return plain_table(titles, rows, left=["decoding"])


def _lines(made: ClusterResult, *, has_draft: bool) -> list[str]:
    training, memory = made.training, made.memory
    lines = []
    if made.speculative.steps.why_attempted:
        ahead = made.speculative.steps
        lines.append(
            f"look-ahead: {ahead.attempted_tokens:,.0f} tokens attempted a step, {ahead.proved_tokens:,.0f} proved; "
            f"{ahead.why_attempted}"
        )
    if has_draft:
        lines.append(
            f"speed-up: rollout {made.rollout_speedup:.2f}, step {made.step_speedup:.2f}; in turns at most "
            f"{made.step_bound:.2f} = 1 / (R/a + 1 - R) with R = {made.rollout_share:.2f} and a = "
            f"{made.rollout_speedup:.2f}"
        )
    if made.levels:
        chosen = ", ".join(f"{batch}: {levels}" for batch, levels in made.levels)
        lines.append(f"levels drafted by running samples: {chosen}")
    lines.append(
        f"update {training.update_s:.2f} s (computation {training.compute_s:.2f}, traffic {training.traffic_s:.2f}), "
        f"log-probabilities {training.log_probability_s:.2f} s, publication {made.publication_s:.2f} s, other "
        f"{made.other_s:.2f} s; {made.tokens / 1e6:.2f}M tokens a step, {made.mean_tokens:.0f} a sample"
    )
    lines.append(
        f"memory of a GPU, of {memory.capacity / 1e9:.0f} GB: instance {memory.weights / 1e9:.1f} GB of weights and "
        f"{memory.caches / 1e9:.1f} GB of caches ({made.slots} slots), {_fits(memory.instance_fits)}; trainer "
        f"{memory.training / 1e9:.1f} GB, {_fits(memory.trainer_fits)}"
    )
    return lines


def _fits(holds: bool) -> str:
    return "fits" if holds else "DOES NOT FIT"


def _sweep_table(tried: list[Tried], chosen: Tried | None) -> Any:
    from ..observe.console import plain_table

    keys = ["", *(key.rsplit(".", 1)[-1].replace("_", " ") for key in tried[0].values)]
    rows = []
    for row in tried:
        cells = ["*" if row is chosen else "", *map(str, row.values.values()), str(row.gpus)]
        if row.result is None:
            cells += ["-", "-", "-", "-", row.refused]
        else:
            phase, memory = row.result.speculative, row.result.memory
            cells += [
                f"{phase.rollout_s:.1f}",
                f"{phase.step_s:.1f}",
                f"{phase.trainer_idle:.0%}",
                f"{phase.instances_idle:.0%}",
                "yes" if memory.instance_fits and memory.trainer_fits else "no",
            ]
        rows.append(cells)
    titles = [*keys, "GPUs", "rollout s", "step s", "trainer idle", "instances idle", "fits"]
    return plain_table(titles, rows, left=[*keys, "fits"])
