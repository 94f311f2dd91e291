"""`rlhfspec kube render`: Kubernetes manifests of a run, as large as its plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from ...core.errors import ConfigError
from ..placement.origin import NAME, version
from .arguments import ConfigFile, Like, Overrides
from .declare import Arg

if TYPE_CHECKING:
    from ..kuberay.pool_pods import RunPods

ABOUT = """Write the Kubernetes manifests of a run (kube render).

Run on Kubernetes by KubeRay.

  rlhfspec kube render --config FILE --out run.yaml
"""


def render(
    *,
    config: ConfigFile,
    overrides: Overrides,
    like: Like,
    kind: Annotated[
        Literal["rayjob", "raycluster"],
        Arg(help="rayjob trains once; raycluster stays, and grows by its autoscaler (%(default)s)"),
    ] = "rayjob",
    name: Annotated[str, Arg(help="of the job or cluster (run.name)")] | None = None,
    image: Annotated[str, Arg(help="(%(default)s)")] = f"{NAME}:{version()}",
    queue: Annotated[str, Arg(help="of Kueue: made suspended, and started when the queue admits it")]
    | None = None,
    out: Annotated[Path, Arg("FILE", "(the terminal)")] | None = None,
) -> int:
    r"""A RayJob or RayCluster from a config.

    Write the manifest of a run for KubeRay 1.7: its config, and one worker group a pool, as large as its actors by the
    placement and memory plan of `rlhfspec check`. Of models only config.json is read, of data nothing.

      rlhfspec kube render --config configs/gsm8k_ppo.yaml --image REGISTRY/rlhfspec:0.1.0 --out run.yaml \
          --set models.target=/runs/models/target --like target=Qwen/Qwen3-0.6B ...
      rlhfspec check --config configs/gsm8k_ppo.yaml --manifest run.yaml       after changes by hand
      kubectl apply -f run.yaml

    Paths in the config are those of the pods; /runs is the volume that they share. A Secret rlhfspec-ray-token and the
    volume must be there before: docs/how-to/kubernetes.md.
    """
    from ...core.config_io import config_from_dict, read_tree
    from ..kuberay import ray_manifests as manifests

    tree = manifests.cluster_config(read_tree(config), overrides)
    loaded = config_from_dict(tree)
    named = manifests.kubernetes_name(name or loaded.run.name)
    if name is not None and name != named:
        raise ConfigError(f"--name {name} is no name for Kubernetes; expected one such as {named}")
    from ..kuberay.pool_pods import plan_pods
    from ..plan.remote_plan import plan_remote

    pods = plan_pods(plan_remote(loaded, like))
    make = manifests.ray_job if kind == "rayjob" else manifests.ray_cluster
    documents = [manifests.config_map(named, tree), make(named, pods, image=image, queue=queue)]
    flags = [f"--config {config}", *(f"--set {each}" for each in overrides)]
    flags += ([] if kind == "rayjob" else [f"--kind {kind}"]) + ([] if name is None else [f"--name {name}"])
    text = manifests.to_yaml(documents, heading=f"Written by: rlhfspec kube render {' '.join(flags)}")
    if out is None:
        print(text, end="")
    else:
        from ...core.files import write_whole

        write_whole(out, text)
        print(f"{out}: {_describe(pods)}")
    return 0


def _describe(pods: RunPods) -> str:
    groups = [
        f"{each.num_pods} x {each.pool}"
        if each.least_pods == each.num_pods
        else f"{each.least_pods} to {each.num_pods} x {each.pool}"
        for each in pods.pools
    ]
    return f"a head and {', '.join(groups)}"
