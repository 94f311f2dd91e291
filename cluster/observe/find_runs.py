"""Finds runs, by folder or by the address of a Ray cluster.

Every question to a cluster has a limit of time: who asks must hear of a head that does not answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ...core.errors import ConfigError, WaitTimeout
from ..folder.layout import RunDir
from .live_page import LivePage, stored_pages

T = TypeVar("T")
ANSWER_S = 20.0
_NAMESPACE_STEM = "rlhfspec-"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRun:
    """A run of a cluster: its page, where it told one, and its living named actors."""

    page: LivePage | None
    namespace: str
    actors: tuple[str, ...]

    @property
    def name(self) -> str:
        """The run's name."""
        if self.page is not None:
            return self.page.run
        return self.namespace.removeprefix(_NAMESPACE_STEM).rpartition("-")[0]


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
    names = {one.name for one in found}
    found = [one for one in found if run in (None, one.name)]
    if not found:
        asked = f"called {run} " if run else ""
        raise ConfigError(
            f"the cluster has no run {asked}that tells of itself; it has {', '.join(sorted(names)) or 'none'}"
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
