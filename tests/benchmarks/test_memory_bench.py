"""What `bench memory` counts: a process of its own by part, and rows of its table from peaks made by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest

from rlhfspec.benchmarks.memory import processes
from rlhfspec.benchmarks.memory.bench import table
from rlhfspec.benchmarks.memory.processes import Peak, kind_of, peak_memory
from rlhfspec.benchmarks.support.processes import descendants

MIB = 1 << 20
HOLDS = f"""
import mmap, sys
own, shared = bytearray({64 * MIB}), mmap.mmap(-1, {32 * MIB})
own[:: mmap.PAGESIZE] = b"1" * len(own[:: mmap.PAGESIZE])
shared[:: mmap.PAGESIZE] = b"1" * len(shared[:: mmap.PAGESIZE])
print(flush=True)
sys.stdin.read()
"""


def test_a_process_is_counted_by_what_its_memory_is(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", HOLDS]
    # other tests' Ray may run beside
    others, all_below = {*descendants(os.getpid())}, descendants
    monkeypatch.setattr(processes, "descendants", lambda pid: [*({*all_below(pid)} - others)])
    with (
        peak_memory() as peak,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child,
    ):
        assert child.stdout is not None and child.stdin is not None
        child.stdout.readline()
        # two looks
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(timeout=1.2)
        child.stdin.close()
    (kind,) = peak.kinds
    assert peak.processes == {kind: 1} and peak.bytes == peak.of(kind)
    assert 64 * MIB <= peak.held[kind, "own"] < 96 * MIB and peak.held[kind, "files"] > 0
    assert peak.held[kind, "shared"] == 32 * MIB
    assert peak.resident_bytes >= peak.bytes


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("ray::GenerationActor.poll ", "GenerationActor"),
        ("ray::DashboardAgent", "DashboardAgent"),
        ("/venv/ray/core/src/ray/raylet/raylet --raylet_socket_name=x", "raylet"),
        ("/venv/bin/python -m rlhfspec.cluster.cli train --config a.yaml", "cli"),
        ("/usr/bin/python3.11 -u /venv/ray/dashboard/dashboard.py --host=x", "dashboard"),
        ("", "ended"),
    ],
)
def test_a_process_is_named_by_what_runs_in_it(command: str, kind: str) -> None:
    assert kind_of(command) == kind


def test_a_row_has_means_over_rounds_in_mb() -> None:
    def peak(own: float, shared: float) -> Peak:
        held = Counter({("trainer", "own"): int(own), ("trainer", "shared"): int(shared)})
        return Peak(held, Counter({"trainer": 1}))

    assert table([peak(3e9, 2e8), peak(1e9, 4e8)], [peak(1e9, 0.0)]) == [
        {
            "process": "trainer",
            "number": 1,
            "own": 2000,
            "files": 0,
            "shared": 300,
            "all": 2300,
            "with LoRA": 1000,
        }
    ]
