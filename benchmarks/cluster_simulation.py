"""The cluster simulator beside published figures and beside runs of this machine; how long 1,024 instances take.

Nothing is fitted to the figure that it is compared with. What a paper does not say is set beforehand, once in the
middle and once at both ends of a range.
"""

from __future__ import annotations

import time
from itertools import chain

from rich.table import Table

from ..core.settings.simulated_cluster import SimulatedClusterConfig
from ..policies.simulate.cluster_simulation import RolloutSimulation
from ..policies.simulate.described_cluster import describe
from .published.papers import Row, nemo_8b_rows, nemo_235b_rows, rlhfspec_rows, tlt_rows
from .simulated_runs.compared_runs import own_runs
from .simulated_runs.look_ahead import look_ahead_rows, look_ahead_table
from .support.harness import Bench

LARGE = {"instances": 1024, "samples": 100_000}


def run(bench: Bench) -> int:
    """Run the benchmark; always returns 0. `data` is not used; `quick` leaves out the projections for 235B, look-ahead.

    Of the runs of this machine `quick` has those with a core each for instance and trainer.
    """
    console, figures = bench.console, bench.figures.values
    papers = {"tlt": [*tlt_rows()], "rlhfspec": [*rlhfspec_rows()], "nemo_8b": [*nemo_8b_rows()]}
    if not bench.is_quick:
        papers["nemo_235b"] = [*nemo_235b_rows()]
    for paper, rows in papers.items():
        figures |= paper_figures(paper, rows)
    figures["simulate_1024_s"] = large_rollout_s()
    rows = [row for rows in papers.values() for row in rows]
    for row in rows:
        figures[row.name] = row.simulated
        bench.figures.intervals[row.name] = (row.low, row.high)
    console.print(_table(rows))
    ahead = [] if bench.is_quick else [*look_ahead_rows()]
    if ahead:
        console.print(look_ahead_table(ahead))
    # runs that break off leave what is known by then
    for own in chain([{}], own_runs(bench.out, bench.mode, console)):
        figures |= own
        bench.write(published=[row.tree() for row in rows], look_ahead=ahead)
    return 0


def paper_figures(paper: str, rows: list[Row]) -> dict[str, float]:
    """Largest deviations: of all, of those whose inputs are all published, and from the range over what is not."""
    figures = {f"simulator_{paper}_error": max(abs(row.deviation) for row in rows)}
    known = [abs(row.deviation) for row in rows if row.known]
    if known:
        figures[f"simulator_{paper}_known_error"] = max(known)
    figures[f"simulator_{paper}_outside"] = max(row.outside for row in rows)
    return figures


def large_rollout_s() -> float:
    """Processor seconds of one rollout on 1,024 instances with 100,000 samples under finish_time."""
    cluster = describe(
        SimulatedClusterConfig.model_validate(
            {
                "pools": {"instances": LARGE["instances"], "trainer_gpus": LARGE["instances"]},
                "lengths": {"samples": LARGE["samples"]},
            }
        )
    )
    began_s = time.process_time()
    samples = cluster.samples(0)
    mean_tokens = float(samples.context_tokens.mean())
    simulation = RolloutSimulation(
        cluster,
        None,
        "off" if cluster.instance.draft is None else cluster.config.drafter.policy,
        slots=cluster.slots(mean_tokens),
        mean_tokens=mean_tokens,
        earlier=cluster.samples(1).response_tokens,
    )
    simulation.simulate(samples)
    return time.process_time() - began_s


def _table(rows: list[Row]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("figure", "published", "simulated", "range", "deviation", "inputs"):
        table.add_column(title, justify="left" if title in ("figure", "inputs") else "right")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.published:.2f}",
            f"{row.simulated:.2f}",
            f"{row.low:.2f} to {row.high:.2f}",
            f"{row.deviation:+.0%}",
            "published" if row.known else "not all",
        )
    return table
