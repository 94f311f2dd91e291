"""`rlhfspec serve reward`: a reward model or function as a server that many runs ask."""

from __future__ import annotations

import argparse
from typing import Any

from core.errors import ConfigError

_ABOUT = """\
Serve what several runs share.

  rlhfspec serve reward --model DIR
"""

_TEXT = """\
Serve a reward by Ray Serve: POST /score, requests batched together, replicas by load. Ctrl-C ends it.

  rlhfspec serve reward --model DIR --replicas 1:2
  rlhfspec train --config FILE --set reward.kind=serve --set reward.url=http://127.0.0.1:8000/score

In a running Ray cluster (--address auto) the route is /NAME/score, and runs of the same cluster may use
reward.app=NAME instead of an address.
"""


def add_parser(commands: Any) -> None:
    """Describe the command and its one action."""
    parser = commands.add_parser(
        "serve",
        help="serve a reward to many runs (serve reward)",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    reward = actions.add_parser(
        "reward",
        help="serve a reward model, or any other reward",
        description=_TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = reward.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--model", metavar="DIR", help="folder or hub name of a sequence classifier with one output"
    )
    what.add_argument("--kind", help="any other reward.kind, such as package.module:function")
    reward.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="another key of the section reward, such as batch_size=64 or dtype=bfloat16; may be repeated",
    )
    reward.add_argument(
        "--replicas", default="1", metavar="N or MIN:MAX", help="how many; MIN:MAX follows the load (1)"
    )
    reward.add_argument("--num-cpus", type=float, default=1.0, help="of each replica (1)")
    reward.add_argument("--num-gpus", type=float, default=0.0, help="of each replica (0)")
    reward.add_argument("--host", default="127.0.0.1", help="0.0.0.0 listens to other machines (127.0.0.1)")
    reward.add_argument("--port", type=int, default=8000, help="(8000)")
    reward.add_argument("--name", default="reward", help="of the Serve application (reward)")
    reward.add_argument("--address", help="a running Ray cluster, such as auto (a Ray of its own)")
    reward.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C. Raises InputError for what cannot be served."""
    from cluster.reporting.console import Reporter
    from cluster.reward_server import ServerPlace, caller_dir, serve_reward

    low, high = _replicas(args.replicas)
    arguments: dict[str, Any] = {
        "reward": _settings(args.set),
        "min_replicas": low,
        "max_replicas": high,
        "num_cpus": args.num_cpus,
        "num_gpus": args.num_gpus,
        "import_dir": caller_dir(),
    }
    if args.model is not None:
        arguments["model"] = args.model
    else:
        arguments["reward"]["kind"] = args.kind
    place = ServerPlace(name=args.name, host=args.host, port=args.port, address=args.address)
    report = Reporter()
    try:
        serve_reward(arguments, place, note=report.note)
    finally:
        report.stop()
    return 0


def _replicas(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    try:
        found = int(low), int(high or low)
    except ValueError:
        found = (0, 0)
    if not 0 <= found[0] <= found[1] or found[1] < 1:
        raise ConfigError(f"--replicas expects a number or MIN:MAX with MAX at least 1, got '{text}'")
    return found


def _settings(overrides: list[str]) -> dict[str, Any]:
    from core.yaml_text import YamlFault, parse_yaml

    found: dict[str, Any] = {}
    for override in overrides:
        key, sign, text = override.removeprefix("reward.").partition("=")
        try:
            value = parse_yaml(text)
        except YamlFault as error:
            raise ConfigError(f"--set {override}: the value is not valid YAML: {error}") from None
        if not sign or not key:
            raise ConfigError(f"--set expects KEY=VALUE, got '{override}'")
        found[key] = value
    return found
