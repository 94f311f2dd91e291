"""`rlhfspec status`, `diagnose`, `trace` and `monitoring`: what a run does or did, why it stands still."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.commands.arguments import path_argument
from core.errors import ConfigError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from rich.console import RenderableType

    from cluster.observing.live_page import LivePage
    from cluster.run_folder.layout import RunDir

_PIPE_WIDTH = 160
"Columns of a table that goes into a file."
_STATUS = """\
Print what a run does now: iteration, phase, samples, rewards, tokens a second, instances, last events.

  rlhfspec status                          the newest run under ./runs
  rlhfspec status runs/demo-20260101-120000 --watch
  rlhfspec status --address 10.0.0.1:6379  every run of a Ray cluster, or the one that is named
"""


_DIAGNOSE = """\
Say why a run stands still: who waits for whom and since when, where the threads of every process are, what was decided
last, and who uses memory. It waits for nobody: processes are looked at from outside, frozen ones too.

  rlhfspec diagnose                        the newest run under ./runs, its processes on this machine
  rlhfspec diagnose --address auto         every run of a Ray cluster, processes on all of its nodes
  rlhfspec diagnose runs/demo-20260101-120000 --stacks
"""

_TRACE = """\
Write what the instances did in one iteration, decode steps, transfers and moves, for ui.perfetto.dev or
chrome://tracing. The last 100 iterations are kept, of a running job too.

  rlhfspec trace                           the last iteration of the newest run under ./runs
  rlhfspec trace runs/demo-20260101-120000 --iteration 3 --out third.json
"""

_MONITORING = """\
Write what Prometheus and Grafana need: a dashboard, alert rules, a scrape configuration for a Ray on this machine, and
for Kubernetes the same as PodMonitor, PrometheusRule and ConfigMap.

  rlhfspec monitoring --out monitoring
  prometheus --config.file monitoring/prometheus.yaml
  kubectl apply -f monitoring/kubernetes.yaml
"""


def add_parser(commands: Any) -> None:
    """Describe the commands."""
    _add(commands, "status", "what a running job does now", _STATUS, run_status)
    diagnose = _add(commands, "diagnose", "why a running job stands still", _DIAGNOSE, run_diagnose)
    diagnose.add_argument("--stacks", action="store_true", help="print every thread's stack too")
    trace = commands.add_parser(
        "trace",
        help="the timeline of one iteration, for Perfetto",
        description=_TRACE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    trace.add_argument("run_name", metavar="RUN", nargs="?", help="folder of the run")
    trace.add_argument("--iteration", type=int, metavar="N", help="counted from 1 (the last)")
    trace.add_argument("--out", type=path_argument, metavar="FILE")
    trace.set_defaults(run=run_trace)
    monitoring = commands.add_parser(
        "monitoring",
        help="write a Grafana dashboard, alert rules, scrape settings",
        description=_MONITORING,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    monitoring.add_argument("--out", type=path_argument, required=True, metavar="DIR")
    monitoring.set_defaults(run=run_monitoring)


def _add(commands: Any, name: str, summary: str, text: str, run: Any) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name, help=summary, description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "run_name", metavar="RUN", nargs="?", help="folder of the run; with --address the run's name"
    )
    parser.add_argument(
        "--address", help="of the Ray cluster: HOST:PORT of its head, or auto on one of its machines"
    )
    if name == "status":
        parser.add_argument(
            "--watch",
            type=float,
            nargs="?",
            const=2.0,
            metavar="SECONDS",
            help="print it again every few seconds (2) until Ctrl-C",
        )
    parser.add_argument("--json", action="store_true", help="print everything as JSON and nothing else")
    parser.set_defaults(run=run)
    return parser


def _joined(address: str | None) -> AbstractContextManager[Any]:
    if address is None:
        return nullcontext()
    from cluster.placement.ray_session import joined_cluster

    return joined_cluster(address)


def run_status(args: argparse.Namespace) -> int:
    """Print the state. Raises ConfigError for no such run, PlacementError for a cluster that cannot be joined."""
    from rich.live import Live

    from cluster.reporting.console import PipeConsole

    if args.watch is not None and args.watch <= 0:
        raise ConfigError(f"--watch expects seconds above 0, got {args.watch:g}")
    console = PipeConsole(highlight=False, soft_wrap=True)
    with _joined(args.address):
        if args.json:
            sys.stdout.write(_pages_as_json(args) + "\n")
        elif args.watch is None:
            console.print(_view(args))
        elif not console.is_terminal:
            while True:
                console.print(_view(args))
                time.sleep(args.watch)
        else:
            with Live(_view(args), console=console, auto_refresh=False) as live:
                while True:
                    time.sleep(args.watch)
                    live.update(_view(args), refresh=True)
    return 0


def run_diagnose(args: argparse.Namespace) -> int:
    """Print it. Raises ConfigError for no such run, PlacementError for a cluster that cannot be joined."""
    from cluster.observing.attach import cluster_runs, open_run
    from cluster.observing.diagnosis import diagnose_cluster, diagnose_here
    from cluster.observing.diagnosis_text import diagnosis_view
    from cluster.reporting.console import PipeConsole

    with _joined(args.address):
        if args.address is None:
            run_dir = open_run(_folder(args))
            found = [diagnose_here(run_dir.path.name, _page(run_dir))]
        else:
            found = [diagnose_cluster(one) for one in cluster_runs(args.run_name)]
    if args.json:
        sys.stdout.write(f"[{', '.join(one.to_json() for one in found)}]\n")
    else:
        console = PipeConsole(highlight=False)
        if not console.is_terminal:
            console.width = _PIPE_WIDTH
        for one in found:
            console.print(diagnosis_view(one, now=time.time(), with_stacks=args.stacks))
    return 0


def run_trace(args: argparse.Namespace) -> int:
    """Write the trace. Raises ConfigError for no such run or iteration."""
    from cluster.observing.attach import open_run
    from cluster.observing.kept_traces import write_kept_trace

    path = write_kept_trace(open_run(_folder(args)), args.iteration, args.out)
    print(f"{path}: open it in https://ui.perfetto.dev")
    return 0


def run_monitoring(args: argparse.Namespace) -> int:
    """Write the files. Raises StorageError."""
    from cluster.monitoring.monitoring_files import write_monitoring

    for path in write_monitoring(args.out):
        print(path)
    return 0


def _view(args: argparse.Namespace) -> RenderableType:
    from rich.console import Group

    from cluster.observing.attach import cluster_runs, open_run
    from cluster.observing.status_text import status_view
    from cluster.run_folder.run_status import describe_status

    if args.address is None:
        run_dir = open_run(_folder(args))
        state = [f"{run_dir.path.name}: {line}" for line in describe_status(run_dir.status())]
        return status_view(_page(run_dir), state=state, now=time.time())
    return Group(
        *(
            status_view(one.page, state=[f"namespace {one.namespace}"], now=time.time(), actors=one.actors)
            for one in cluster_runs(args.run_name)
        )
    )


def _page(run_dir: RunDir) -> LivePage | None:
    from cluster.observing.live_page import LivePage
    from cluster.run_folder.run_status import LIVING

    page = LivePage.read(run_dir.live_file)
    if page is not None and run_dir.status()["state"] not in (*LIVING, "unknown"):
        # its last page may not have been written, as on a full disk
        page = replace(page, ended=True)
    return page


def _pages_as_json(args: argparse.Namespace) -> str:
    from cluster.observing.attach import cluster_runs, open_run

    if args.address is None:
        page = _page(open_run(_folder(args)))
        return page.encode().decode() if page is not None else "null"
    pages = [one.page.encode().decode() for one in cluster_runs(args.run_name) if one.page is not None]
    return f"[{', '.join(pages)}]"


def _folder(args: argparse.Namespace) -> Path | None:
    return None if args.run_name is None else path_argument(args.run_name)
