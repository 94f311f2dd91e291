"""Two pictures of a profile: time against tokens verified, with the knee; reliability of the acceptance model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlhfspec.profiles.cost import CostModel, CostTable, Shape
from rlhfspec.profiles.quality import predict, reliability
from rlhfspec.profiles.recording import join_nodes

if TYPE_CHECKING:
    from rlhfspec.engine.calibration.profiler import MadeProfile

KNEE = 2.0
"Where verification costs this many times one token of every sample."


def draw_profile(made: MadeProfile, folder: Path) -> list[Path]:
    """Write `verify_cost.png` and, where something drafts, `acceptance.png`; return their paths."""
    import matplotlib

    matplotlib.use("Agg")
    pictures = [_draw_cost(made, folder / "verify_cost.png")]
    if made.drafts:
        pictures.append(_draw_acceptance(made, folder / "acceptance.png"))
    return pictures


def _draw_cost(made: MadeProfile, path: Path) -> Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for number, batch in enumerate(np.unique(np.asarray(made.costs.shape.num_samples))):
        color = f"C{number}"
        rows = made.costs.where(np.asarray(made.costs.shape.num_samples) == batch)
        tokens = np.asarray(rows.shape.num_nodes) + batch
        axes.scatter(tokens, rows.verify_s * 1e3, s=6, color=color, alpha=0.5)
        axes.plot(*_curve(made.profile.cost, rows, float(batch)), color=color, label=f"B={batch:g}")
    axes.axvline(knee_tokens(made.profile.cost, made.costs), color="grey", linestyle=":", label="knee")
    axes.set(xlabel="tokens verified", ylabel="ms", xscale="log", yscale="log", title="target forward")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _draw_acceptance(made: MadeProfile, path: Path) -> Path:
    from matplotlib import pyplot

    nodes = join_nodes([draft.nodes() for draft in made.drafts])
    figure, axes = pyplot.subplots(figsize=(4.5, 4.5))
    for rank, label in ((1, "first choice"), (2, "second choice")):
        some = nodes.where(nodes.rank == rank)
        if len(some):
            points = reliability(predict(made.profile.acceptance, some), some.accepted, 12)
            axes.plot([p for p, _, _ in points], [a for _, a, _ in points], "o-", label=label)
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
    axes.set(xlabel="estimated acceptance", ylabel="accepted", title="reliability")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def knee_tokens(cost: CostModel, table: CostTable) -> float:
    """Tokens of one sample at which a target forward costs KNEE times that of one token."""
    context = float(np.median(np.asarray(table.shape.context_tokens) / np.asarray(table.shape.num_samples)))
    tokens = np.arange(1, 2049)
    seconds = cost.verify_s(_chain(1.0, context, tokens - 1.0))
    beyond = np.nonzero(seconds > KNEE * seconds[0])[0]
    return float(tokens[beyond[0]]) if len(beyond) else float(tokens[-1])


def _curve(cost: CostModel, rows: CostTable, batch: float) -> tuple[np.ndarray, np.ndarray]:
    nodes = np.arange(0, np.asarray(rows.shape.widest).max() + 1)
    context = float(np.median(np.asarray(rows.shape.context_tokens)))
    return batch * (nodes + 1), cost.verify_s(_chain(batch, context, nodes)) * 1e3


def _chain(batch: float, context: float, nodes: np.ndarray) -> Shape:
    return Shape(
        num_samples=batch,
        context_tokens=context,
        num_nodes=batch * nodes,
        widest=nodes,
        levels=nodes,
        width=1.0,
    )
