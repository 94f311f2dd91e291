"""An hour of training, watched from outside: memory, processes, open files, shared memory, the run folder's growth.

Figures compare the last sixth of the time with the second sixth: the first is for warming up.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.faulty.processes import serving_actors
from benchmarks.support.command import setting_words, start_command
from benchmarks.support.process_tree import descendants
from benchmarks.support.result import ROOT, write_result
from core.errors import RlhfSpecError
from core.metrics import read_metrics
from core.proc_files import PROC, sizes

MINUTES = {"quick": 3.0, "default": 10.0, "full": 60.0}
EVERY_S = 5.0
END_S = 180.0
_MIB = 2.0**20
Sample = dict[str, float]
"Of one moment: figures by name, memory in MiB."


def run(*, out: Path, mode: str, data: Path | None) -> int:
    """Run the benchmark; returns 0, or 1 when something was left behind."""
    console = Console()
    out = out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    settings = [
        f"run.output_dir={out / 'runs'}",
        "run.name=soak",
        "run.iterations=3000",
        "run.checkpoint_every=5",
    ]
    settings += ["run.keep_checkpoints=2"]
    words = ["train", "--config", str(ROOT / "configs" / "demo.yaml"), *setting_words(settings)]
    before = shared_bytes()
    driver = start_command(words, folder=ROOT, log=out / "soak.log")
    seen: set[int] = set()
    try:
        samples = _watch(driver, 60.0 * MINUTES[mode], out, seen)
        driver.send_signal(signal.SIGTERM)
        code = driver.wait(timeout=END_S)
    finally:
        driver.kill()
    # what Ray ends itself takes a moment
    ends_s = time.monotonic() + END_S
    while (left := _alive(seen)) and time.monotonic() < ends_s:
        time.sleep(1.0)
    (folder,) = (out / "runs").glob("soak-2*")
    metrics = read_metrics(folder / "metrics.jsonl")
    figures = {
        "minutes": MINUTES[mode],
        "iterations": float(len(metrics)),
        "exit_code": float(code),
        "processes_left": float(len(left)),
        "shared_memory_left_mib": max(shared_bytes() - before, 0) / _MIB,
        **growth(samples),
        "object_store_peak_mib": max(sample["object_store_mib"] for sample in samples),
        "folder_mib": folder_bytes(folder) / _MIB,
        "folder_kib_per_iteration": _folder_growth(folder) / 1024.0,
    }
    for name, value in figures.items():
        console.print(f"{name}: {value:.4g}")
    write_result(out, "soak", figures, provenance={"mode": mode})
    return 1 if left else 0


def growth(samples: Sequence[Sample]) -> dict[str, float]:
    """For every figure of the samples: its mean over the last sixth, over that of the second sixth."""
    sixth = max(len(samples) // 6, 1)
    early, late = samples[sixth : 2 * sixth] or samples[:sixth], samples[-sixth:]
    found = {}
    for name in samples[-1]:
        if name in ("folder_mib", "object_store_mib"):
            continue
        means = [sum(one[name] for one in part) / len(part) for part in (late, early)]
        found[f"{name}_late_over_early"] = means[0] / means[1] if means[1] else 1.0
    return found


def shared_bytes() -> int:
    """What is used of the memory that processes share."""
    return shutil.disk_usage("/dev/shm").used


def folder_bytes(folder: Path) -> int:
    """Sum of the sizes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _watch(driver: subprocess.Popen[bytes], seconds: float, out: Path, seen: set[int]) -> list[Sample]:
    """Samples from when all actors serve, for so many seconds; `seen` gets every process."""
    while not all(serving_actors(driver.pid).values()):
        _require_running(driver, out)
        time.sleep(1.0)
    samples: list[Sample] = []
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s:
        _require_running(driver, out)
        below = descendants(driver.pid)
        seen |= below
        actors = serving_actors(driver.pid)
        sample = {f"{pool}_mib": sum(map(_private_mib, pids)) for pool, pids in actors.items()}
        sample["driver_mib"] = _private_mib(driver.pid)
        sample["all_mib"] = sample["driver_mib"] + sum(map(_private_mib, below))
        sample["num_processes"] = float(len(below))
        sample["open_files"] = float(sum(map(_open_files, {driver.pid, *below})))
        # all that have it open see it; no other process below has shared memory of such a size
        sample["object_store_mib"] = max(map(_shared_mib, below), default=0.0)
        samples.append(sample)
        time.sleep(EVERY_S)
    return samples


def _require_running(driver: subprocess.Popen[bytes], out: Path) -> None:
    if driver.poll() is not None:
        raise RlhfSpecError(
            f"the run ended with {driver.returncode}; expected it to go on; see {out / 'soak.log'}"
        )


def _private_mib(pid: int) -> float:
    """Memory of a process that no other has, nor the page cache: what would leak."""
    held = sizes(PROC / str(pid) / "smaps_rollup")
    return (held.get("Private_Dirty", 0) + held.get("Swap", 0)) / _MIB


def _shared_mib(pid: int) -> float:
    return sizes(PROC / str(pid) / "status").get("RssShmem", 0) / _MIB


def _folder_growth(folder: Path) -> float:
    """Bytes an iteration beside checkpoints and states, of which a fixed number is kept."""
    num_iterations = max(len(read_metrics(folder / "metrics.jsonl")), 1)
    return (folder_bytes(folder) - folder_bytes(folder / "checkpoints")) / num_iterations


def _open_files(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def _alive(pids: set[int]) -> set[int]:
    return {pid for pid in pids if Path(f"/proc/{pid}").exists()}
