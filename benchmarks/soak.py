"""An hour of training, watched from outside: memory, processes, open files, shared memory, the run folder's growth.

Figures compare the last sixth of the time with the second sixth: the first is for warming up. All that was seen is in
OUT/soak_samples.jsonl, a line a moment.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..cluster.ray_start.ray_session import TERMINATED
from ..core.errors import RlhfSpecError
from ..core.metrics import read_metrics
from ..core.proc_files import PROC, sizes
from .faulty.injection import serving_actors
from .support.harness import Bench
from .support.processes import (
    command_line,
    descendants,
    left_of,
    private_mib,
    start_command,
)
from .support.result import ROOT
from .support.runs import PPO, newest_run, train_words

Sample = dict[str, float]
"Of one moment: figures by name, memory in MiB."
MEMORY_LIMIT = 1.05
"Of late over early: the bar."
FILES_LIMIT = 1.02
"A dozen of a thousand come and go with connections."
_SUFFIX = "_late_over_early"
LEFT_LIMIT_MIB = 1.0
JUDGED_FROM_MINUTES = 30.0
"A shorter run is still warming up in its second sixth."


def growth(samples: Sequence[Sample]) -> dict[str, float]:
    """For every figure of the samples: its mean over the last sixth, over that of the second sixth."""
    sixth = max(len(samples) // 6, 1)
    early, late = samples[sixth : 2 * sixth] or samples[:sixth], samples[-sixth:]
    found = {}
    for name in samples[-1]:
        means = [sum(one[name] for one in part) / len(part) for part in (late, early)]
        # from nothing to something is growth without bound; a figure must be finite
        found[name + _SUFFIX] = means[0] / means[1] if means[1] else 1.0 + means[0]
    return found


def grown(figures: Mapping[str, float]) -> list[str]:
    """What must not have grown and has, a line each, from the figures of a soak."""
    lines = []
    if figures["minutes"] >= JUDGED_FROM_MINUTES:
        for name, ratio in figures.items():
            what = name.removesuffix(_SUFFIX)
            limit = _limit(what)
            if what != name and ratio > limit:
                lines.append(f"{what} grew to {ratio:.3f} of what it was early; expected at most {limit:g}")
    for name, limit, what in (
        ("processes_left", 0.0, "processes were left"),
        ("shared_memory_left_mib", LEFT_LIMIT_MIB, "MiB of shared memory were left (by this run or another)"),
        ("spilled_peak_mib", 0.0, "MiB of objects were written to disk: the object store was full"),
    ):
        if figures[name] > limit:
            lines.append(f"{figures[name]:.4g} {what}; expected at most {limit:g}")
    if figures["object_store_peak_mib"] > figures["object_store_size_mib"]:
        lines.append(
            f"the object store took {figures['object_store_peak_mib']:.0f} MiB; expected at most its size, "
            f"{figures['object_store_size_mib']:.0f} MiB"
        )
    return lines


def _limit(what: str) -> float:
    if what == "num_processes":
        return 1.0
    return MEMORY_LIMIT if what.endswith("_mib") else FILES_LIMIT


MINUTES = {"quick": 3.0, "default": 10.0, "full": 60.0}
EVERY_S = 5.0
END_S = 180.0
_MIB = 2.0**20
_IDLE_PROCESS = "ray::IDLE"
"Ray keeps some at hand, and ends them as it likes."


def run(bench: Bench) -> int:
    """Run the benchmark; returns 0, or 1 when something has grown or was left behind, in a line each."""
    console, out, minutes = bench.console, bench.out, bench.minutes(MINUTES)
    settings = (
        "run.iterations=3000",
        "run.checkpoint_every=5",
        "run.keep_checkpoints=2",
        "cluster.dashboard=true",
    )
    before = shared_bytes()
    driver = start_command(train_words(PPO, out, "soak", settings), folder=ROOT, log=out / "soak.log")
    seen: set[int] = set()
    try:
        samples, size_mib = _watch(driver, 60.0 * minutes, out, seen)
        driver.send_signal(signal.SIGTERM)
        code = driver.wait(timeout=END_S)
    finally:
        driver.kill()
    left = left_of(seen, END_S)
    folder = newest_run(out, "soak")
    metrics = read_metrics(folder / "metrics.jsonl")
    figures = {
        "minutes": minutes,
        "iterations": float(len(metrics)),
        "exit_code": float(code),
        "processes_left": float(len(left)),
        "shared_memory_left_mib": max(shared_bytes() - before, 0) / _MIB,
        **growth([_without(sample, "spilled_mib") for sample in samples]),
        "object_store_size_mib": size_mib,
        "object_store_peak_mib": max(sample["object_store_mib"] for sample in samples),
        "spilled_peak_mib": max(sample["spilled_mib"] for sample in samples),
        "all_mib": samples[-1]["all_mib"],
        "open_files": samples[-1]["open_files"],
        "folder_mib": folder_bytes(folder) / _MIB,
        **_folder_growth(folder, len(metrics)),
    }
    bench.figures.values |= figures
    bench.write()
    if minutes < JUDGED_FROM_MINUTES:
        console.print(f"growth is judged from {JUDGED_FROM_MINUTES:.0f} minutes on: it was still warming up")
    wrong = grown(figures)
    if code != TERMINATED:
        wrong.append(
            f"the run ended with {code} after SIGTERM; expected {TERMINATED}; see {out / 'soak.log'}"
        )
    for line in wrong:
        console.print(f"not met: {line}", style="red", soft_wrap=True)
    return 1 if wrong else 0


def shared_bytes() -> int:
    """What is used of the memory that processes share."""
    return shutil.disk_usage("/dev/shm").used


def folder_bytes(folder: Path) -> int:
    """Sum of the sizes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _watch(
    driver: subprocess.Popen[bytes], seconds: float, out: Path, seen: set[int]
) -> tuple[list[Sample], float]:
    """Samples from when all actors serve, for so many seconds, and the object store's size in MiB.

    `seen` gets every process.
    """
    while not all(serving_actors(driver.pid).values()):
        _require_running(driver, out)
        time.sleep(1.0)
    size_mib, temporary = _object_store(driver.pid)
    samples: list[Sample] = []
    ends_s = time.monotonic() + seconds
    with (out / "soak_samples.jsonl").open("w") as kept:
        while time.monotonic() < ends_s:
            _require_running(driver, out)
            below = descendants(driver.pid)
            seen |= below
            samples.append(_sample(driver.pid, below, temporary))
            kept.write(json.dumps(samples[-1]) + "\n")
            kept.flush()
            time.sleep(EVERY_S)
    return samples, size_mib


def _sample(driver: int, below: set[int], temporary: Path) -> Sample:
    actors = serving_actors(driver)
    sample = {f"{pool}_mib": sum(map(private_mib, pids)) for pool, pids in actors.items()}
    sample["driver_mib"] = private_mib(driver)
    sample["all_mib"] = sample["driver_mib"] + sum(map(private_mib, below))
    sample["num_processes"] = float(sum(not _is_idle(pid) for pid in below))
    sample["open_files"] = float(sum(map(_open_files, {driver, *below})))
    # all that have it open see it; no other process below has shared memory of such a size
    sample["object_store_mib"] = max(map(_shared_mib, below), default=0.0)
    sample["spilled_mib"] = sum(map(folder_bytes, temporary.glob("**/ray_spilled_objects*"))) / _MIB
    return sample


def _without(sample: Sample, name: str) -> Sample:
    return {key: value for key, value in sample.items() if key != name}


def _object_store(driver: int) -> tuple[float, Path]:
    """Its size in MiB and Ray's temporary folder, as the raylet was told. Raises RlhfSpecError."""
    for pid in descendants(driver):
        words = command_line(pid)
        size = re.search(r"--object_store_memory=(\d+)", words)
        folder = re.search(r"--temp[-_]dir=(\S+)", words)
        if size and folder:
            return int(size[1]) / _MIB, Path(folder[1])
    raise RlhfSpecError(f"process {driver} has no raylet below it; expected a run with a Ray of its own")


def _is_idle(pid: int) -> bool:
    return command_line(pid).startswith(_IDLE_PROCESS)


def _require_running(driver: subprocess.Popen[bytes], out: Path) -> None:
    if driver.poll() is not None:
        raise RlhfSpecError(
            f"the run ended with {driver.returncode}; expected it to go on; see {out / 'soak.log'}"
        )


def _shared_mib(pid: int) -> float:
    return sizes(PROC / str(pid) / "status").get("RssShmem", 0) / _MIB


def _folder_growth(folder: Path, num_iterations: int) -> dict[str, float]:
    """KiB an iteration beside checkpoints and states, of which a fixed number is kept: in all, and of each entry."""
    found = {}
    for entry in sorted(folder.iterdir()):
        if entry.name != "checkpoints":
            size = folder_bytes(entry) if entry.is_dir() else entry.stat().st_size
            found[f"{entry.stem}_kib_per_iteration"] = size / 1024.0 / max(num_iterations, 1)
    return {"folder_kib_per_iteration": sum(found.values()), **found}


def _open_files(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0
