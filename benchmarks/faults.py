"""Training while actors of every pool are killed and frozen, and runs whose driver is killed and resumed.

Each run is `rlhfspec train` in a process of its own, compared sample by sample with one that nobody disturbed.
"""

from __future__ import annotations

import random
import re
import signal
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.faulty.comparison import compare_runs
from benchmarks.faulty.injection import Fault, inject
from benchmarks.support.command import run_command, setting_words, start_command
from benchmarks.support.result import ROOT, write_result
from cluster.run_folder.layout import RunDir
from core.errors import RlhfSpecError
from core.metrics import read_metrics

ITERATIONS = {"quick": 4, "default": 45, "full": 45}
FAULTS = {"quick": 4, "default": 40, "full": 40}
SEEDS = {"quick": 1, "default": 1, "full": 3}
RESUMED_ITERATIONS = 4
RESUMES = {"quick": 1, "default": 4, "full": 10}
LIMIT_S = 5400.0
CHAOS = (
    "run.state_every=1",
    "run.checkpoint_every=1",
    "cluster.heartbeat_timeout_s=10",
    "cluster.order_timeout_s=60",
    "cluster.max_instance_restarts=1000",
    "cluster.max_scheduler_restarts=1000",
    "cluster.max_trainer_restarts=1000",
)
"A state and weights an iteration, a heartbeat limit that a long freeze passes, restarts that do not run out."
RESUMED_KINDS = {
    "ppo": ("configs/demo.yaml", ()),
    "grpo": ("configs/algorithms/grpo.yaml", ()),
    "ppo_lora": ("configs/demo.yaml", ("trainer.lora.rank=8",)),
    "grpo_lora": ("configs/algorithms/grpo.yaml", ("trainer.lora.rank=8",)),
}
"Whose driver is killed: algorithm, and settings beside its config."


def run(*, out: Path, mode: str, data: Path | None) -> int:
    """Run the benchmark; returns 0, or 1 when a sample was lost, doubled or changed, or weights differ."""
    console = Console()
    out = out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    figures: dict[str, float] = {}
    recoveries: list[float] = []
    ratios: list[float] = []
    totals = {
        "faults": 0,
        "samples_lost": 0,
        "samples_duplicated": 0,
        "samples_different": 0,
        "trainer_faults": 0,
    }
    equal: list[bool] = []
    for seed in range(SEEDS[mode]):
        settings = [f"run.iterations={ITERATIONS[mode]}", f"run.seed={seed}", *CHAOS]
        undisturbed, seconds = _trained(out, f"undisturbed_{seed}", ROOT / "configs" / "demo.yaml", settings)
        disturbed, faults, disturbed_s = _disturbed(out, seed, settings, most=FAULTS[mode], console=console)
        found = compare_runs(undisturbed, disturbed)
        console.print(found)
        totals["faults"] += len(faults)
        totals["samples_lost"] += found.num_lost
        totals["samples_duplicated"] += found.num_duplicated
        totals["samples_different"] += found.num_different
        totals["trainer_faults"] += sum(fault.pool == "trainer" for fault in faults)
        recoveries += [fault.recovery_s for fault in faults if fault.recovery_s is not None]
        ratios.append(disturbed_s / seconds)
        equal.append(found.is_equal)
    figures |= {name: float(count) for name, count in totals.items()}
    figures["weights_equal"] = sum(equal) / len(equal)
    figures["recovery_s_median"] = statistics.median(recoveries) if recoveries else 0.0
    figures["recovery_s_max"] = max(recoveries, default=0.0)
    figures["time_over_undisturbed"] = statistics.median(ratios)
    figures |= _verified(out, _folder(out, "undisturbed_0"))
    resumed = _resumes(out, mode, console)
    figures["resumes"] = float(len(resumed))
    figures["resumes_equal"] = sum(resumed) / max(len(resumed), 1)
    for name, value in figures.items():
        console.print(f"{name}: {value:.4g}")
    write_result(out, "faults", figures, provenance={"mode": mode, "iterations": ITERATIONS[mode]})
    return 0 if all(equal) and all(resumed) else 1


def _verified(out: Path, folder: Path) -> dict[str, float]:
    """All samples of a run generated again, by `rlhfspec verify`, in the time that its generation took."""
    log = out / "verify.log"
    seconds = run_command(["verify", str(folder), "--share", "1.0"], folder=ROOT, log=log)
    generate_s = sum(row["time/generate_s"] for row in read_metrics(folder / "metrics.jsonl"))
    (differences,) = re.findall(r"^(\d+) differences$", log.read_text(), re.MULTILINE)
    return {"verify_differences": float(differences), "verify_over_generate": seconds / generate_s}


def _trained(out: Path, name: str, config: Path, settings: Sequence[str]) -> tuple[Path, float]:
    seconds = run_command(_words(out, name, config, settings), folder=ROOT, log=out / f"{name}.log")
    return _folder(out, name), seconds


def _words(out: Path, name: str, config: Path, settings: Sequence[str]) -> list[str]:
    fixed = [f"run.output_dir={out / 'runs'}", f"run.name={name}", "cluster.dashboard=false"]
    return ["train", "--config", str(config), *setting_words((*fixed, *settings))]


def _folder(out: Path, name: str) -> Path:
    (folder,) = (out / "runs").glob(f"{name}-2*")
    return folder


def _disturbed(
    out: Path, seed: int, settings: Sequence[str], *, most: int, console: Console
) -> tuple[Path, list[Fault], float]:
    name = f"disturbed_{seed}"
    began_s = time.monotonic()
    words = _words(out, name, ROOT / "configs" / "demo.yaml", settings)
    driver = start_command(words, folder=ROOT, log=out / f"{name}.log")
    try:
        faults = inject(
            driver.pid, most=most, seed=seed, is_running=lambda: driver.poll() is None, say=console.print
        )
        code = driver.wait(timeout=LIMIT_S)
    finally:
        driver.kill()
    if code:
        raise RlhfSpecError(f"the disturbed run ended with {code}, expected 0; see {out / f'{name}.log'}")
    return _folder(out, name), faults, time.monotonic() - began_s


def _resumes(out: Path, mode: str, console: Console) -> list[bool]:
    """Whether each run whose driver was killed at a random moment, and resumed, ended as an undisturbed one."""
    draw = random.Random(7)
    kinds = list(RESUMED_KINDS.items())
    references: dict[str, tuple[Path, float]] = {}
    equal = []
    for number in range(RESUMES[mode]):
        kind, (config, extra) = kinds[number % len(kinds)]
        settings = [f"run.iterations={RESUMED_ITERATIONS}", "run.state_every=1", *extra]
        if kind not in references:
            references[kind] = _trained(out, f"whole_{kind}", ROOT / config, settings)
        whole, seconds = references[kind]
        name = f"cut_{number}_{kind}"
        driver = start_command(
            _words(out, name, ROOT / config, settings), folder=ROOT, log=out / f"{name}.log"
        )
        folder = _after_first_state(out, name, driver)
        time.sleep(draw.uniform(0.0, 0.3 * seconds))
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        state = RunDir.open(folder).status()["state"]
        if state == "finished":
            console.print(f"{name}: it had ended before it was killed, and does not count")
            continue
        run_command(["train", "--resume", str(folder)], folder=ROOT, log=out / f"{name}_resumed.log")
        found = compare_runs(whole, folder)
        console.print(f"{name}: killed while {state}, resumed: {found}")
        equal.append(found.is_equal)
    return equal


def _after_first_state(out: Path, name: str, driver: subprocess.Popen[bytes]) -> Path:
    """Wait until there is anything to resume from."""
    ends_s = time.monotonic() + LIMIT_S
    while time.monotonic() < ends_s and driver.poll() is None:
        folders = list((out / "runs").glob(f"{name}-2*"))
        if folders and any(folders[0].glob("checkpoints/state_*/state.json")):
            return folders[0]
        time.sleep(0.1)
    raise RlhfSpecError(f"{name} ended, or had no state after {LIMIT_S:.0f} s; see {out / f'{name}.log'}")
