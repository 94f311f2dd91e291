"""Finds runs, by folder or by the address of a Ray cluster, and says why one stands still.

Who waits for whom, where every thread is, what was decided last, who uses memory. Nothing here waits for the run: its
page is read, and its processes are looked at from outside, on every machine. Every question to a cluster has a limit
of time: who asks must hear of a head that does not answer.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.observe.live_page import LivePage, stored_pages
from rlhfspec.cluster.observe.processes import STACKS_TIMEOUT_S, SeenNode, SeenProcess, look_here
from rlhfspec.core.errors import ConfigError, WaitTimeout

T = TypeVar("T")
ANSWER_S = 20.0
_NAMESPACE_STEM = "rlhfspec-"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRun:
    """A run of a cluster: its page, where it told one, and its living named actors."""

    page: LivePage | None
    namespace: str
    actors: tuple[str, ...]


def newest_run(folder: Path) -> Path:
    """The run folder that was made last in `folder`. Raises ConfigError without one."""
    runs = [path.parent for path in folder.glob("*/config.yaml")] if folder.is_dir() else []
    if not runs:
        raise ConfigError(
            f"no run to look at: {folder} has no run folder; name one, or give --address of the Ray cluster it runs on"
        )
    return max(runs, key=lambda path: (path / "config.yaml").stat().st_mtime)


def open_run(path: Path | None) -> RunDir:
    """The folder of that path, else the newest under `runs`. Raises ConfigError."""
    return RunDir.open(path if path is not None else newest_run(Path.cwd() / "runs"))


def cluster_runs(run: str | None) -> list[ClusterRun]:
    """Runs of the cluster that this process has joined; only the one of that name where one is given.

    Raises ConfigError when there is none, WaitTimeout when the cluster's head does not answer.
    """
    found = within(_read_runs, "the head's key-value store and list of actors")
    names = [run_name(one) for one in found]
    found = [one for one, name in zip(found, names, strict=True) if run is None or name == run]
    if not found:
        asked = f"called {run} " if run else ""
        raise ConfigError(
            f"the cluster has no run {asked}that tells of itself; it has {', '.join(sorted(set(names))) or 'none'}"
        )
    return found


def within(call: Callable[[], T], whom: str, timeout_s: float = ANSWER_S) -> T:
    """What `call` returns. Raises WaitTimeout naming `whom`, and what it raises itself."""
    answers: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if errors:
        raise errors[0]
    if not answers:
        raise WaitTimeout(
            waiter="this command",
            waited_for=whom,
            order="tell of the run",
            waited_s=timeout_s,
            advice="look whether the head lives and this machine reaches it",
        )
    return answers[0]


def _read_runs() -> list[ClusterRun]:
    import ray

    alive: dict[str, list[str]] = {}
    named: list[Any] = ray.util.list_named_actors(all_namespaces=True)
    for actor in named:
        if actor["namespace"].startswith(_NAMESPACE_STEM):
            alive.setdefault(actor["namespace"], []).append(actor["name"])
    runs = []
    for page in stored_pages():
        actors = tuple(alive.pop(page.namespace, ()))
        runs.append(ClusterRun(page=page, namespace=page.namespace, actors=actors))
    # such as evaluations, which tell no page
    runs += [ClusterRun(page=None, namespace=name, actors=tuple(actors)) for name, actors in alive.items()]
    return runs


def run_name(run: ClusterRun) -> str:
    """The run's name."""
    if run.page is not None:
        return run.page.run
    return run.namespace.removeprefix(_NAMESPACE_STEM).rpartition("-")[0]


NODE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Everything of one run at one moment."""

    run: str
    page: LivePage | None
    nodes: tuple[SeenNode, ...]
    silent: tuple[str, ...] = ()
    "who did not answer or was not found, and why"

    @property
    def processes(self) -> list[SeenProcess]:
        """Of all machines; a machine with several Ray nodes is counted once."""
        return list({(one.host, one.pid): one for node in self.nodes for one in node.processes}.values())

    def to_json(self) -> str:
        """For tools."""
        tree: dict[str, Any] = {
            "run": self.run,
            "page": None if self.page is None else asdict(self.page),
            "nodes": [node.as_tree() for node in self.nodes],
            "silent": self.silent,
        }
        return json.dumps(tree)


def diagnose_here(run: str, page: LivePage | None, *, timeout_s: float = STACKS_TIMEOUT_S) -> Diagnosis:
    """From this machine alone, without Ray; what runs elsewhere is named. `timeout_s` for each process's stacks."""
    node = look_here(run, timeout_s=timeout_s)
    silent = list(_silent([node]))
    if page is not None and not page.ended:
        found = {one.actor for one in node.processes}
        expected = [row.name for row in page.instances if row.state == "serving"]
        silent += [f"{name} has no process on {node.host}" for name in expected if name not in found]
        if page.host != socket.gethostname():
            silent.append(f"the run is on {page.host}: look there, or by --address {page.ray_address}")
    return Diagnosis(run=run, page=page, nodes=(node,), silent=tuple(silent))


def diagnose_cluster(found: ClusterRun) -> Diagnosis:
    """From every node of the cluster that this process has joined. Raises WaitTimeout for a head without an answer."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    run = run_name(found)
    nodes = within(lambda: [one for one in ray.nodes() if one["Alive"]], "the head's list of nodes", ANSWER_S)
    look: Any = ray.remote(num_cpus=0, max_retries=0)(look_here)
    refs = {
        look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(
            run
        ): node["NodeManagerHostname"]
        for node in nodes
    }
    ready, late = ray.wait(list(refs), num_returns=len(refs), timeout=NODE_TIMEOUT_S)
    silent = [f"node {refs[ref]} did not answer within {NODE_TIMEOUT_S:.0f} s" for ref in late]
    seen: list[SeenNode] = []
    for ref in ready:
        try:
            seen.append(ray.get(ref, timeout=ANSWER_S))
        except Exception as error:  # its node died, or has no such code
            silent.append(f"node {refs[ref]}: {' '.join(str(error).split())[:200]}")
    found_here = {one.actor for node in seen for one in node.processes}
    silent += [
        f"{name} is registered, and no process of that name was found"
        for name in found.actors
        if name not in found_here
    ]
    return Diagnosis(run=run, page=found.page, nodes=tuple(seen), silent=(*silent, *_silent(seen)))


def _silent(nodes: Iterable[SeenNode]) -> Iterable[str]:
    for one in (one for node in nodes for one in node.processes):
        who = f"{one.actor} (process {one.pid} on {one.host})"
        if one.is_stopped:
            yield f"{who} is stopped: kill -CONT {one.pid} lets it go on"
        elif one.why_no_stacks:
            yield f"{who} shows no stacks: {one.why_no_stacks}"
