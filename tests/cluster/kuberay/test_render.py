"""What `kube render` writes holds every actor of the config's plan, and `check --manifest` names what would not."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifests import ROOT, cluster_spec, of_kind, rendered, smollm2_config

from rlhfspec.cluster.cli import build_parser, main
from rlhfspec.cluster.kuberay.manifest_check import quantity
from rlhfspec.cluster.plan.memory_plan import RAY_PROCESSES_BYTES
from rlhfspec.cluster.plan.remote_plan import plan_remote
from rlhfspec.cluster.plan.topology import plan_topology
from rlhfspec.core.config_io import config_from_dict
from rlhfspec.core.errors import ConfigError

CONFIGS = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("configs/*.yaml", "configs/algorithms/*.yaml")
    for path in ROOT.glob(pattern)
)
GPUS = ("--set", "cluster.generation.num_gpus=0.5", "--set", "cluster.trainer.num_gpus=1")
MANY = ("--set", "cluster.generation.num_actors=5", "--set", "cluster.trainer.num_actors=3")


@pytest.fixture(scope="module")
def sizes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return smollm2_config(tmp_path_factory.mktemp("sizes"))


def like(config: str, sizes: Path) -> list[str]:
    """The demo's sizes are known; other models are not on this machine."""
    own = "models/" in (ROOT / config).read_text()
    roles = ("target", "draft") if own else ("target",) if "smollm2" in config else ()
    return [part for role in roles for part in ("--like", f"{role}={sizes}")]


def test_ten_configs_are_tried() -> None:
    assert len(CONFIGS) >= 10


@pytest.mark.parametrize("options", [(), (*GPUS, *MANY)], ids=["as it is", "GPUs and more actors"])
@pytest.mark.parametrize("config", CONFIGS)
def test_the_pods_of_each_pool_hold_its_actors(
    config: str, options: tuple[str, ...], sizes: Path, tmp_path: Path
) -> None:
    if "policy: goodput" in (ROOT / config).read_text() and options:
        options = (
            *options,
            "--set",
            "speculation.policy=fixed",
        )  # on GPUs goodput needs a profile made there
    out = tmp_path / "run.yaml"
    documents = rendered(out, config, *options, *like(config, sizes))
    settings = config_from_dict(yaml.safe_load(of_kind(documents, "ConfigMap")["data"]["config.yaml"]))
    memory = plan_remote(settings, like(config, sizes)[1::2]).memory
    actor_bytes = {
        "gen": memory.generation_bytes,
        "reward": memory.reward_bytes,
        "trainer": memory.trainer_bytes,
        "environment": memory.environment_bytes // max(1, settings.cluster.environment.num_actors),
    }
    by_pool = {
        group["labels"]["rlhfspec-pool"]: group
        for group in cluster_spec(of_kind(documents, "RayJob"))["workerGroupSpecs"]
    }
    topology = plan_topology(settings)
    assert set(by_pool) == set(topology.pools)
    for pool, places in topology.pools.items():
        group = by_pool[pool]
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        have = {
            "CPU": float(group["rayStartParams"]["num-cpus"]),
            "GPU": float(limits.get("nvidia.com/gpu", 0)),
        }
        nodes = [dict(have) for _ in range(group["replicas"])]
        held = [memory.object_store_bytes + RAY_PROCESSES_BYTES // 3 for _ in nodes]
        # first fit, as dense as Ray's PACK can get: memory is no resource that it looks at
        for place in sorted(places, key=lambda place: -place.num_cpus):
            wanted = place.resources()
            fits = [i for i, node in enumerate(nodes) if all(node[k] + 1e-6 >= v for k, v in wanted.items())]
            assert fits, f"{place.name} finds no room in {pool}"
            for key, amount in wanted.items():
                nodes[fits[0]][key] -= amount
            held[fits[0]] += actor_bytes.get(place.name.split("-")[0], 0)
        assert max(held) < 0.95 * quantity(limits["memory"])
    assert (
        main(
            ["check", "--config", str(ROOT / config), *options, *like(config, sizes), "--manifest", str(out)]
        )
        == 0
    )


def spoil(document: dict[str, Any], group: int, path: str, value: Any) -> None:
    """Set a value below the head (-1) or a worker group; None takes it out."""
    spec = cluster_spec(document)
    tree = spec["headGroupSpec"] if group < 0 else spec["workerGroupSpecs"][group]
    *way, last = path.split("/")
    for part in way:
        tree = tree[int(part) if isinstance(tree, list) else part]
    if value is None:
        del tree[last]
    else:
        tree[last] = value


CONTAINER = "template/spec/containers/0/resources"


@pytest.mark.parametrize(
    ("group", "path", "value", "said"),
    [
        (0, "maxReplicas", 1, "group generation: at most 1 pods of 2 actors, the plan has 4 actors"),
        (0, "labels", {}, "no worker group has the label rlhfspec-pool: generation"),
        (0, "rayStartParams/num-gpus", "0", "group generation: 0 GPU a pod, an actor wants 0.5"),
        (1, "rayStartParams/num-cpus", "0", "group reward: Ray sees 0 CPUs a pod, an actor wants 0.2"),
        (
            2,
            CONTAINER,
            {"limits": {"cpu": "1"}},
            "group trainer: its container has no limits of cpu and memory",
        ),
        (2, CONTAINER + "/requests/memory", "64Mi", "group trainer: requests"),
        (0, "template/spec/volumes/1/emptyDir/sizeLimit", "64Mi", "0.06 GiB of shared memory for objects"),
        (1, "rayStartParams/num-cpus", "a few", "group reward: 'a few' is no quantity"),
        (-1, "rayStartParams/num-cpus", "4", "head: num-cpus is 4; expected '0'"),
    ],
)
def test_what_does_not_fit_is_named(
    group: int, path: str, value: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, options = tmp_path / "run.yaml", (*GPUS, "--set", "cluster.generation.num_actors=4")
    documents = rendered(out, "configs/algorithms/grpo.yaml", *options)
    spoil(of_kind(documents, "RayJob"), group, path, value)
    out.write_text(yaml.safe_dump_all(documents))
    config = str(ROOT / "configs/algorithms/grpo.yaml")
    assert main(["check", "--config", config, *options, "--manifest", str(out)]) == 2
    assert said in capsys.readouterr().err


def test_all_that_does_not_fit_is_named_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = "configs/algorithms/grpo.yaml"
    out = tmp_path / "run.yaml"
    documents = rendered(out, config)
    of_kind(documents, "RayJob")["spec"]["rayClusterSpec"].pop("authOptions")
    out.write_text(yaml.safe_dump_all(documents))
    more = ("--set", "sampling.max_new_tokens=8000", "--set", "engine.num_threads=6")
    assert main(["check", "--config", str(ROOT / config), *more, "--manifest", str(out)]) == 2
    said = capsys.readouterr().err
    for part in (
        "authOptions.mode is not token",
        "of memory, the plan has",
        "2 cores, its actors use 12 threads",
    ):
        assert part in said


@pytest.mark.parametrize("kind", ["rayjob", "raycluster"])
def test_the_config_travels_with_the_manifest(kind: str, tmp_path: Path) -> None:
    documents = rendered(
        tmp_path / "run.yaml", "configs/demo.yaml", "--kind", kind, "--set", "run.name=My Run 7"
    )
    config_map = of_kind(documents, "ConfigMap")
    settings = config_from_dict(yaml.safe_load(config_map["data"]["config.yaml"]))
    assert (settings.run.output_dir, settings.run.cache_dir) == ("/runs", "/runs/cache")
    assert settings.cluster.address == "auto" and settings.cluster.pin_pools
    document = of_kind(documents, {"rayjob": "RayJob", "raycluster": "RayCluster"}[kind])
    assert document["metadata"]["name"] == "my-run-7"
    spec = cluster_spec(document)["headGroupSpec"]["template"]["spec"]
    (volume,) = [each for each in spec["volumes"] if each["name"] == "config"]
    (mount,) = [each for each in spec["containers"][0]["volumeMounts"] if each["name"] == "config"]
    assert volume["configMap"]["name"] == config_map["metadata"]["name"]
    if kind == "rayjob":
        program, *words = shlex.split(document["spec"]["entrypoint"])
        args = build_parser().parse_args(words)
        assert program == "rlhfspec" and args.config == Path(mount["mountPath"]) / "config.yaml"
        assert args.resume == "auto", "a job that is tried again goes on with its run"
    else:
        workers = document["spec"]["workerGroupSpecs"]
        assert document["spec"]["autoscalerOptions"]["version"] == "v2"
        assert all(
            each["minReplicas"] == 0 < each["maxReplicas"] and each["idleTimeoutSeconds"] for each in workers
        )


def test_a_queue_of_kueue_starts_the_job(tmp_path: Path) -> None:
    job = of_kind(rendered(tmp_path / "run.yaml", "configs/demo.yaml", "--queue", "team-a"), "RayJob")
    assert job["spec"]["suspend"] is True and job["spec"]["shutdownAfterJobFinishes"] is True
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    # Kueue admits a fixed number of pods
    assert job["spec"]["rayClusterSpec"]["enableInTreeAutoscaling"] is False


ELASTIC = ("--set", "cluster.generation.min_actors=2", "--set", "cluster.generation.max_actors=7")


def test_an_elastic_pool_has_the_pods_of_its_least_and_of_its_most_actors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (*ELASTIC, "--set", "cluster.generation.num_cpus=1", "--set", "cluster.generation.num_actors=3")
    out = tmp_path / "run.yaml"
    documents = rendered(out, "configs/demo.yaml", *options)
    spec = cluster_spec(of_kind(documents, "RayJob"))
    sizes = {
        each["groupName"]: (each["minReplicas"], each["maxReplicas"]) for each in spec["workerGroupSpecs"]
    }
    assert sizes == {"generation": (2, 7), "reward": (1, 1), "trainer": (1, 1)}
    assert spec["enableInTreeAutoscaling"] and spec["autoscalerOptions"]["version"] == "v2"
    check = ["check", "--config", str(ROOT / "configs/demo.yaml"), *options, "--manifest", str(out)]
    assert main(check) == 0
    spec["enableInTreeAutoscaling"] = False
    spec["workerGroupSpecs"][0]["maxReplicas"] = 6
    out.write_text(yaml.safe_dump_all(documents))
    assert main(check) == 2
    said = capsys.readouterr().err
    assert (
        "enableInTreeAutoscaling is off" in said
        and "at most 6 pods of 1 actors, the plan has 7 actors" in said
    )


def test_actors_that_want_nodes_of_their_own_get_a_pod_each(tmp_path: Path) -> None:
    spread = ("--set", "cluster.placement=STRICT_SPREAD")
    job = of_kind(rendered(tmp_path / "run.yaml", "configs/demo.yaml", *spread), "RayJob")
    replicas = {each["groupName"]: each["replicas"] for each in cluster_spec(job)["workerGroupSpecs"]}
    assert replicas == {"generation": 2, "reward": 1, "trainer": 2}  # the scheduler is the second


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--set", "cluster.placement=STRICT_PACK"], "each pool has nodes of its own; take PACK"),
        (["--set", "run.output_dir=/data"], "run.output_dir is /data, which no pod shares"),
        (["--set", "models.target=/runs/none", "--set", "models.draft=/runs/none"], "give --like target=DIR"),
        (["--like", "critic=/x"], "--like expects ROLE=DIR with a role of target, draft, reward"),
        ([*ELASTIC, "--queue", "team-a"], "Kueue admits as many pods as a job always has"),
        (["--name", "My_Run"], "expected one such as my-run"),
    ],
)
def test_what_cannot_be_rendered_says_what_to_do(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kube", "render", "--config", str(ROOT / "configs/demo.yaml"), *options]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and not captured.out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kind: Pod", "expected one RayJob or RayCluster, got neither"),
        ("kind: RayService\nspec: {}", "got RayService"),
        ("kind: RayJob\nspec: 3", "says nothing of its cluster"),
        ("a: [", "is no valid YAML"),
        ("\x00", "is no valid YAML"),
        ("kind: RayCluster\nspec: {headGroupSpec: [], workerGroupSpecs: {}}", "it has no container"),
        ("kind: RayCluster\nspec: {workerGroupSpecs: [7]}", "no worker group has the label"),
        ("kind: RayCluster\nspec: {headGroupSpec: {rayStartParams: [], template: 7}}", "it has no container"),
    ],
)
def test_a_file_that_is_no_manifest_is_one_line(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text(text)
    assert main(["check", "--config", str(ROOT / "configs/demo.yaml"), "--manifest", str(path)]) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error


def test_quantities_are_read_as_kubernetes_does() -> None:
    assert [quantity(text) for text in ("500m", "8Gi", 2, "1.5G")] == [0.5, 8 * 2**30, 2.0, 1.5e9]
    with pytest.raises(ConfigError, match="no quantity"):
        quantity("8 GB")
