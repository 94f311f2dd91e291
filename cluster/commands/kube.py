"""`rlhfspec kube render`: Kubernetes manifests of a run, as large as its plan."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from cluster.commands.arguments import add_config_arguments, add_like_argument, path_argument
from core.errors import ConfigError

if TYPE_CHECKING:
    from cluster.kuberay.pool_pods import RunPods
    from core.config import Config

_ABOUT = """\
Run on Kubernetes by KubeRay.

  rlhfspec kube render --config FILE --out run.yaml
"""

_TEXT = """\
Write the manifest of a run for KubeRay 1.7: its config, and one worker group a pool, as large as its actors by the
placement and memory plan of `rlhfspec check`. Of models only config.json is read, of data nothing.

  rlhfspec kube render --config configs/gsm8k_ppo.yaml --image REGISTRY/rlhfspec:0.1.0 --out run.yaml \\
      --set models.target=/runs/models/target --like target=Qwen/Qwen3-0.6B ...
  rlhfspec check --config configs/gsm8k_ppo.yaml --manifest run.yaml       after changes by hand
  kubectl apply -f run.yaml

Paths in the config are those of the pods; /runs is the volume that they share. A Secret rlhfspec-ray-token and the
volume must be there before: docs/kubernetes.md.
"""


def add_parser(commands: Any) -> None:
    """Describe the command and its one action."""
    from cluster.placement.origin import NAME, version

    parser = commands.add_parser(
        "kube",
        help="write the Kubernetes manifests of a run (kube render)",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    render = actions.add_parser(
        "render",
        help="a RayJob or RayCluster from a config",
        description=_TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_config_arguments(render)
    add_like_argument(render)
    render.add_argument(
        "--kind",
        choices=("rayjob", "raycluster"),
        default="rayjob",
        help="rayjob trains once; raycluster stays, and grows by its autoscaler (%(default)s)",
    )
    render.add_argument("--name", help="of the job or cluster (run.name)")
    render.add_argument("--image", default=f"{NAME}:{version()}", help="(%(default)s)")
    render.add_argument("--queue", help="of Kueue: made suspended, and started when the queue admits it")
    render.add_argument("--out", type=path_argument, metavar="FILE", help="(the terminal)")
    render.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the manifest. Raises InputError for a config that cannot run there."""
    from cluster.kuberay import ray_manifests as manifests
    from core.config_io import config_from_dict, read_tree

    tree = manifests.cluster_config(read_tree(args.config), args.set)
    config = config_from_dict(tree)
    name = manifests.kubernetes_name(args.name or config.run.name)
    if args.name is not None and name != args.name:
        raise ConfigError(f"--name {args.name} is no name for Kubernetes; expected one such as {name}")
    pods = pods_of(config, like=args.like)
    make = manifests.ray_job if args.kind == "rayjob" else manifests.ray_cluster
    documents = [
        manifests.config_map(name, tree),
        make(name, pods, image=args.image, queue=args.queue),
    ]
    text = manifests.to_yaml(documents, heading=_heading(args))
    if args.out is None:
        print(text, end="")
    else:
        from core.files import write_whole

        write_whole(args.out, text)
        print(f"{args.out}: {_describe(pods)}")
    return 0


def pods_of(config: Config, *, like: list[str]) -> RunPods:
    """The pods that a config needs. Raises ConfigError, ModelError."""
    # torch and transformers
    from cluster.kuberay.planned_memory import ROLES, plan_remote_memory
    from cluster.kuberay.pool_pods import plan_pods

    found = {}
    for text in like:
        role, _, place = text.partition("=")
        if role not in ROLES or not place:
            raise ConfigError(f"--like expects ROLE=DIR with a role of {', '.join(ROLES)}, got '{text}'")
        found[role] = place
    return plan_pods(config, plan_remote_memory(config, found))


def _heading(args: argparse.Namespace) -> str:
    overrides = "".join(f" --set {each}" for each in args.set)
    kind = "" if args.kind == "rayjob" else f" --kind {args.kind}"
    name = "" if args.name is None else f" --name {args.name}"
    return f"Written by: rlhfspec kube render --config {args.config}{overrides}{kind}{name}"


def _describe(pods: RunPods) -> str:
    groups = [
        f"{each.num_pods} x {each.pool}"
        if each.least_pods == each.num_pods
        else f"{each.least_pods} to {each.num_pods} x {each.pool}"
        for each in pods.pools
    ]
    return f"a head and {', '.join(groups)}"
