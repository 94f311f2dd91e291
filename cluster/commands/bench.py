"""`rlhfspec bench` and `rlhfspec gpu-selftest`: figures of this machine, kept as files.

A benchmark is a module `benchmarks/NAME.py`, or `NAME/bench.py` beside what only it needs, with `run(bench) -> int`; a
`benchmarks/support/harness.py:Bench` writes its `OUT/NAME.json`.
"""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Annotated, Any

from ...core.errors import ConfigError, DataError
from ..ray_start.origin import ROOT
from .arguments import folder, number
from .declare import Arg

WITH_REAL = ("engine", "drafting", "rollout", "exactness", "groups", "update", "chain", "rlhf", "served")
THAT_WATCH = ("served", "soak")
_MINUTES = number("minutes above 0", float, lambda value: 0 < value < math.inf)


def benchmark_names(folder: Path = ROOT / "benchmarks") -> list[str]:
    """Names of the benchmarks; packages without a module `bench` are what they share."""
    found = (*folder.glob("[!_]*.py"), *folder.glob("*/bench.py"))
    return sorted(path.parent.name if path.stem == "bench" else path.stem for path in found)


def bench(
    name: Annotated[str, Arg("NAME", f"one of: {', '.join(benchmark_names()) or 'none yet'}")],
    *,
    out: Annotated[Path, Arg("DIR", "where the results go", parse=folder)],
    quick: Annotated[bool, Arg(help="a few minutes, wide intervals", group="size")] = False,
    full: Annotated[bool, Arg(help="longer than the default ten minutes", group="size")] = False,
    data: Annotated[Path, Arg("PATH", "real prompts (GSM8K JSONL) where it uses any")] | None = None,
    profile: Annotated[bool, Arg(help="engine: only the phases of a decode step")] = False,
    minutes: Annotated[float, Arg("N", f"{', '.join(THAT_WATCH)}: how long to watch", parse=_MINUTES)]
    | None = None,
    real: Annotated[
        bool,
        Arg(help=f"{', '.join(WITH_REAL)}: SmolLM2-135M-Instruct instead; writes NAME_real.json"),
    ] = False,
) -> int:
    """Run one benchmark and keep its figures.

    Run one benchmark and write DIR/NAME.json: figures, intervals, provenance.

      rlhfspec bench exactness --out bench           the same tokens whatever was drafted
      rlhfspec bench engine --out bench --quick      speed of plain decoding and what invariance costs
      rlhfspec bench engine --out bench --profile    the phases of a decode step
      rlhfspec bench drafting --out bench            the adaptive policy beside every other choice
      rlhfspec bench exactness --out bench --real    the same on SmolLM2-135M-Instruct, instances, moves
      rlhfspec bench publication --out bench         weights of a real size to two instances; a second start
      rlhfspec bench update --out bench              the learner beside a bare loop over the same tokens
      rlhfspec bench rlhf --out bench                a whole step beside a plain and static one
      rlhfspec bench trl --out bench                 a GRPO step beside TRL's, and TRL's with our rollouts
      rlhfspec bench memory --out bench              what each process of such a run holds, beside TRL's one
      rlhfspec bench episodes --out bench            several turns with a calculator, moved: the same bits as unmoved
      rlhfspec bench models --out bench              which model families run: the page docs/reference/models.md
      rlhfspec bench pipeline --out bench            generation ahead of learning: step time, reward, equal bits
      rlhfspec bench faults --out bench              killed, frozen and cut off actors, a full store; killed drivers
      rlhfspec bench soak --out bench --full         an hour of training: memory, processes, files
      rlhfspec bench served --out bench              the engine server beside the engine; 200 clients, a kill meanwhile
      rlhfspec bench groups --out bench              instances of two ranks beside single ones, and the simulator
      rlhfspec bench cluster_simulation --out bench  the cluster simulator beside published figures and own runs
      rlhfspec bench device-ops --out bench          launches and copies of a decode step on a GPU, counted without one
      rlhfspec bench chain --out bench               SFT, reward model and PPO from files, by a gold rule
      rlhfspec bench learns --out bench --data GSM8K distillation, DPO, rewards of groups, judges: does each learn
    """
    name = name.replace("-", "_")  # a module has no hyphens
    if name not in benchmark_names():
        raise ConfigError(f"no benchmark '{name}'; expected one of: {', '.join(benchmark_names())}")
    if data is not None and not data.is_file():
        got = "is a folder" if data.is_dir() else "does not exist"
        raise DataError(f"--data expects a JSONL file, {data} {got}")
    if profile and name != "engine":
        raise ConfigError(f"--profile shows the phases of a decode step: bench engine does, not {name}")
    if minutes is not None and name not in THAT_WATCH:
        raise ConfigError(f"--minutes says how long to watch: {', '.join(THAT_WATCH)} do, not {name}")
    if real and name not in WITH_REAL:
        raise ConfigError(f"--real takes a real model: {', '.join(WITH_REAL)} can; bench {name} has none")
    if real and profile:
        raise ConfigError("--profile shows the decode step of a made model; leave out --real or --profile")
    mode = "quick" if quick else "full" if full else "default"
    made = _of_the_checkout("support.harness").Bench(
        name, out=out, mode=mode, data=data, is_real=real, minutes=minutes
    )
    module = f"{name}.bench" if (ROOT / "benchmarks" / name).is_dir() else name
    return _of_the_checkout(module).run(made, **({"profile": True} if profile else {}))


def gpu_selftest(
    *,
    out: Annotated[Path, Arg("DIR", "where the report goes", parse=folder)],
    quick: Annotated[bool, Arg(help="fewer samples and rounds")] = False,
    real: Annotated[bool, Arg(help="SmolLM2-135M-Instruct instead of the demo pair")] = False,
) -> int:
    """Try the engine on this machine's GPU and write a report.

    Try the engine on this machine's first GPU and write DIR/report.md and DIR/gpu_selftest.json.

    Parts: log-probabilities and the distribution of sampled tokens beside Hugging Face's forward, speed beside its
    `generate`, the share of the memory bandwidth's bound, the tests marked gpu. Minutes. A part that fails is
    reported and the others go on; exit code 1 then, 2 where there is no CUDA device.
    """
    if not (ROOT / "benchmarks").is_dir():
        raise ConfigError(
            "gpu-selftest needs the folder benchmarks/ of a checkout; run it there, after pip install -e ."
        )
    return _of_the_checkout("selftest.command").selftest(out=out, quick=quick, real=real)


def _of_the_checkout(name: str) -> Any:
    """A module of `benchmarks`, which no wheel holds."""
    return importlib.import_module(f"rlhfspec.benchmarks.{name}")
