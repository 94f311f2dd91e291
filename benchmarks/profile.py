"""How good a profile is: costs on a later sweep, acceptance on other prompts, for the demo and the larger pair."""

from __future__ import annotations

from pathlib import Path

from benchmarks.adaptive.policies import pair_workload, profile_of, with_other_draft
from benchmarks.support.harness import Bench
from rlhfspec.cluster.observe.pictures import draw_profile
from rlhfspec.profiles.profile import save_profile

BUDGET_S = {"quick": 15.0, "default": 90.0, "full": 240.0}
FIGURES = (
    "verify_cost_median_rel_error",
    "verify_cost_p90_rel_error",
    "acceptance_calibration_error",
    "acceptance_calibration_error_selected",
    "acceptance_log_loss",
    "acceptance_log_loss_paper_form",
    "acceptance_log_loss_constant",
)


def run(*, out: Path, mode: str, data: Path | None) -> int:
    """Run the benchmark; returns 0."""
    bench, figures = Bench("profile", out=out, mode=mode), dict[str, float]()
    for name in ("demo",) if mode == "quick" else ("demo", "large"):
        workload = pair_workload(name)
        made = profile_of(workload, budget_s=BUDGET_S[mode])
        save_profile(made.profile, out / f"profile-{name}", made.costs, made.drafts)
        draw_profile(made, out / f"profile-{name}")
        figures |= {f"{figure}_{name}": made.profile.quality[figure] for figure in FIGURES}
        if name == "demo":
            weak, _ = with_other_draft(workload, made.profile, "weak", budget_s=BUDGET_S[mode] / 4)
            figures |= {
                f"{figure}_demo_weak": weak.quality[figure] for figure in FIGURES if "acceptance" in figure
            }
    bench.figures.values |= figures
    bench.write()
    return 0
