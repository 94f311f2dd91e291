"""How long a start takes: `python -m rlhfspec.benchmarks.support.starting bare|run FOLDER` as a process of its own.

`bare` imports torch and transformers and starts Ray; `run` does what `rlhfspec train` does until the first token of
the first response has been decoded.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from ...core.errors import RlhfSpecError
from ...core.records import SampleRequest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 400.0


def seconds(mode: str, target: Path, cache: Path) -> float:
    """From the command until the process says that it is there."""
    began_s = time.time()
    child = subprocess.run(
        [sys.executable, "-m", "rlhfspec.benchmarks.support.starting", mode, str(target), str(cache)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    lines = [line for line in child.stdout.splitlines() if line.startswith("there at ")]
    if child.returncode or not lines:
        raise RlhfSpecError(f"the start '{mode}' failed: {child.stderr.strip()[-400:]}")
    return float(lines[-1].removeprefix("there at ")) - began_s


def _say_there() -> None:
    print(f"there at {time.time()}", flush=True)


def _bare() -> None:
    import torch  # noqa: F401
    import transformers  # noqa: F401

    from .actor_pool import bench_ray

    with bench_ray("bench-bare"):
        _say_there()


def _run(target: str, cache: str) -> None:
    from ...cluster.plan.run_check import check_run
    from ...cluster.ray_start.ray_session import ray_session
    from ...cluster.system.system import running_system
    from ...core.config_io import load_config

    overrides = [f"models.target={target}", f"run.cache_dir={cache}", "cluster.dashboard=false"]
    config = load_config(ROOT / "configs" / "smollm2_grpo.yaml", overrides)
    plan = check_run(config, output_dir=Path(cache) / "runs")
    assert plan.memory is not None
    with (
        ray_session(config.cluster, "bench-start", store_bytes=plan.memory.object_store_bytes) as session,
        running_system(plan, session) as system,
    ):
        requests: list[SampleRequest] = system.cursor.next_requests(1, 1, system.sampling)
        system.scheduler.enqueue(tuple(requests))
        while not system.scheduler.stats.num_emitted_tokens:
            system.scheduler.take(0.1)
        _say_there()


if __name__ == "__main__":
    if sys.argv[1] == "bare":
        _bare()
    else:
        _run(*sys.argv[2:4])
