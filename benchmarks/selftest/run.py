"""Runs all parts, whatever one of them does, and writes the report."""

from __future__ import annotations

import json
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.selftest.parts import bandwidth, distribution, logprobs, speed
from benchmarks.selftest.subject import Subject
from benchmarks.support.result import ROOT, machine_provenance
from rlhfspec.core.errors import RlhfSpecError

TESTS_TIMEOUT_S = 1800


@dataclass(slots=True, kw_only=True)
class PartResult:
    """What one part found."""

    name: str
    state: str
    "passed, failed or skipped"
    figures: dict[str, float] = field(default_factory=dict)
    message: str = ""


def run_parts(subject: Subject, *, dtype: str, quick: bool, say: Callable[[str], None]) -> list[PartResult]:
    """Run every part; one that raises is reported as failed."""
    small: dict[str, Any] = {"new_tokens": 32} if quick else {}
    parts: dict[str, Callable[[], dict[str, float]]] = {
        "log-probabilities beside Hugging Face": lambda: logprobs(subject),
        "distribution of sampled tokens": lambda: distribution(subject, num_samples=1024 if quick else 4096),
        "speed beside Hugging Face": lambda: speed(subject, dtype, rounds=1 if quick else 3, **small),
        "share of the bandwidth bound": lambda: bandwidth(
            subject, dtype, copy_bytes=1 << (26 if quick else 30), **small
        ),
    }
    results = []
    for name, part in parts.items():
        say(name)
        try:
            results.append(PartResult(name=name, state="passed", figures=part()))
        except RlhfSpecError as error:
            results.append(PartResult(name=name, state="failed", message=str(error)))
        except Exception:
            results.append(PartResult(name=name, state="failed", message=traceback.format_exc().strip()))
    return results


def device_tests(*, timeout_s: float = TESTS_TIMEOUT_S, root: Path = ROOT) -> PartResult:
    """Run the tests that need a device, in a process of their own."""
    name = "tests marked gpu"
    if not (root / "tests").is_dir() or find_spec("pytest") is None:
        why = "not run: they come with a checkout of the project and its extra dev (pip install -e '.[dev]')"
        return PartResult(name=name, state="skipped", message=why)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        "-rfE",
        "--tb=short",
        # what other tests import may not be there
        *_files_with_device_tests(root),
    ]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return PartResult(name=name, state="failed", message=f"no end within {timeout_s:g} s")
    output = done.stdout.strip()
    return PartResult(
        name=name,
        state="passed" if done.returncode == 0 else "failed",
        message=output[-6000:] + ("\n" + done.stderr.strip()[-2000:] if done.returncode else ""),
    )


def _files_with_device_tests(root: Path) -> list[str]:
    """Test files of the project that have a test for a device."""
    return [
        str(path.relative_to(root))
        for path in sorted((root / "tests").rglob("test_*.py"))
        if "mark.gpu" in (text := path.read_text()) or "DEVICES" in text
    ]


def write_report(results: list[PartResult], out: Path, *, device: torch.device, what: dict[str, Any]) -> Path:
    """Write OUT/gpu_selftest.json and OUT/report.md; return the second."""
    provenance = machine_provenance() | device_facts(device) | what
    tree = {
        "parts": {one.name: {"state": one.state, "message": one.message} for one in results},
        "figures": {name: value for one in results for name, value in one.figures.items()},
        "provenance": provenance,
    }
    (out / "gpu_selftest.json").write_text(json.dumps(tree, indent=2) + "\n")
    lines = ["# rlhfspec gpu-selftest", "", "| part | state |", "|---|---|"]
    lines += [f"| {one.name} | {one.state} |" for one in results]
    lines += ["", "| figure | value |", "|---|---|"]
    lines += [f"| `{name}` | {value:.4g} |" for one in results for name, value in one.figures.items()]
    lines += ["", "| machine | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in provenance.items()]
    for one in results:
        if one.message:
            lines += ["", f"## {one.name}: {one.state}", "", "```", one.message, "```"]
    report = out / "report.md"
    report.write_text("\n".join(lines) + "\n")
    return report


def device_facts(device: torch.device) -> dict[str, Any]:
    """What a bug's reader asks first."""
    facts: dict[str, Any] = {"device": str(device), "torch_cuda": torch.version.cuda}
    if device.type != "cuda":
        return facts
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return facts | {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gb": round(total / 1e9, 1),
        "free_gb": round(free / 1e9, 1),
        "bfloat16": torch.cuda.is_bf16_supported(),
        "triton": find_spec("triton") is not None,
        "xformers": find_spec("xformers") is not None,
    }
