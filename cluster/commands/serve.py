"""`rlhfspec serve reward`: a reward model or function as a server that many runs ask."""

from __future__ import annotations

from typing import Annotated, Any

from rlhfspec.cluster.commands.arguments import set_flag
from rlhfspec.cluster.commands.declare import Arg
from rlhfspec.core.errors import ConfigError

ABOUT = """Serve a reward to many runs (serve reward).

Serve what several runs share.

  rlhfspec serve reward --model DIR
"""


def serve(
    *,
    model: Annotated[
        str, Arg("DIR", "folder or hub name of a sequence classifier with one output", group="what")
    ]
    | None,
    kind: Annotated[str, Arg(help="any other reward.kind, such as file.py:function", group="what")] | None,
    overrides: Annotated[
        list[str], set_flag("another key of the section reward, such as batch_size=64 or dtype=bfloat16")
    ],
    replicas: Annotated[str, Arg("N or MIN:MAX", "how many; MIN:MAX follows the load (1)")] = "1",
    num_cpus: Annotated[float, Arg(help="of each replica (1)")] = 1.0,
    num_gpus: Annotated[float, Arg(help="of each replica (0)")] = 0.0,
    host: Annotated[str, Arg(help="0.0.0.0 listens to other machines (127.0.0.1)")] = "127.0.0.1",
    port: Annotated[int, Arg(help="(8000)")] = 8000,
    name: Annotated[str, Arg(help="of the Serve application (reward)")] = "reward",
    address: Annotated[str, Arg(help="a running Ray cluster, such as auto (a Ray of its own)")] | None = None,
) -> int:
    """Serve a reward model, or any other reward.

    Serve a reward by Ray Serve: POST /score, requests batched together, replicas by load. Ctrl-C ends it.

      rlhfspec serve reward --model DIR --replicas 1:2
      rlhfspec train --config FILE --set reward.kind=serve --set reward.url=http://127.0.0.1:8000/score

    In a running Ray cluster (--address auto) the route is /NAME/score, and runs of the same cluster may use
    reward.app=NAME instead of an address.
    """
    from rlhfspec.cluster.jobs.reward_server import ServerAddress, caller_dir, serve_reward
    from rlhfspec.cluster.observe.console import Reporter

    low, high = _replicas(replicas)
    arguments: dict[str, Any] = {
        "reward": _settings(overrides),
        "min_replicas": low,
        "max_replicas": high,
        "num_cpus": num_cpus,
        "num_gpus": num_gpus,
        "import_dir": caller_dir(),
    }
    if model is not None:
        arguments["model"] = model
    else:
        arguments["reward"]["kind"] = kind
    place = ServerAddress(name=name, host=host, port=port, address=address)
    with Reporter() as report:
        serve_reward(arguments, place, note=report.note)
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
    from rlhfspec.core.yaml_text import YamlFault, parse_yaml

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
