"""`ray_cluster.yaml` is what `ray up` expects, by Ray's own validation, without a network."""

from __future__ import annotations

import copy
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from rlhfspec.cluster.plan.topology import plan_topology
from rlhfspec.core.config_io import config_from_dict

ROOT = Path(__file__).resolve().parents[2]


def manifest() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "ray_cluster.yaml").read_text())


def validated(tree: dict[str, Any]) -> dict[str, Any]:
    prepared = prepare_config(copy.deepcopy(tree))
    validate_config(prepared)
    return prepared


def test_ray_accepts_the_manifest() -> None:
    prepared = validated(manifest())
    assert set(prepared["available_node_types"]) == {"head", "generation", "ranks", "trainer"}


def test_an_instance_of_two_ranks_fits_a_node_that_comes_for_it() -> None:
    generation = {"tensor_parallel": 2, "num_cpus": 2}
    models = {"target": "demo", "draft": "demo"}
    tree = {"models": models, "data": {"task": "chain"}, "cluster": {"generation": generation}}
    (place, *_) = plan_topology(config_from_dict(tree)).generation
    have = manifest()["available_node_types"]["ranks"]["resources"]
    assert place.num_ranks == 2 and place.resources() == {"CPU": have["CPU"]}


@pytest.mark.parametrize(
    "fault",
    [
        {"max_workerz": 3},
        {"head_node_type": "nobody"},
        {"max_workers": "many"},
    ],
)
def test_the_validation_would_notice_a_fault(fault: dict[str, Any]) -> None:
    with pytest.raises(Exception, match=r"\S"):
        validated(manifest() | fault)


def test_the_nodes_install_the_pinned_versions() -> None:
    tree = manifest()
    mounted = {Path(local).name for local in tree["file_mounts"].values()}
    assert {"constraints.txt", "pyproject.toml"} <= mounted
    assert any("-c ~/rlhfspec-setup/constraints.txt" in command for command in tree["setup_commands"])


def test_every_node_asks_for_the_token_of_whoever_started_the_cluster() -> None:
    tree = manifest()
    assert tree["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    for kind in ("head", "worker"):
        (start,) = [each for each in tree[f"{kind}_start_ray_commands"] if "ray start" in each]
        assert start.index("export RAY_AUTH_MODE=token &&") < start.index("ray start")
    head = next(each for each in tree["head_start_ray_commands"] if "ray start" in each)
    assert "--dashboard-host=127.0.0.1" in head


def test_constraints_pin_every_direct_dependency_exactly() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = project["dependencies"] + [each for name in extras if name != "cuda" for each in extras[name]]
    wanted.remove("rlhfspec[cpu,gguf,lora]")
    # a CUDA build of torch names the one version that it goes with
    wanted = [each for each in wanted if not each.startswith("triton")]
    pinned = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, sign, version = line.partition("==")
            assert sign and "+" not in version and "@" not in line and "/" not in line, line
            pinned[name.lower().replace("_", "-")] = version
    for requirement in wanted:
        name = requirement.split(">=")[0].split("[")[0].lower()
        assert name in pinned, f"{name} is not pinned"
    assert (pinned["torch"], pinned["ray"], pinned["transformers"]) == ("2.13.0", "2.60.0", "5.23.0")
