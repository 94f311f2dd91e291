"""Kubernetes manifests of a run for KubeRay 1.7: the templates (`templates.yaml`), filled in by the plan's pods."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from ...core.config_io import apply_overrides, config_from_dict
from ...core.errors import ConfigError
from ..plan.memory_plan import MIB
from ..plan.topology import POOL_LABEL
from .pool_pods import IDLE_TIMEOUT_S, PodSize, PoolPods, RunPods

RUNS_FOLDER = "/runs"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_PLACEMENT_TIMEOUT_S = 600.0
"Nodes and images take minutes to come; the default is for clusters that stand."
_LONGEST_NAME = 47
"Of a RayJob, in KubeRay."


def template(key: str) -> Any:
    """A part of the templates, the caller's own."""
    return yaml.safe_load(Path(__file__).with_name("templates.yaml").read_text(encoding="utf-8"))[key]


def cluster_config(tree: dict[str, Any], overrides: Iterable[str] = ()) -> dict[str, Any]:
    """Return a config as it runs in the pods: that of the file, joined to their Ray, with results on the shared volume.

    Raises ConfigError for what is no valid config, or places of its own that the pods do not share.
    """
    tree = apply_overrides(tree, overrides)
    config = config_from_dict(tree)
    run = tree["run"] = dict(tree.get("run") or {})
    for key, path in (("output_dir", config.run.output_dir), ("cache_dir", config.run.cache_dir)):
        if not path.startswith("/"):
            # of the folder or the home of whoever starts the run: in a pod they end with it
            run[key] = RUNS_FOLDER if key == "output_dir" else f"{RUNS_FOLDER}/cache"
        elif not f"{path}/".startswith(f"{RUNS_FOLDER}/"):
            raise ConfigError(
                f"run.{key} is {path}, which no pod shares with the others; expected a folder in {RUNS_FOLDER}, the "
                "shared volume, or none"
            )
    timeout_s = max(config.cluster.placement_timeout_s, _PLACEMENT_TIMEOUT_S)
    own = {"address": "auto", "pin_pools": True, "placement_timeout_s": timeout_s}
    tree["cluster"] = dict(tree.get("cluster") or {}) | own
    return tree


def config_map(name: str, tree: dict[str, Any]) -> dict[str, Any]:
    """The config that the job reads, as it was rendered."""
    document = template("config_map") | {"data": {"config.yaml": yaml.safe_dump(tree, sort_keys=False)}}
    document["metadata"]["name"] = f"{name}-config"
    return document


def ray_job(name: str, pods: RunPods, *, image: str, queue: str | None = None) -> dict[str, Any]:
    """A RayJob that trains once on a cluster of its own; with a Kueue queue it waits, suspended, until admitted.

    Its generation pods come and go where the pool is elastic. Raises ConfigError: so they do, and a queue admits.
    """
    elastic = any(pool.least_pods < pool.num_pods for pool in pods.pools)
    if elastic and queue is not None:
        raise ConfigError(
            f"--queue {queue}: Kueue admits as many pods as a job always has, and cluster.generation.max_actors lets "
            "this one grow; take out max_actors and min_actors, or the queue"
        )
    job = _document("rayjob", name, queue)
    job["spec"]["rayClusterSpec"] = _cluster_spec(name, pods, image=image, least=None, autoscales=elastic)
    return job


def ray_cluster(name: str, pods: RunPods, *, image: str, queue: str | None = None) -> dict[str, Any]:
    """A RayCluster to submit runs to; its worker groups come with a run and go when they idle."""
    cluster = _document("raycluster", name, queue)
    cluster["spec"] |= _cluster_spec(name, pods, image=image, least=0, autoscales=True)
    return cluster


def to_yaml(documents: Iterable[dict[str, Any]], *, heading: str) -> str:
    """The documents of one file, below a comment."""
    comment = "".join(f"# {line}\n" for line in heading.splitlines())
    return comment + "---\n".join(
        yaml.dump(each, Dumper=_Dumper, sort_keys=False, width=110) for each in documents
    )


def kubernetes_name(text: str) -> str:
    """A name that Kubernetes and KubeRay take: lower case letters, digits and dashes, a letter first."""
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return (plain if plain[:1].isalpha() else f"run-{plain}")[:_LONGEST_NAME].strip("-")


def _document(key: str, name: str, queue: str | None) -> dict[str, Any]:
    document = template(key)
    document["metadata"]["name"] = name
    if queue is not None:
        document["metadata"]["labels"][QUEUE_LABEL] = queue
    document["spec"]["suspend"] = queue is not None
    return document


def _cluster_spec(
    name: str, pods: RunPods, *, image: str, least: int | None, autoscales: bool
) -> dict[str, Any]:
    """`least`: pods of every group at least; None: what the run always has."""
    spec = template("cluster")
    spec["enableInTreeAutoscaling"] = autoscales
    if not autoscales:
        del spec["autoscalerOptions"]
    head, beside = _pod("ray-head", pods.head, image), template("head")
    container = head["spec"]["containers"][0]
    container["volumeMounts"].append(beside["mount"])
    container["ports"] = beside["ports"]
    head["spec"]["volumes"].append({"name": beside["mount"]["name"], "configMap": {"name": f"{name}-config"}})
    # the operator gives the autoscaler an account of its own
    head["spec"]["automountServiceAccountToken"] = autoscales
    spec["headGroupSpec"] |= {"rayStartParams": _start_parameters(pods.head), "template": head}
    spec["workerGroupSpecs"] = [
        _worker_group(pool, image, least=pool.least_pods if least is None else least, autoscales=autoscales)
        for pool in pods.pools
    ]
    return spec


def _worker_group(pods: PoolPods, image: str, *, least: int, autoscales: bool) -> dict[str, Any]:
    pod = _pod("ray-worker", pods.pod, image)
    if pods.pool == "generation":
        pod["spec"]["containers"][0]["lifecycle"] = template("generation")
    group: dict[str, Any] = {
        "groupName": pods.pool,
        "replicas": least,
        "minReplicas": least,
        "maxReplicas": pods.num_pods,
        "labels": {POOL_LABEL: pods.pool},
        "rayStartParams": _start_parameters(pods.pod),
        "template": pod,
    }
    if autoscales:
        group["idleTimeoutSeconds"] = IDLE_TIMEOUT_S[pods.pool]
    return group


def _start_parameters(pod: PodSize) -> dict[str, str]:
    gpus = {"num-gpus": str(pod.gpus)} if pod.gpus else {}
    return {"num-cpus": str(pod.ray_cpus), **gpus, "object-store-memory": str(pod.store_bytes)}


def _pod(container: str, size: PodSize, image: str) -> dict[str, Any]:
    pod = template("pod")
    amounts = {"cpu": str(size.cores), "memory": f"{size.memory_bytes // MIB}Mi"}
    if size.gpus:
        amounts["nvidia.com/gpu"] = str(size.gpus)
        pod["spec"]["tolerations"] = template("gpus")
    # asked for and at most: memory that was not asked for is what pods are ended for
    resources = {"requests": amounts, "limits": amounts}
    pod["spec"]["containers"][0] |= {"name": container, "image": image, "resources": resources}
    # a little more than the object store: Ray wants it free
    pod["spec"]["volumes"][1]["emptyDir"]["sizeLimit"] = f"{math.ceil(size.store_bytes / MIB) + 64}Mi"
    return pod


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as they are, no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        """Every value in full."""
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
