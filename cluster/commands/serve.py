"""`rlhfspec serve`: a reward as a server that many runs ask, a model behind OpenAI's API."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from ...core.errors import ConfigError
from .arguments import COUNT, SECONDS, set_flag
from .declare import Arg

ABOUT = """Serve a reward to many runs (serve reward), or a model by OpenAI's API (serve engine).

Serve what several runs or programs share.

  rlhfspec serve reward --model DIR
  rlhfspec serve engine --model DIR
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
    from ..jobs.ray_serve import ServerAddress
    from ..jobs.reward_server import serve_reward
    from ..observe.console import Reporter

    low, high = _replicas(replicas)
    arguments: dict[str, Any] = {
        "reward": _settings(overrides),
        "min_replicas": low,
        "max_replicas": high,
        "num_cpus": num_cpus,
        "num_gpus": num_gpus,
        "import_dir": os.getcwd(),
    }
    if model is not None:
        arguments["model"] = model
    else:
        arguments["reward"]["kind"] = kind
    place = ServerAddress(name=name, host=host, port=port, address=address)
    with Reporter() as report:
        serve_reward(arguments, place, note=report.note)
    return 0


def serve_engine(
    *,
    model: Annotated[str, Arg("DIR", "folder or hub name of the model")],
    config: Annotated[Path, Arg("FILE", "a run's config: its draft model, engine, cluster")] | None = None,
    overrides: Annotated[list[str], set_flag("override one key, such as cluster.generation.num_actors=4")],
    served_name: Annotated[str, Arg("NAME", "what clients call the model (as --model)")] | None = None,
    context: Annotated[
        int, Arg("N", "tokens of prompt and response together (2048, or the model's)", parse=COUNT)
    ]
    | None = None,
    max_open: Annotated[
        int,
        Arg("N", "responses at once, beyond which a request is answered with 429 (%(default)s)", parse=COUNT),
    ] = 256,
    max_body_mb: Annotated[int, Arg("N", "of a request (%(default)s)", parse=COUNT)] = 8,
    generation_config: Annotated[
        Literal["auto", "vllm"],
        Arg(
            help="where sampling that a body leaves out comes from: auto, the model's generation_config.json; vllm, "
            "neutral values, as vLLM's flag (%(default)s)"
        ),
    ] = "auto",
    token_file: Annotated[Path, Arg("FILE", "holds the token that clients must send (none: anybody)")]
    | None = None,
    drain: Annotated[
        float, Arg("SECONDS", "for open requests to end, once it is to stop (%(default)g)", parse=SECONDS)
    ] = 30.0,
    host: Annotated[str, Arg(help="0.0.0.0 listens to other machines (127.0.0.1)")] = "127.0.0.1",
    port: Annotated[int, Arg(help="(8000)")] = 8000,
    name: Annotated[str, Arg(help="of the Serve application (engine)")] = "engine",
    address: Annotated[str, Arg(help="a running Ray cluster, such as auto (a Ray of its own)")] | None = None,
) -> int:
    """Serve a model by OpenAI's API.

    Serve a model by a pool of instances that draft, behind Ray Serve: /v1/completions, /v1/chat/completions with token
    ids, log-probabilities and streams, /v1/models, /health, /metrics, and what vLLM has for trainers (/pause, /resume,
    /update_weights by a path). A response is a function of weights, prompt and seed alone. Ctrl-C or SIGTERM ends it.

      rlhfspec serve engine --model DIR
      rlhfspec serve engine --model runs/a/checkpoints/target --config configs/gsm8k_ppo.yaml --port 8001
    """
    from ...core.config_io import apply_overrides, read_sections
    from ..observe.console import START_UP_STAGES, Reporter
    from ..ray_start.forked_workers import begin_workers

    with Reporter() as report:
        report.stage(START_UP_STAGES["imports"])
        tree = read_sections(config)
        said = apply_overrides(dict(tree), overrides).get("cluster")
        begin_workers(address or (said.get("address") if isinstance(said, dict) else None))
        from ..jobs.engine_server import plan_server, serve_engine
        from ..jobs.ray_serve import ServerAddress
        from ..serving.engine_deployment import ServerLimits
        from ..serving.engine_requests import usual_sampling

        plan = plan_server(tree, report, model=model, context_tokens=context, overrides=overrides)
        limits = ServerLimits(
            max_open=max_open,
            max_body_bytes=max_body_mb << 20,
            token=_token(token_file),
            usual=usual_sampling(plan.config.models.target, generation_config),
        )
        report.stop()
        serve_engine(
            plan,
            ServerAddress(name=name, host=host, port=port, address=address),
            limits,
            served_name=served_name or model,
            drain_s=drain,
            note=report.note,
        )
    return 0


def _token(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        token = file.read_text().strip()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--token-file {file} cannot be read: {error}; name a text file") from None
    if not token or not token.isascii() or not token.isprintable():
        raise ConfigError(f"--token-file {file} must hold one line of printable ASCII characters, the token")
    return token


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
    from ...core.config_io import apply_overrides

    return apply_overrides({}, [f"reward.{one.removeprefix('reward.')}" for one in overrides]).get(
        "reward", {}
    )
