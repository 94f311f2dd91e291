"""Why a run stands still: who waits for whom, where every thread is, what was decided last, who uses memory.

Nothing here waits for the run: its page is read, and its processes are looked at from outside, on every machine.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from rlhfspec.cluster.observing.attach import ANSWER_S, ClusterRun, run_name, within
from rlhfspec.cluster.observing.live_page import LivePage
from rlhfspec.cluster.observing.processes import STACKS_TIMEOUT_S, SeenNode, SeenProcess, look_here

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
