"""The manifests of the repository: they hold what their config places, and every pod of them keeps the same rules."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kustomized import kustomized
from ray.scripts.scripts import drain_node

from rlhfspec.actors.reward_server.reward_deployment import ServerArguments
from rlhfspec.cluster.cli import build_parser
from rlhfspec.cluster.plan.topology import POOL_LABEL, plan_topology
from rlhfspec.cluster.ray_start.origin import version
from rlhfspec.core.config_io import config_from_dict, load_config

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
CLUSTER_SPEC = {"RayJob": "rayClusterSpec", "RayService": "rayClusterConfig"}
TOKEN_SECRET = "rlhfspec-ray-token"
"As docs/how-to/kubernetes.md makes it."
KUSTOMIZATIONS = sorted(str(path.parent.relative_to(FOLDER)) for path in FOLDER.rglob("kustomization.yaml"))
RAY_KUSTOMIZATIONS = [name for name in KUSTOMIZATIONS if name != "base/shared"]
RUNS = [name for name in RAY_KUSTOMIZATIONS if "service" not in name]
VALIDATOR = "RLHFSPEC_KUBERAY_VALIDATOR"
"A program that takes manifests and fails where one does not match the CRDs of KubeRay."


def of_kind(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = [each for each in documents if each["kind"] == kind]
    return found


def ray_document(name: str) -> dict[str, Any]:
    (found,) = [each for each in kustomized(FOLDER / name) if each["apiVersion"] == "ray.io/v1"]
    return found


def cluster_spec(document: dict[str, Any]) -> dict[str, Any]:
    """The cluster of a RayJob, RayCluster or RayService."""
    key = CLUSTER_SPEC.get(document["kind"])
    return document["spec"][key] if key else document["spec"]


def groups(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The head group, then each worker group."""
    spec = cluster_spec(document)
    yield spec["headGroupSpec"]
    yield from spec["workerGroupSpecs"]


@pytest.mark.parametrize("name", RUNS)
def test_the_pods_of_each_pool_hold_what_the_config_places_there(name: str) -> None:
    tree = yaml.safe_load(of_kind(kustomized(FOLDER / name), "ConfigMap")["data"]["config.yaml"])
    config = config_from_dict(tree)
    assert (config.run.output_dir, config.run.cache_dir) == ("/runs", "/runs/cache")
    assert config.cluster.address == "auto" and config.cluster.pin_pools
    # a profile is of one kind of machine, and the pods of a cluster may be on several
    assert config.speculation.policy != "goodput"
    assert config.algorithm == load_config(ROOT / "configs" / "smollm2_grpo.yaml").algorithm
    pools = plan_topology(config).pools
    workers = {
        group["labels"][POOL_LABEL]: group for group in cluster_spec(ray_document(name))["workerGroupSpecs"]
    }
    assert workers.keys() == pools.keys()
    for pool, group in workers.items():
        cpus, gpus = (float(group["rayStartParams"].get(key, 0)) for key in ("num-cpus", "num-gpus"))
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert float(limits.get("nvidia.com/gpu", 0)) == gpus and float(limits["cpu"]) >= cpus
        pods, wanted = group["maxReplicas"], [place.resources() for place in pools[pool]]
        assert pods * cpus >= sum(each["CPU"] for each in wanted)
        assert pods * gpus >= sum(each.get("GPU", 0) for each in wanted)
        threads = sum(
            place.num_threads * place.num_ranks for place in pools[pool] if place.name != "scheduler"
        )
        assert pods * float(limits["cpu"]) >= threads


def test_a_job_runs_the_config_that_it_brings() -> None:
    documents = kustomized(FOLDER / "base" / "job")
    job = of_kind(documents, "RayJob")
    pod = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    (volume,) = [each for each in pod["volumes"] if each["name"] == "config"]
    (mount,) = [each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "config"]
    assert volume["configMap"]["name"] == of_kind(documents, "ConfigMap")["metadata"]["name"]
    program, *words = shlex.split(job["spec"]["entrypoint"])
    args = build_parser().parse_args(words)
    assert program == "rlhfspec" and args.config == Path(mount["mountPath"]) / "config.yaml"
    assert args.resume == "auto", "a job that is tried again goes on with its run"


@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_kustomize_makes_the_same_of_them(name: str) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl here, whose kustomize would build the overlays")
    made = subprocess.run([kubectl, "kustomize", FOLDER / name], capture_output=True, text=True, timeout=60)
    if "unknown command" in made.stderr:
        pytest.skip("this kubectl has no kustomize")
    assert made.returncode == 0, made.stderr

    def ordered(documents: Any) -> list[Any]:
        return sorted(documents, key=lambda each: each["kind"])

    assert ordered(yaml.safe_load_all(made.stdout)) == ordered(kustomized(FOLDER / name))


@pytest.mark.parametrize("name", RAY_KUSTOMIZATIONS)
def test_every_pod_asks_for_a_token_and_takes_no_more_than_it_says(name: str) -> None:
    document = ray_document(name)
    spec = cluster_spec(document)
    assert spec["authOptions"] == {"mode": "token", "secretName": TOKEN_SECRET}
    assert f"ray=={spec['rayVersion']}\n" in (ROOT / "constraints.txt").read_text()
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert spec["headGroupSpec"]["serviceType"] == "ClusterIP"
    for group in groups(document):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["image"] == f"rlhfspec:{version()}"
        environment = {each["name"]: each for each in container["env"]}
        assert environment["RAY_AUTH_MODE"]["value"] == "token"
        token = environment["RAY_AUTH_TOKEN"]
        assert "value" not in token and token["valueFrom"]["secretKeyRef"]["name"] == TOKEN_SECRET
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
        volumes = {each["name"]: each for each in pod["volumes"]}
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        assert "persistentVolumeClaim" in volumes[mounts["/runs"]]
        assert group is spec["headGroupSpec"] or pod["automountServiceAccountToken"] is False


@pytest.mark.parametrize("name", ["base/job", "overlays/gpu-cluster"])
def test_generation_pods_tell_ray_of_their_end_in_words_that_it_knows(name: str) -> None:
    hooks = {
        group["groupName"]: group["template"]["spec"]["containers"][0].get("lifecycle")
        for group in cluster_spec(ray_document(name))["workerGroupSpecs"]
    }
    assert [pool for pool, hook in hooks.items() if hook] == ["generation"]
    shell, flag, line = hooks["generation"]["preStop"]["exec"]["command"]
    assert (shell, flag) == ("/bin/sh", "-c")
    notice, wait = line.split(" && ")
    timeout, limit_s, ray, order, *words = shlex.split(notice)
    assert (timeout, ray, order) == ("timeout", "ray", "drain-node")
    # Ray promises nothing of this command: its parser refuses what it does not know
    told = drain_node.make_context(order, words).params
    group = next(g for g in groups(ray_document(name)) if g.get("groupName") == "generation")
    grace_s = group["template"]["spec"]["terminationGracePeriodSeconds"]
    waits_s = int(wait.removeprefix("sleep "))
    assert told["deadline_remaining_seconds"] == waits_s and int(limit_s) + waits_s < grace_s


@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_no_secret_stands_in_a_file(name: str) -> None:
    assert all(each["kind"] != "Secret" for each in kustomized(FOLDER / name))


def test_a_job_that_waits_for_kueue_is_suspended_and_else_the_same() -> None:
    waiting, plain = ray_document("overlays/queued-job"), ray_document("base/job")
    assert waiting["spec"].pop("suspend") is True and plain["spec"].pop("suspend") is False
    assert waiting["metadata"]["labels"].pop("kueue.x-k8s.io/queue-name")
    assert waiting == plain


@pytest.mark.parametrize("name", ["base/service", "overlays/gpu-service"])
def test_the_served_reward_is_one_that_serve_takes_and_its_replicas_fit_their_pods(name: str) -> None:
    document = ray_document(name)
    served = yaml.safe_load(document["spec"]["serveConfigV2"])
    example = yaml.safe_load((ROOT / "configs" / "serve" / "reward_server.yaml").read_text())
    (application,), (shown,) = served["applications"], example["applications"]
    assert application["import_path"] == shown["import_path"]
    assert set(application["args"]) == set(shown["args"])
    arguments = ServerArguments.model_validate(application["args"])
    arguments.reward_config()
    (workers,) = cluster_spec(document)["workerGroupSpecs"]
    assert int(workers["rayStartParams"]["num-cpus"]) >= arguments.num_cpus
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert float(limits.get("nvidia.com/gpu", 0)) == arguments.num_gpus
    assert (workers["minReplicas"], workers["maxReplicas"]) == (
        arguments.min_replicas,
        arguments.max_replicas,
    )


def test_the_network_policy_and_the_claim_are_those_of_the_pods() -> None:
    shared = kustomized(FOLDER / "base" / "shared")
    selected = of_kind(shared, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"]
    claim = of_kind(shared, "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for name in RAY_KUSTOMIZATIONS:
        for group in groups(ray_document(name)):
            assert selected.items() <= group["template"]["metadata"]["labels"].items()
            volumes = {each["name"]: each for each in group["template"]["spec"]["volumes"]}
            assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


def test_manifests_match_the_schemas_of_kuberay(tmp_path: Path) -> None:
    validator = os.environ.get(VALIDATOR)
    if not validator:
        pytest.skip(
            f"{VALIDATOR} names no validator: the manifests are not compared with KubeRay's CRDs here"
        )
    files = []
    for name in KUSTOMIZATIONS:
        files.append(tmp_path / f"{name.replace('/', '-')}.yaml")
        files[-1].write_text(yaml.safe_dump_all(kustomized(FOLDER / name)))
    command = [sys.executable, validator, *map(str, files)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
