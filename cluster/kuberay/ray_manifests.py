"""Kubernetes manifests of a run for KubeRay 1.7: plain data, written as YAML.

What every pod has: a token of Ray from a Secret that the user makes, no right that it does not need, as much asked for
as it may take, an object store in shared memory, the run folders on a shared volume. Nothing listens outside the
Kubernetes cluster.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

import yaml

from rlhfspec.cluster.kuberay.pool_pods import IDLE_TIMEOUT_S, PodSize, PoolPods, RunPods
from rlhfspec.cluster.plan.memory_plan import MIB
from rlhfspec.cluster.plan.topology import POOL_LABEL
from rlhfspec.core.config_io import apply_overrides, config_from_dict
from rlhfspec.core.errors import ConfigError

RAY_VERSION = "2.60.0"
"That of constraints.txt."
TOKEN_SECRET = "rlhfspec-ray-token"
TOKEN_KEY = "auth_token"
"As KubeRay calls it."
RUNS_CLAIM, RUNS_FOLDER = "rlhfspec-runs", "/runs"
CONFIG_FOLDER = "/etc/rlhfspec"
ENTRYPOINT = f"rlhfspec train --config {CONFIG_FOLDER}/config.yaml --resume auto"
"A job that is tried again goes on with its run."
RETRIES = 3
"Of a job that fails, or whose pods are lost."
POD_LABELS = {"app.kubernetes.io/part-of": "rlhfspec"}
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
KINDS = ("rayjob", "raycluster")
_USER = 1000
"Of the image (cluster/kuberay/Dockerfile)."
_PLACEMENT_TIMEOUT_S = 600.0
"Nodes and images take minutes to come; the default is for clusters that stand."
_LONGEST_NAME = 47
"Of a RayJob, in KubeRay."
_GRACE_S = 120
"From the notice of a pod's end to its kill, what it does before SIGTERM included."
_EMPTYING_S = 90
"Of that, for the samples of a generation pod to move away; with what follows it is below the grace."
_NOTICE_S = 20
"For Ray to take the notice: nobody answers where the whole cluster is deleted."


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
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{name}-config", "labels": dict(POD_LABELS)},
        "data": {"config.yaml": yaml.safe_dump(tree, sort_keys=False)},
    }


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
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name, "labels": POD_LABELS | ({QUEUE_LABEL: queue} if queue else {})},
        "spec": {
            "entrypoint": ENTRYPOINT,
            # each on a new cluster
            "backoffLimit": RETRIES,
            "suspend": queue is not None,
            "submissionMode": "K8sJobMode",
            # a suspended job must end its cluster, and so must one that is over
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": 600,
            "rayClusterSpec": _cluster_spec(name, pods, image=image, least=None, autoscales=elastic),
        },
    }


def ray_cluster(name: str, pods: RunPods, *, image: str, queue: str | None = None) -> dict[str, Any]:
    """A RayCluster to submit runs to; its worker groups come with a run and go when they idle."""
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": name, "labels": POD_LABELS | ({QUEUE_LABEL: queue} if queue else {})},
        "spec": {
            "suspend": queue is not None,
            **_cluster_spec(name, pods, image=image, least=0, autoscales=True),
        },
    }


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


def _cluster_spec(
    name: str, pods: RunPods, *, image: str, least: int | None, autoscales: bool
) -> dict[str, Any]:
    """`least`: pods of every group at least; None: what the run always has."""
    spec: dict[str, Any] = {
        "rayVersion": RAY_VERSION,
        "authOptions": {"mode": "token", "secretName": TOKEN_SECRET},
        "enableInTreeAutoscaling": autoscales,
    }
    if autoscales:
        spec["autoscalerOptions"] = {
            "version": "v2",
            "upscalingMode": "Default",
            "idleTimeoutSeconds": 600,
            "resources": _same({"cpu": "500m", "memory": "512Mi"}),
            "securityContext": _container_rights(),
        }
    head = _template("ray-head", pods.head, image, config_name=f"{name}-config")
    head["spec"]["containers"][0]["ports"] = [
        {"name": port, "containerPort": number}
        for port, number in (("gcs", 6379), ("dashboard", 8265), ("client", 10001))
    ]
    # the operator gives the autoscaler an account of its own
    head["spec"]["automountServiceAccountToken"] = autoscales
    spec["headGroupSpec"] = {
        "serviceType": "ClusterIP",
        "rayStartParams": _start_parameters(pods.head),
        "template": head,
    }
    spec["workerGroupSpecs"] = [
        _worker_group(pool, image, least=pool.least_pods if least is None else least, autoscales=autoscales)
        for pool in pods.pools
    ]
    return spec


def _worker_group(pods: PoolPods, image: str, *, least: int, autoscales: bool) -> dict[str, Any]:
    template = _template("ray-worker", pods.pod, image)
    if pods.pool == "generation":
        template["spec"]["containers"][0]["lifecycle"] = {"preStop": {"exec": {"command": _announce_end()}}}
    group: dict[str, Any] = {
        "groupName": pods.pool,
        "replicas": least,
        "minReplicas": least,
        "maxReplicas": pods.num_pods,
        "labels": {POOL_LABEL: pods.pool},
        "rayStartParams": _start_parameters(pods.pod),
        "template": template,
    }
    if autoscales:
        group["idleTimeoutSeconds"] = IDLE_TIMEOUT_S[pods.pool]
    return group


def end_notice() -> str:
    """The command by which a pod tells Ray that it ends.

    Ray finds the cluster by RAY_ADDRESS, which KubeRay sets, and the node as that of the pod.
    """
    return (
        "ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION --reason-message 'the pod ends' "
        f"--deadline-remaining-seconds {_EMPTYING_S}"
    )


def _announce_end() -> list[str]:
    """What a pod does before SIGTERM, at which Ray ends: tell Ray, and wait for its instances to be emptied.

    A node that is idle ends by itself once Ray knows, and the pod with it.
    """
    return ["/bin/sh", "-c", f"timeout {_NOTICE_S} {end_notice()} && sleep {_EMPTYING_S}"]


def _start_parameters(pod: PodSize) -> dict[str, str]:
    gpus = {"num-gpus": str(pod.gpus)} if pod.gpus else {}
    return {"num-cpus": str(pod.ray_cpus), **gpus, "object-store-memory": str(pod.store_bytes)}


def _template(container: str, pod: PodSize, image: str, config_name: str | None = None) -> dict[str, Any]:
    amounts = {"cpu": str(pod.cores), "memory": f"{pod.memory_bytes // MIB}Mi"}
    if pod.gpus:
        amounts["nvidia.com/gpu"] = str(pod.gpus)
    mounts: list[dict[str, Any]] = [
        {"name": "runs", "mountPath": RUNS_FOLDER},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]
    volumes: list[dict[str, Any]] = [
        {"name": "runs", "persistentVolumeClaim": {"claimName": RUNS_CLAIM}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": f"{_shared_mib(pod)}Mi"}},
    ]
    if config_name is not None:
        mounts.append({"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True})
        volumes.append({"name": "config", "configMap": {"name": config_name}})
    spec: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": _GRACE_S,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": container,
                "image": image,
                "imagePullPolicy": "IfNotPresent",
                "env": _environment(),
                "resources": _same(amounts),
                "securityContext": _container_rights(),
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }
    if pod.gpus:
        spec["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    return {"metadata": {"labels": dict(POD_LABELS)}, "spec": spec}


def _shared_mib(pod: PodSize) -> int:
    """A little more than the object store: Ray wants it free."""
    return math.ceil(pod.store_bytes / MIB) + 64


def _environment() -> list[dict[str, Any]]:
    """Said here too, so that an operator too old for `authOptions` starts no open cluster."""
    token = {"secretKeyRef": {"name": TOKEN_SECRET, "key": TOKEN_KEY}}
    return [
        {"name": "RAY_AUTH_MODE", "value": "token"},
        {"name": "RAY_AUTH_TOKEN", "valueFrom": token},
        {"name": "RAY_USAGE_STATS_ENABLED", "value": "0"},
        # the closing table and the last files take longer than Ray's three seconds
        {"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": "60"},
    ]


def _container_rights() -> dict[str, Any]:
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def _same(amounts: dict[str, str]) -> dict[str, dict[str, str]]:
    """Asked for and at most: memory that was not asked for is what pods are ended for."""
    return {"requests": dict(amounts), "limits": dict(amounts)}


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as they are, no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        """Every value in full."""
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
