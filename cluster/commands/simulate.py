"""`rlhfspec simulate`: reallocation policies on simulated instances."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rlhfspec.cluster.commands.arguments import SEED
from rlhfspec.cluster.commands.declare import Arg
from rlhfspec.core.outside import user_path

if TYPE_CHECKING:
    from rlhfspec.policies.simulate.compare import Comparison
    from rlhfspec.policies.simulate.simulation_records import PoolSetup, Samples

PRESETS = ("skewed", "long_tail", "balanced")
POLLS = 500
"The pool is looked at about so often in a rollout where no interval is given, at most every tenth of a second."
PROFILE_KV_BYTES = 16384.0

RANGES = {
    "instances": (1, 10**4),
    "slots": (1, 10**5),
    "samples": (1, 10**7),
    "max_new_tokens": (1, 10**7),
    "prompt_tokens": (0, 10**7),
    "max_instances": (1, 10**4),
    "start_up": (0.0, 1e6),
    "idle_timeout": (1e-3, 1e6),
    "rollouts_ahead": (0, 10**6),
    "poll": (1e-3, 1e6),
    "kv_bytes_per_token": (1.0, 1e9),
    "speed_sigma": (0.0, 3.0),
}
"Least and largest value of each number: what can be simulated in a time that somebody waits."


def simulate(
    *,
    instances: Annotated[int, Arg("K", "instances (%(default)s)")] = 8,
    slots: Annotated[int, Arg("N", "samples that run at once on each (%(default)s)")] = 64,
    samples: Annotated[int, Arg("N", "samples of the rollout (as many as there are slots)")] | None = None,
    lengths: Annotated[str, Arg("WHAT", f"{', '.join(PRESETS)} or a file (%(default)s)")] = "skewed",
    max_new_tokens: Annotated[int, Arg("N", "limit of a response (4096; of a file: its longest)")]
    | None = None,
    prompt_tokens: Annotated[int, Arg("N", "of each prompt (%(default)s)")] = 128,
    profile: Annotated[Path, Arg("DIR", "a folder made by `rlhfspec profile`", group="rates")] | None = None,
    device: Annotated[
        Literal["h100-class", "h100-class-plain"], Arg(help="analytic (%(default)s)", group="rates")
    ] = "h100-class",
    kv_bytes_per_token: Annotated[float, Arg("N", "size of both caches (of the device; 16384)")]
    | None = None,
    policy: Annotated[
        Literal["all", "static", "pull", "recompute_only", "paper_rule", "finish_time"],
        Arg(help="beside static and pull (%(default)s)"),
    ] = "all",
    poll: Annotated[float, Arg("SECONDS", f"between two looks at the pool (a {POLLS}th of the rollout)")]
    | None = None,
    speed_sigma: Annotated[float, Arg("S", "log-normal spread of speeds (%(default)s)")] = 0.1,
    max_instances: Annotated[int, Arg("K", "let the pool grow from --instances to so many, and shrink")]
    | None = None,
    start_up: Annotated[float, Arg("SECONDS", "of an added instance (%(default)s)")] = 30.0,
    idle_timeout: Annotated[float, Arg("SECONDS", "until one leaves (%(default)s)")] = 120.0,
    rollouts_ahead: Annotated[int, Arg("N", "rollouts still to come (%(default)s)")] = 0,
    seed: Annotated[int, Arg(help="of drawn lengths and speeds (%(default)s)", parse=SEED)] = 0,
    out: Annotated[Path, Arg("FILE", "gets the figures as JSON")] | None = None,
) -> int:
    """Try reallocation policies on simulated instances.

    Simulate one rollout on many instances under every reallocation policy: how long it takes, how many samples move.
    Instances are rate curves: of a profile of this machine, or of a device that is not here (from its data sheet).

      rlhfspec simulate                                               8 instances of an H100-class device
      rlhfspec simulate --instances 2 --slots 16 --profile profile    as measured by `rlhfspec profile`
      rlhfspec simulate --lengths runs/RUN/rollouts/000005.parquet    lengths of a real iteration
      rlhfspec simulate --instances 1024 --slots 32 --lengths long_tail --out simulated.json
      rlhfspec simulate --instances 2 --max-instances 8 --start-up 60   a pool that grows and shrinks: every decision
      rlhfspec simulate cluster --help                                a whole training run on a cluster that is not here

    static binds sample i to instance i mod K; pull binds when a slot frees; the other policies pull, then move.
    perfect spreads all samples evenly at every moment, at no cost; no schedule whatever is faster than the bound.
    """
    return run(argparse.Namespace(**locals()))


def run(args: argparse.Namespace) -> int:
    """Simulate, print a table, write JSON. Raises InputError for bad input."""
    from rlhfspec.cluster.commands.simulating.simulation_bar import simulation_bar
    from rlhfspec.cluster.observe.console import PipeConsole
    from rlhfspec.policies.simulate.compare import COMPARED, compare

    _check(args)
    console = PipeConsole(highlight=False)
    samples, max_new_tokens = _samples(args)
    setup, label = _setup(args, samples, max_new_tokens)
    wanted = COMPARED if args.policy == "all" else tuple(dict.fromkeys(("static", "pull", args.policy)))
    with simulation_bar(len(samples) * len(wanted), console) as tick:
        made = compare(samples, setup, wanted, progress=tick)
    console.print(
        f"{args.instances} instances of {args.slots} slots, {len(samples)} samples "
        f"({int(samples.response_tokens.sum())} tokens, the longest {int(samples.response_tokens.max())}), {label}",
        soft_wrap=True,
    )
    console.print(_table(made))
    for name, result in made.results.items():
        for at_s, change in result.resizes:
            console.print(
                f"{name}: {at_s:.1f} s: to {change.target} instances: {change.reason}", soft_wrap=True
            )
    if args.out is not None:
        args.out.write_text(json.dumps(_tree(args, samples, setup, label, made), indent=2) + "\n")
        console.print(f"written {args.out}", soft_wrap=True)
    return 0


def _check(args: argparse.Namespace) -> None:
    from rlhfspec.core.errors import ConfigError

    for name, (lowest, highest) in RANGES.items():
        value = getattr(args, name)
        # a NaN is in no range
        if value is not None and not lowest <= value <= highest:
            raise ConfigError(
                f"--{name.replace('_', '-')} expects a number from {lowest:g} to {highest:g}, got {value}"
            )
    if args.max_instances is not None and args.max_instances < args.instances:
        raise ConfigError(
            f"--max-instances {args.max_instances} is below --instances {args.instances}, which the pool begins with"
        )
    if args.out is not None and args.out.is_dir():
        raise ConfigError(f"--out {args.out} is a folder; name a file in it")
    if args.out is not None and not args.out.resolve().parent.is_dir():
        raise ConfigError(f"--out {args.out}: the folder does not exist; make it first")


def _samples(args: argparse.Namespace) -> tuple[Samples, int]:
    """The rollout's samples and the limit of a response."""
    from rlhfspec.cluster.folder.rollouts import read_lengths
    from rlhfspec.core.errors import DataError
    from rlhfspec.policies.simulate.workloads import drawn_lengths, samples_of

    if args.lengths in PRESETS:
        limit = args.max_new_tokens or 4096
        count = args.samples or args.instances * args.slots
        lengths = drawn_lengths(args.lengths, count, args.instances, max_new_tokens=limit, seed=args.seed)
    else:
        lengths = read_lengths(user_path(args.lengths))
        if args.samples is not None and args.samples > len(lengths):
            raise DataError(f"--samples {args.samples}: {args.lengths} holds {len(lengths)} lengths only")
        lengths = lengths[: args.samples]
        limit = args.max_new_tokens or int(lengths.max())
        lengths = lengths.clip(max=limit)
    samples = samples_of(
        lengths, prompt_tokens=args.prompt_tokens, speed_sigma=args.speed_sigma, seed=args.seed
    )
    return samples, limit


def _setup(args: argparse.Namespace, samples: Samples, max_new_tokens: int) -> tuple[PoolSetup, str]:
    """The pool, and what its rates come from."""
    from dataclasses import replace

    from rlhfspec.policies.reallocation.rate_curve import rate_curve_from_profile
    from rlhfspec.policies.simulate.compare import least_finish_s
    from rlhfspec.policies.simulate.described_cluster import H100_CLASS, H100_LABEL, describe
    from rlhfspec.policies.simulate.simulation_records import Elastic, MoveTruth, PoolSetup
    from rlhfspec.profiles.profile import load_profile

    context = args.prompt_tokens + int(samples.response_tokens.mean())
    if args.profile is not None:
        profile = load_profile(args.profile)
        curve = rate_curve_from_profile(profile, context_tokens=context)
        moves = MoveTruth(kv_bytes_per_token=args.kv_bytes_per_token or PROFILE_KV_BYTES)
        label = f"profile of {profile.provenance.target_model} on {profile.provenance.device}"
    else:
        speculation = args.device == "h100-class"
        cluster = describe(H100_CLASS)
        curve = cluster.instance.rate_curve(
            context_tokens=context,
            max_samples=args.slots,
            speculation="adaptive" if speculation else "off",
        )
        moves = cluster.moves()
        if args.kv_bytes_per_token is not None:
            moves = replace(moves, kv_bytes_per_token=args.kv_bytes_per_token)
        label = H100_LABEL + (", speculation" if speculation else ", plain decoding")
    setup = PoolSetup(
        num_instances=args.instances,
        num_slots=args.slots,
        curve=curve,
        max_new_tokens=max_new_tokens,
        moves=moves,
        elastic=None
        if args.max_instances is None
        else Elastic(
            least=args.instances,
            most=args.max_instances,
            start_up_s=args.start_up,
            idle_timeout_s=args.idle_timeout,
            rollouts_ahead=args.rollouts_ahead,
        ),
    )
    poll_s = args.poll or max(least_finish_s(samples, setup) / POLLS, 0.1)
    return replace(setup, poll_interval_s=poll_s), label


def _table(made: Comparison) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in (
        "policy",
        "seconds",
        "over static",
        "over pull",
        "gap closed",
        "moves",
        "recomputed",
        "busy",
    ):
        table.add_column(title, justify="left" if title == "policy" else "right", no_wrap=title == "policy")
    for name, result in made.results.items():
        closed = made.gap_closed(name)
        table.add_row(
            name,
            f"{result.finish_s:.2f}",
            f"{made.over(name, 'static'):.3f}",
            f"{made.over(name, 'pull'):.3f}",
            "-" if closed is None else f"{closed:.0%}",
            str(result.num_moves),
            str(result.num_recomputed),
            f"{result.busy_share:.0%}",
        )
    static_s, pull_s = (made.results[name].finish_s for name in ("static", "pull"))
    for name, seconds in (("perfect", made.perfect_s), ("bound", made.least_s)):
        table.add_row(name, f"{seconds:.2f}", f"{static_s / seconds:.3f}", f"{pull_s / seconds:.3f}")
    return table


def _tree(
    args: argparse.Namespace, samples: Samples, setup: PoolSetup, label: str, made: Comparison
) -> dict[str, Any]:
    results = {
        name: {
            "finish_s": result.finish_s,
            "over_static": made.over(name, "static"),
            "over_pull": made.over(name, "pull"),
            "gap_closed": made.gap_closed(name),
            "num_moves": result.num_moves,
            "num_migrated": result.num_migrated,
            "num_recomputed": result.num_recomputed,
            "num_void": result.num_void,
            "busy_share": result.busy_share,
            "busy_s": result.busy_s.tolist(),
            "instance_s": result.instance_s,
            "resizes": [
                {"at_s": at_s, "target": change.target, "leave": list(change.leave), "reason": change.reason}
                for at_s, change in result.resizes
            ],
        }
        for name, result in made.results.items()
    }
    return {
        "schema_version": 1,
        "rates": label,
        "lengths": str(args.lengths),
        "num_instances": setup.num_instances,
        "num_slots": setup.num_slots,
        "num_samples": len(samples),
        "num_tokens": int(samples.response_tokens.sum()),
        "max_new_tokens": setup.max_new_tokens,
        "poll_interval_s": setup.poll_interval_s,
        "seed": args.seed,
        "policies": results,
        "perfect_s": made.perfect_s,
        "bound_s": made.least_s,
    }
