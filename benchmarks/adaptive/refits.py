"""The demo run with and without refits of its draft: does the drafter keep up with the moving policy?"""

from __future__ import annotations

from pathlib import Path

from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.observe.console import Reporter
from rlhfspec.cluster.placement.origin import ROOT
from rlhfspec.cluster.plan.names import resolve_models
from rlhfspec.cluster.plan.run_check import check_run
from rlhfspec.cluster.run.loop import run_training
from rlhfspec.core.config_io import load_config
from rlhfspec.core.metrics import read_metrics


def acceptance_by_iteration(out: Path, *, refit: bool, iterations: int) -> tuple[list[float], float, str]:
    """Train the demo with a fixed chain; return acceptance rates, the largest refit share, the final checksum."""
    changes = [
        "speculation.policy=fixed",
        "speculation.num_nodes=6",
        f"drafter_training.refit={str(refit).lower()}",
        f"run.iterations={iterations}",
        f"run.output_dir={out}",
        f"run.name=refit-{'on' if refit else 'off'}",
    ]
    report = Reporter()
    config = resolve_models(load_config(ROOT / "configs" / "demo.yaml", changes), report)
    run_dir = RunDir.create(config)
    result = run_training(check_run(config, output_dir=out), run_dir, report)
    metrics = read_metrics(run_dir.metrics_file)
    shares = [row.get("time/refit_s", 0.0) / row["time/iteration_s"] for row in metrics]
    rates = [row[ACCEPTANCE] for row in metrics]
    return rates, max(shares), result.parameter_checksum


ACCEPTANCE = "rollout/acceptance_rate"
