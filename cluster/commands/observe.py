"""`rlhfspec status`, `explain`, `trace`, `report`, `monitoring`: what a run does or did."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ...core.outside import user_path
from .arguments import SECONDS
from .declare import Arg

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from rich.console import RenderableType

    from ..folder.layout import RunDir
    from ..observe.live_page import LivePage

Run = Annotated[str, Arg("RUN", "folder of the run; with --address the run's name")]
Address = Annotated[
    str, Arg(help="of the Ray cluster: HOST:PORT of its head, or auto on one of its machines")
]
AsJson = Annotated[bool, Arg(help="print everything as JSON and nothing else", flag="--json")]


def status(
    run: Run | None = None,
    *,
    address: Address | None = None,
    watch: Annotated[
        float,
        Arg("SECONDS", "print it again every few seconds (2) until Ctrl-C", parse=SECONDS, bare=2.0),
    ]
    | None = None,
    as_json: AsJson = False,
) -> int:
    """What a running job does now.

    Print what a run does now: iteration, phase, samples, rewards, tokens a second, instances, waits, last events.
    Where its threads are: `ray stack` or `py-spy dump` on their machine; its actors: `ray list actors`.

      rlhfspec status                          the newest run under ./runs
      rlhfspec status runs/demo-20260101-120000 --watch
      rlhfspec status --address 10.0.0.1:6379  every run of a Ray cluster, or the one that is named
    """
    from rich.live import Live

    from ..observe.console import PipeConsole

    console = PipeConsole(highlight=False, soft_wrap=True)
    with _joined(address):
        if as_json:
            sys.stdout.write(_pages_as_json(run, address) + "\n")
        elif watch is None:
            console.print(_view(run, address))
        elif not console.is_terminal:
            while True:
                console.print(_view(run, address))
                time.sleep(watch)
        else:
            with Live(_view(run, address), console=console, auto_refresh=False) as live:
                while True:
                    time.sleep(watch)
                    live.update(_view(run, address), refresh=True)
    return 0


def explain(run: Annotated[str, Arg("RUN", "folder of the run")] | None = None) -> int:
    """Where a run's time went, and what to change next.

    Print the closing table of a run that is finished or not, and below it: how long instances decoded, what drafting
    and moves gave and cost, what a comparison measured (`rlhfspec compare`), and the config key to change next.

      rlhfspec explain                         the newest run under ./runs
      rlhfspec explain runs/demo-20260101-120000
    """
    from ..observe.explanation import explain_run, no_iteration
    from ..observe.run_record import RunRecord

    run_dir = _open(run)
    explained = explain_run(RunRecord.read(run_dir.path, lambda line: print(line, file=sys.stderr)))
    if explained is None:
        raise no_iteration(run_dir)
    print(explained.text(), end="")
    return 0


def trace(
    run: Annotated[str, Arg("RUN", "folder of the run")] | None = None,
    *,
    iteration: Annotated[int, Arg("N", "counted from 1 (the last)")] | None = None,
    out: Annotated[Path, Arg("FILE")] | None = None,
) -> int:
    """The timeline of one iteration, for Perfetto.

    Write what the instances did in one iteration, decode steps, transfers and moves, for ui.perfetto.dev or
    chrome://tracing. The last 100 iterations are kept, of a running job too.

      rlhfspec trace                           the last iteration of the newest run under ./runs
      rlhfspec trace runs/demo-20260101-120000 --iteration 3 --out third.json
    """
    from ..observe.timeline import write_kept_trace

    path = write_kept_trace(_open(run), iteration, out)
    print(f"{path}: open it in https://ui.perfetto.dev")
    return 0


def report(
    run: Annotated[str, Arg("RUN", "folder of the run")] | None = None,
    *,
    iteration: Annotated[int, Arg("N", "whose timeline is drawn, counted from 1 (the last)")] | None = None,
    out: Annotated[Path, Arg("FILE.html", "(RUN-report.html in the current folder)")] | None = None,
) -> int:
    """The page of a run, as one HTML file.

    Write what a run achieved as one HTML file that needs nothing else: rewards and lengths, who decoded when, how deep
    drafts were accepted, samples of the first and the last iteration with their drafted tokens marked, where the time
    went. Of a run that lives, died or is damaged it shows what its folder has, once an iteration has finished.

      rlhfspec report                          the newest run under ./runs
      rlhfspec report runs/demo-20260101-120000 --iteration 3 --out third.html
    """
    from ..report.page import write_report

    print(write_report(_open(run), iteration, out))
    return 0


def monitoring(*, out: Annotated[Path, Arg("DIR")]) -> int:
    """Write a Grafana dashboard, alert rules, scrape settings.

    Write what Prometheus and Grafana need: a dashboard, alert rules, a scrape configuration for a Ray on this machine,
    and for Kubernetes the same as PodMonitor, PrometheusRule and ConfigMap.

      rlhfspec monitoring --out monitoring
      prometheus --config.file monitoring/prometheus.yaml
      kubectl apply -f monitoring/kubernetes.yaml
    """
    from ..observe.monitoring import write_monitoring

    for path in write_monitoring(out):
        print(path)
    return 0


def _joined(address: str | None) -> AbstractContextManager[object]:
    if address is None:
        return nullcontext()
    from ..ray_start.ray_session import joined_cluster

    return joined_cluster(address)


def _open(run: str | None) -> RunDir:
    from ..observe.find_runs import open_run

    return open_run(None if run is None else user_path(run))


def _view(run: str | None, address: str | None) -> RenderableType:
    from rich.console import Group

    from ..observe.find_runs import cluster_runs
    from ..observe.status_text import status_view
    from ..resume.changed_keys import describe_run

    if address is None:
        run_dir = _open(run)
        state = [f"{run_dir.path.name}: {line}" for line in describe_run(run_dir)]
        return status_view(_page(run_dir), state=state, now=time.time())
    return Group(
        *(
            status_view(one.page, state=[f"namespace {one.namespace}"], now=time.time(), actors=one.actors)
            for one in cluster_runs(run)
        )
    )


def _page(run_dir: RunDir) -> LivePage | None:
    from ..folder.run_status import LIVING
    from ..observe.live_page import LivePage

    page = LivePage.read(run_dir.live_file)
    if page is not None and run_dir.status()["state"] not in (*LIVING, "unknown"):
        # its last page may not have been written, as on a full disk
        page = replace(page, ended=True)
    return page


def _pages_as_json(run: str | None, address: str | None) -> str:
    from ..observe.find_runs import cluster_runs

    if address is None:
        page = _page(_open(run))
        return page.encode().decode() if page is not None else "null"
    pages = [one.page.encode().decode() for one in cluster_runs(run) if one.page is not None]
    return f"[{', '.join(pages)}]"
