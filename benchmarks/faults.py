"""Training under faults of every pool, of the network and of the object store; drivers that are killed and resumed.

Each run is `rlhfspec train` in a process of its own, whose instances have two ranks, compared sample by sample with
one of single ranks that nobody disturbed. Beside it: moves between groups, with faults at every stage of a move.
What is done is kept in OUT/parts: a benchmark that was broken off goes on there.
"""

from __future__ import annotations

import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..cluster.folder.layout import RunDir
from ..cluster.observe.console import PipeConsole
from ..core.errors import RlhfSpecError
from ..core.metrics import read_metrics
from .faulty import network
from .faulty.group_moves import group_moves
from .faulty.injection import (
    HEARTBEAT_LIMIT_S,
    NETWORK_KINDS,
    ORDER_LIMIT_S,
    Card,
    Fault,
    deal,
    inject,
)
from .faulty.outcome import (
    Comparison,
    Disturbed,
    Resumed,
    compare_runs,
    fault_figures,
    kept,
    problems,
)
from .support.harness import Bench
from .support.processes import run_command, setting_words, start_command
from .support.result import ROOT, machine_provenance
from .support.runs import DEMO, GRPO, PPO, newest_run, train, train_words

ITERATIONS = {"quick": 6, "default": 75, "full": 75}
MOST_ROUNDS = 5
"A run that has ended before its last fault goes on with half as many iterations again, so many times in all."
FAULTS = {"quick": 4, "default": 44, "full": 44}
SEEDS = {"quick": 1, "default": 1, "full": 3}
RESUMED_ITERATIONS = 4
RESUMES = {"quick": 1, "default": 4, "full": 10}
RESUME_TRIES = 2
"A run that has ended before its driver was killed is made again, so many times."
LIMIT_S = 5400.0
CHAOS = (
    "run.state_every=1",
    "run.checkpoint_every=1",
    f"cluster.heartbeat_timeout_s={HEARTBEAT_LIMIT_S:g}",
    f"cluster.order_timeout_s={ORDER_LIMIT_S:g}",
    "cluster.max_instance_restarts=1000",
    "cluster.max_scheduler_restarts=1000",
    "cluster.max_trainer_restarts=1000",
)
"A state and weights an iteration, limits of silence that a long freeze passes, restarts that do not run out."
GROUPED = ("cluster.generation.tensor_parallel=2", "cluster.generation.num_cpus=0.25", "rollout.look_ahead=4")
"Of the disturbed run: groups, and the next batch begun ahead."
RESUMED_KINDS = {
    "ppo": (PPO, ()),
    "grpo": (GRPO, ()),
    "ppo_lora": (PPO, ("trainer.lora.rank=8",)),
    "grpo_lora": (GRPO, ("trainer.lora.rank=8",)),
}
"Whose driver is killed: algorithm, and settings beside its config."


def run(bench: Bench) -> int:
    """Run the benchmark; returns 0, or 1 when there were fewer faults than wanted, or one was not borne.

    1 as well where `rlhfspec verify` took longer than the run's generation, or found a difference.

    Borne is a fault after which every actor is at work again, and nothing of the run is lost, doubled or changed.
    """
    console, out, mode = bench.console, bench.out, bench.mode
    (out / "parts").mkdir(parents=True, exist_ok=True)
    stamp = {"mode": mode, "commit": machine_provenance()["commit"]}
    without, reason = frozenset[str](), network.why_not()
    if reason is not None:
        without = NETWORK_KINDS
        console.print(f"the network is not cut: no handle on another process's socket here: {reason}")
    runs = [
        _disturbed_from(
            kept(
                out / "parts" / f"seed_{seed}.json",
                stamp,
                lambda seed=seed: _seed_part(out, seed, mode, without, console),
            )
        )
        for seed in range(SEEDS[mode])
    ]
    groups = kept(out / "parts" / "groups.json", stamp, lambda: group_moves(mode, console))
    verified = kept(out / "parts" / "verified.json", stamp, lambda: _verified(out))
    resumes = _resumes(out, mode, stamp, console)
    figures = bench.figures.values = {**fault_figures(runs, resumes), **groups, **verified}
    bench.write(iterations=ITERATIONS[mode], left_out=sorted(without))
    wrong = problems(runs, resumes, most=FAULTS[mode], num_resumes=RESUMES[mode], figures=figures)
    for line in wrong:
        console.print(f"not met: {line}", style="red", soft_wrap=True)
    return 1 if wrong else 0


def _seed_part(
    out: Path, seed: int, mode: str, without: frozenset[str], console: PipeConsole
) -> dict[str, Any]:
    """One seed: the run that nobody disturbs, the disturbed one, what differs.

    Both end by themselves, and go on with more iterations where there were too few faults by then.
    """
    num = ITERATIONS[mode]
    settings = [f"run.iterations={num}", f"run.seed={seed}", *CHAOS]
    undisturbed = train(DEMO, out, f"undisturbed_{seed}", settings)
    undisturbed_s = undisturbed.seconds
    name, cards, faults = f"disturbed_{seed}", deal(seed, without=without), list[Fault]()
    words = train_words(DEMO, out, name, [*settings, *GROUPED])
    disturbed_s = 0.0
    for number in range(MOST_ROUNDS):
        began_s = time.monotonic()
        faults += _under_faults(
            words,
            cards,
            most=FAULTS[mode] - len(faults),
            log=out / f"{name}_{number}.log",
            say=lambda line: console.print(f"seed {seed}: {line}", soft_wrap=True),
        )
        disturbed_s += time.monotonic() - began_s
        if len(faults) >= FAULTS[mode] or number == MOST_ROUNDS - 1:
            break
        num += max(ITERATIONS[mode] // 2, 1)
        console.print(f"seed {seed}: {len(faults)} faults so far: the run goes on to iteration {num}")
        words = _longer(newest_run(out, name), num)
    if num > ITERATIONS[mode]:
        log = out / f"undisturbed_{seed}_longer.log"
        undisturbed_s += run_command(_longer(undisturbed.folder, num), folder=ROOT, log=log)
    found = compare_runs(undisturbed.folder, newest_run(out, name))
    console.print(f"seed {seed}: {found}", soft_wrap=True)
    return {
        "seed": seed,
        "faults": [asdict(fault) for fault in faults],
        "comparison": asdict(found),
        "undisturbed_s": undisturbed_s,
        "disturbed_s": disturbed_s,
    }


def _under_faults(
    words: Sequence[str], cards: Iterator[Card], *, most: int, log: Path, say: Callable[[str], None]
) -> list[Fault]:
    """Run a command to its end under faults. Raises RlhfSpecError when it fails or does not end."""
    driver = start_command(words, folder=ROOT, log=log)
    try:
        _after_first_iteration(driver, log)
        faults = inject(
            driver.pid,
            cards,
            most=most,
            is_running=lambda: driver.poll() is None,
            say=say,
            log=log.with_suffix(".filler.log"),
            limit_s=LIMIT_S,
        )
        code = driver.wait(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise RlhfSpecError(f"the disturbed run has not ended after {LIMIT_S:.0f} s; see {log}") from None
    finally:
        driver.kill()
    if code:
        raise RlhfSpecError(f"the disturbed run ended with {code}, expected 0; see {log}")
    return faults


def _after_first_iteration(driver: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a run is under way, or has ended: an instance that is lost before it has weights ends it."""
    ends_s = time.monotonic() + LIMIT_S
    while not re.search(r"^iteration \d", log.read_text(errors="replace"), re.MULTILINE):
        if driver.poll() is not None:
            return
        if time.monotonic() > ends_s:
            raise RlhfSpecError(f"the disturbed run has no iteration after {LIMIT_S:.0f} s; see {log}")
        time.sleep(0.2)


def _longer(folder: Path, num_iterations: int) -> list[str]:
    """Words that let a finished run go on."""
    return ["train", "--resume", str(folder), *setting_words([f"run.iterations={num_iterations}"])]


def _disturbed_from(part: Mapping[str, Any]) -> Disturbed:
    faults, comparison = (
        [Fault(**fault) for fault in part["faults"]],
        Comparison(**part["comparison"]),
    )
    return Disturbed(**{**part, "faults": faults, "comparison": comparison})


def _verified(out: Path) -> dict[str, float]:
    """All samples of a run generated again, by `rlhfspec verify`, in the time that its generation took.

    By what the command says, its engine's start included; and the whole command, imports and checksums included.
    """
    folder, log = newest_run(out, "undisturbed_0"), out / "verify.log"
    seconds = run_command(["verify", str(folder), "--share", "1.0"], folder=ROOT, log=log)
    generate_s = sum(row["time/generate_s"] for row in read_metrics(folder / "metrics.jsonl"))
    said = log.read_text()
    (differences,) = re.findall(r"^(\d+) differences$", said, re.MULTILINE)
    ((again_s, start_s),) = re.findall(r"^ *([\d.]+) s after a start of ([\d.]+) s;", said, re.MULTILINE)
    return {
        "verify_differences": float(differences),
        "verify_over_generate": (float(again_s) + float(start_s)) / generate_s,
        "verify_command_over_generate": seconds / generate_s,
    }


def _resumes(out: Path, mode: str, stamp: Mapping[str, Any], console: PipeConsole) -> list[Resumed]:
    """Runs whose driver was killed at a random moment, and resumed."""
    kinds = list(RESUMED_KINDS)
    found: list[Resumed] = []
    for number in range(RESUMES[mode]):
        kind = kinds[number % len(kinds)]
        tries: list[Resumed] = []
        while len(tries) < RESUME_TRIES and not any(one.has_been_killed for one in tries):
            name = f"cut_{number}_{kind}" + (f"_again_{len(tries)}" if tries else "")
            part = kept(
                out / "parts" / f"{name}.json",
                stamp,
                lambda kind=kind, name=name: _resume_part(out, kind, name, stamp, console),
            )
            tries.append(Resumed(**part))
        found.append(tries[-1])
    return found


def _resume_part(
    out: Path, kind: str, name: str, stamp: Mapping[str, Any], console: PipeConsole
) -> dict[str, Any]:
    config, extra = RESUMED_KINDS[kind]
    settings = [f"run.iterations={RESUMED_ITERATIONS}", "run.state_every=1", *extra]

    def whole_part() -> dict[str, Any]:
        made = train(config, out, f"whole_{kind}", settings)
        return {"folder": str(made.folder), "seconds": made.seconds}

    whole = kept(out / "parts" / f"whole_{kind}.json", stamp, whole_part)
    older = set((out / "runs").glob(f"{name}-2*"))
    driver = start_command(train_words(config, out, name, settings), folder=ROOT, log=out / f"{name}.log")
    try:
        folder = after_first_state(out, name, driver, older)
        time.sleep(random.Random(name).uniform(0.0, 0.2 * whole["seconds"]))
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    state = RunDir.open(folder).status()["state"]
    if state == "finished":
        console.print(f"{name}: it had ended before it was killed, and does not count")
        return {"name": name, "has_been_killed": False, "is_equal": True}
    run_command(["train", "--resume", str(folder)], folder=ROOT, log=out / f"{name}_resumed.log")
    found = compare_runs(Path(whole["folder"]), folder)
    console.print(f"{name}: killed while {state}, resumed: {found}", soft_wrap=True)
    return {"name": name, "has_been_killed": True, "is_equal": found.is_equal}


def after_first_state(out: Path, name: str, driver: subprocess.Popen[bytes], older: set[Path]) -> Path:
    """Wait until there is anything to resume from; the run's folder, which is none of the older ones."""
    ends_s = time.monotonic() + LIMIT_S
    while time.monotonic() < ends_s and driver.poll() is None:
        for folder in set((out / "runs").glob(f"{name}-2*")) - older:
            if any(folder.glob("checkpoints/state_*/state.json")):
                return folder
        time.sleep(0.1)
    raise RlhfSpecError(f"{name} ended, or had no state after {LIMIT_S:.0f} s; see {out / f'{name}.log'}")
