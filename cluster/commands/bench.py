"""`rlhfspec bench`: run one benchmark of `benchmarks/` and keep its figures.

A benchmark is a module `benchmarks.NAME` with `run(*, out, mode, data) -> int`; it writes
`OUT/NAME.json` through `benchmarks.support.result.write_result`.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
from pathlib import Path
from typing import Any

from cluster.commands.arguments import out_folder, path_argument
from cluster.placement.origin import ROOT

_TEXT = """\
Run one benchmark and write DIR/NAME.json: figures, intervals, provenance.

  rlhfspec bench exactness --out bench           the same tokens whatever was drafted
  rlhfspec bench engine --out bench --quick      speed of plain decoding and what invariance costs
  rlhfspec bench engine --out bench --profile    the phases of a decode step
  rlhfspec bench drafting --out bench            the adaptive policy beside every other choice
  rlhfspec bench exactness --out bench --real    the same on SmolLM2-135M-Instruct, instances, moves
  rlhfspec bench publication --out bench         weights of a real size to two instances; a second start
  rlhfspec bench update --out bench              the learner beside a bare loop over the same tokens
  rlhfspec bench onpolicy --out bench            the trainer's log-probabilities beside the sampler's, bit by bit
  rlhfspec bench training --out bench            memory of LoRA, planned and measured; bfloat16 beside float32
  rlhfspec bench rlhf --out bench                one short run an algorithm; where a step spends its time
  rlhfspec bench episodes --out bench            several turns with a calculator, moved: the same bits as unmoved
  rlhfspec bench models --out bench              which model families run: the page docs/models.md
  rlhfspec bench drafters --out bench            look-up drafters on a real model: where text repeats, and where not
  rlhfspec bench learning_curve --out bench      a draft head over the tokens that it was made from
  rlhfspec bench pipeline --out bench            generation ahead of learning: step time, reward, equal bits
  rlhfspec bench faults --out bench              killed, frozen and cut off actors, a full store; killed drivers
  rlhfspec bench soak --out bench --full         an hour of training: memory, processes, files
  rlhfspec bench cluster_simulation --out bench  the cluster simulator beside published figures and own runs
  rlhfspec bench device-ops --out bench          launches and copies of a decode step on a GPU, counted without one
  rlhfspec bench chain --out bench               SFT, reward model and PPO from files, by a gold rule
"""

WITH_REAL_MODEL = ("engine", "drafting", "rollout", "exactness", "update", "onpolicy", "training", "chain")


def add_parser(commands: Any) -> None:
    """Describe the command."""
    parser = commands.add_parser(
        "bench",
        help="run one benchmark and keep its figures",
        description=_TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help=f"one of: {', '.join(benchmark_names()) or 'none yet'}")
    parser.add_argument(
        "--out", type=path_argument, required=True, metavar="DIR", help="where the results go"
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="under a minute, wide intervals")
    size.add_argument("--full", action="store_true", help="longer than the default ten minutes")
    parser.add_argument(
        "--data", type=path_argument, metavar="PATH", help="real prompts (GSM8K JSONL) where it uses any"
    )
    parser.add_argument(
        "--profile", action="store_true", help="engine: only where a decode step's time goes, phase by phase"
    )
    parser.add_argument(
        "--real",
        action="store_true",
        help=f"{', '.join(WITH_REAL_MODEL)}: SmolLM2-135M-Instruct instead; writes NAME_real.json",
    )
    parser.set_defaults(run=run)


def benchmark_names(folder: Path = ROOT / "benchmarks") -> list[str]:
    """Names of the benchmarks: the folder's modules; its packages are what they share."""
    return sorted(module.name for module in pkgutil.iter_modules([str(folder)]) if not module.ispkg)


def run(args: argparse.Namespace) -> int:
    """Run it. Raises ConfigError for an unknown name."""
    from core.errors import ConfigError, DataError

    # a module has no hyphens
    args.name = args.name.replace("-", "_")
    if args.name not in benchmark_names():
        raise ConfigError(f"no benchmark '{args.name}'; expected one of: {', '.join(benchmark_names())}")
    if args.data is not None and not args.data.is_file():
        got = "is a folder" if args.data.is_dir() else "does not exist"
        raise DataError(f"--data expects a JSONL file, {args.data} {got}")
    if args.profile and args.name != "engine":
        raise ConfigError(f"--profile shows the phases of a decode step: bench engine does, not {args.name}")
    if args.real and args.name not in WITH_REAL_MODEL:
        raise ConfigError(
            f"--real takes a real model: {', '.join(WITH_REAL_MODEL)} can; bench {args.name} has none"
        )
    if args.real and args.profile:
        raise ConfigError("--profile shows the decode step of a made model; leave out --real or --profile")
    out = out_folder(args.out)
    out.mkdir(parents=True, exist_ok=True)
    mode = "quick" if args.quick else "full" if args.full else "default"
    more = {name: True for name in ("profile", "real") if getattr(args, name)}
    return importlib.import_module(f"benchmarks.{args.name}").run(out=out, mode=mode, data=args.data, **more)
