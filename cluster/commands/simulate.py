"""`rlhfspec simulate`: reallocation policies on simulated instances."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ...core.errors import ConfigError, DataError
from ...core.outside import user_path
from .arguments import SEED, number
from .declare import Arg

if TYPE_CHECKING:
    import numpy as np

    from ...policies.reallocation.rate_curve import RateCurve
    from ...policies.simulate.compare import Comparison
    from ...policies.simulate.simulation_records import Elastic, MoveTruth, PoolSetup, Samples

PRESETS = ("skewed", "long_tail", "balanced")
SHOW_AFTER_S = 2.0
POLLS = 500
"The pool is looked at about so often in a rollout where no interval is given, at most every tenth of a second."
PROFILE_KV_BYTES = 16384.0


def _from_to(lowest: float, highest: float, convert: type[int] | type[float] = int) -> Any:
    """A number in a range: what can be simulated in a time that somebody waits."""
    words = f"a number from {lowest:g} to {highest:g}"
    return number(words, convert, lambda value: lowest <= value <= highest)  # a NaN is in no range


Slots = Annotated[int, Arg("N", "samples that run at once on each (%(default)s)", parse=_from_to(1, 10**5))]
NumSamples = Annotated[
    int, Arg("N", "samples of the rollout (as many as there are slots)", parse=_from_to(1, 10**7))
]
MaxNewTokens = Annotated[
    int, Arg("N", "limit of a response (4096; of a file: its longest)", parse=_from_to(1, 10**7))
]
Device = Annotated[
    Literal["h100-class", "h100-class-plain"], Arg(help="analytic (%(default)s)", group="rates")
]
KvBytesPerToken = Annotated[
    float, Arg("N", "size of both caches (of the device; 16384)", parse=_from_to(1.0, 1e9, float))
]
Policy = Annotated[
    Literal["all", "static", "pull", "recompute_only", "paper_rule", "finish_time"],
    Arg(help="beside static and pull (%(default)s)"),
]
Poll = Annotated[
    float,
    Arg(
        "SECONDS",
        f"between two looks at the pool (a {POLLS}th of the rollout)",
        parse=_from_to(1e-3, 1e6, float),
    ),
]
SpeedSigma = Annotated[
    float, Arg("S", "log-normal spread of speeds (%(default)s)", parse=_from_to(0.0, 3.0, float))
]
MaxInstances = Annotated[
    int, Arg("K", "let the pool grow from --instances to so many, and shrink", parse=_from_to(1, 10**4))
]
StartUp = Annotated[
    float, Arg("SECONDS", "of an added instance (%(default)s)", parse=_from_to(0.0, 1e6, float))
]
IdleTimeout = Annotated[
    float, Arg("SECONDS", "until one leaves (%(default)s)", parse=_from_to(1e-3, 1e6, float))
]
RolloutsAhead = Annotated[int, Arg("N", "rollouts still to come (%(default)s)", parse=_from_to(0, 10**6))]


def simulate(
    *,
    instances: Annotated[int, Arg("K", "instances (%(default)s)", parse=_from_to(1, 10**4))] = 8,
    slots: Slots = 64,
    samples: NumSamples | None = None,
    lengths: Annotated[str, Arg("WHAT", f"{', '.join(PRESETS)} or a file (%(default)s)")] = "skewed",
    max_new_tokens: MaxNewTokens | None = None,
    prompt_tokens: Annotated[int, Arg("N", "of each prompt (%(default)s)", parse=_from_to(0, 10**7))] = 128,
    profile: Annotated[Path, Arg("DIR", "a folder made by `rlhfspec profile`", group="rates")] | None = None,
    device: Device = "h100-class",
    kv_bytes_per_token: KvBytesPerToken | None = None,
    policy: Policy = "all",
    poll: Poll | None = None,
    speed_sigma: SpeedSigma = 0.1,
    max_instances: MaxInstances | None = None,
    start_up: StartUp = 30.0,
    idle_timeout: IdleTimeout = 120.0,
    rollouts_ahead: RolloutsAhead = 0,
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
    from ...policies.simulate.simulation_records import PoolSetup, samples_of
    from ..observe.console import PipeConsole

    require_file("--out", out)
    elastic = _elastic(instances, max_instances, start_up, idle_timeout, rollouts_ahead)
    counts, limit = _lengths(lengths, samples, instances, slots, max_new_tokens, seed)
    drawn = samples_of(counts, prompt_tokens=prompt_tokens, speed_sigma=speed_sigma, seed=seed)
    context = prompt_tokens + int(drawn.response_tokens.mean())
    curve, moves, label = _rates(profile, device, kv_bytes_per_token, slots, context)
    setup = PoolSetup(
        num_instances=instances,
        num_slots=slots,
        curve=curve,
        max_new_tokens=limit,
        moves=moves,
        elastic=elastic,
    )
    console = PipeConsole(highlight=False)
    tree = {"rates": label, "lengths": lengths, "seed": seed} | _compare(
        drawn, setup, poll, policy, console, label
    )
    if out is not None:
        out.write_text(json.dumps(tree, indent=2) + "\n")
        console.print(f"written {out}", soft_wrap=True)
    return 0


def _compare(
    drawn: Samples, setup: PoolSetup, poll: float | None, policy: str, console: Any, label: str
) -> dict[str, Any]:
    """Simulate and print; return the figures for JSON."""
    from ...policies.simulate.compare import COMPARED, compare, least_finish_s

    setup = replace(setup, poll_interval_s=poll or max(least_finish_s(drawn, setup) / POLLS, 0.1))
    wanted = COMPARED if policy == "all" else tuple(dict.fromkeys(("static", "pull", policy)))
    with simulation_bar(len(drawn) * len(wanted), console) as tick:
        made = compare(drawn, setup, wanted, progress=tick)
    console.print(
        f"{setup.num_instances} instances of {setup.num_slots} slots, {len(drawn)} samples "
        f"({int(drawn.response_tokens.sum())} tokens, the longest {int(drawn.response_tokens.max())}), {label}",
        soft_wrap=True,
    )
    console.print(_table(made))
    for name, result in made.results.items():
        for at_s, change in result.resizes:
            console.print(
                f"{name}: {at_s:.1f} s: to {change.target} instances: {change.reason}", soft_wrap=True
            )
    return _tree(drawn, setup, made)


def _elastic(
    instances: int, most: int | None, start_up_s: float, idle_timeout_s: float, rollouts_ahead: int
) -> Elastic | None:
    """How the pool grows and shrinks; None where it does not. Raises ConfigError."""
    from ...policies.simulate.simulation_records import Elastic

    if most is None:
        return None
    if most < instances:
        raise ConfigError(
            f"--max-instances {most} is below --instances {instances}, which the pool begins with"
        )
    return Elastic(
        least=instances,
        most=most,
        start_up_s=start_up_s,
        idle_timeout_s=idle_timeout_s,
        rollouts_ahead=rollouts_ahead,
    )


@contextmanager
def simulation_bar(total: int, console: Any) -> Iterator[Callable[[str, int], None]]:
    """Yield `tick(name, done)`; a bar appears when it takes longer than two seconds."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    progress = Progress(
        TextColumn("{task.description:<22}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    task = progress.add_task("simulating", total=total)
    began_s = time.monotonic()
    finished: dict[str, int] = {}

    def tick(name: str, done: int) -> None:
        finished[name] = done
        if not progress.live.is_started and time.monotonic() - began_s > SHOW_AFTER_S:
            progress.start()
        progress.update(task, description=name, completed=sum(finished.values()))

    try:
        yield tick
    finally:
        progress.stop()


def require_file(flag: str, path: Path | None) -> None:
    """Raise ConfigError where no file can be written."""
    if path is not None and path.is_dir():
        raise ConfigError(f"{flag} {path} is a folder; name a file in it")
    if path is not None and not path.resolve().parent.is_dir():
        raise ConfigError(f"{flag} {path}: the folder does not exist; make it first")


def _lengths(
    name: str, num_samples: int | None, instances: int, slots: int, max_new_tokens: int | None, seed: int
) -> tuple[np.ndarray, int]:
    """[samples] lengths of the responses, and their limit. Raises DataError."""
    if name in PRESETS:
        from ...policies.simulate.simulation_records import drawn_lengths

        limit, count = max_new_tokens or 4096, num_samples or instances * slots
        return drawn_lengths(name, count, instances, max_new_tokens=limit, seed=seed), limit
    from ..folder.rollouts import read_lengths

    lengths = read_lengths(user_path(name))
    if num_samples is not None and num_samples > len(lengths):
        raise DataError(f"--samples {num_samples}: {name} holds {len(lengths)} lengths only")
    lengths = lengths[:num_samples]
    limit = max_new_tokens or int(lengths.max())
    return lengths.clip(max=limit), limit


def _rates(
    folder: Path | None, device: str, kv_bytes: float | None, slots: int, context: int
) -> tuple[RateCurve, MoveTruth, str]:
    """How fast an instance is at `context` tokens a sample, what moves cost, and what both come from."""
    from ...policies.simulate.simulation_records import MoveTruth

    if folder is not None:
        from ...policies.reallocation.rate_curve import rate_curve_from_profile
        from ...profiles.profile import load_profile

        profile = load_profile(folder)
        curve = rate_curve_from_profile(profile, context_tokens=context)
        moves = MoveTruth(kv_bytes_per_token=kv_bytes or PROFILE_KV_BYTES)
        return curve, moves, f"profile of {profile.provenance.target_model} on {profile.provenance.device}"
    from ...policies.simulate.described_cluster import H100_CLASS, H100_LABEL, describe

    has_drafts, cluster = device == "h100-class", describe(H100_CLASS)
    curve = cluster.instance.rate_curve(
        context_tokens=context, max_samples=slots, speculation="adaptive" if has_drafts else "off"
    )
    moves = cluster.moves()
    if kv_bytes is not None:
        moves = replace(moves, kv_bytes_per_token=kv_bytes)
    return curve, moves, H100_LABEL + (", speculation" if has_drafts else ", plain decoding")


def _table(made: Comparison) -> Any:
    from ..observe.console import plain_table

    titles = "policy", "seconds", "over static", "over pull", "gap closed", "moves", "recomputed", "busy"
    rows = [
        (
            name,
            f"{result.finish_s:.2f}",
            f"{made.over(name, 'static'):.3f}",
            f"{made.over(name, 'pull'):.3f}",
            "-" if (closed := made.gap_closed(name)) is None else f"{closed:.0%}",
            str(result.num_moves),
            str(result.num_recomputed),
            f"{result.busy_share:.0%}",
        )
        for name, result in made.results.items()
    ]
    static_s, pull_s = (made.results[name].finish_s for name in ("static", "pull"))
    ends = [
        (name, f"{seconds:.2f}", f"{static_s / seconds:.3f}", f"{pull_s / seconds:.3f}")
        for name, seconds in (("perfect", made.perfect_s), ("bound", made.least_s))
    ]
    return plain_table(titles, [*rows, *ends], left=["policy"])


_VALUES = (
    "finish_s",
    "num_moves",
    "num_migrated",
    "num_recomputed",
    "num_void",
    "busy_share",
    "instance_s",
)


def _tree(samples: Samples, setup: PoolSetup, made: Comparison) -> dict[str, Any]:
    results = {
        name: {
            **{key: getattr(result, key) for key in _VALUES},
            "over_static": made.over(name, "static"),
            "over_pull": made.over(name, "pull"),
            "gap_closed": made.gap_closed(name),
            "busy_s": result.busy_s.tolist(),
            "resizes": [
                {"at_s": at_s, "target": change.target, "leave": list(change.leave), "reason": change.reason}
                for at_s, change in result.resizes
            ],
        }
        for name, result in made.results.items()
    }
    return {
        "schema_version": 1,
        "num_instances": setup.num_instances,
        "num_slots": setup.num_slots,
        "num_samples": len(samples),
        "num_tokens": int(samples.response_tokens.sum()),
        "max_new_tokens": setup.max_new_tokens,
        "poll_interval_s": setup.poll_interval_s,
        "policies": results,
        "perfect_s": made.perfect_s,
        "bound_s": made.least_s,
    }
