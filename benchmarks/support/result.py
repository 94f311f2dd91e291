"""Writes a benchmark's figures: `DIR/NAME.json` with figures, intervals and provenance.

Ratios are named `a_over_b` and exceed 1 when `a` is better. Every figure is finite.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ...core.errors import RlhfSpecError
from ...engine.calibration.engine_provenance import device_name

ROOT = Path(__file__).resolve().parents[2]

_PACKAGES = ("torch", "transformers", "ray", "numpy", "tokenizers")


def write_result(
    out: Path,
    name: str,
    figures: Mapping[str, float],
    intervals: Mapping[str, tuple[float, float]] | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> Path:
    """Write OUT/NAME.json and return its path; provenance is merged over what is known here.

    Raises RlhfSpecError when a figure is not finite, naming it.
    """
    for figure, value in figures.items():
        if not math.isfinite(value):
            raise RlhfSpecError(f"benchmark {name}: figure {figure} is {value}; expected a finite number")
    tree = {
        "figures": dict(figures),
        "intervals": {figure: list(interval) for figure, interval in (intervals or {}).items()},
        "provenance": machine_provenance() | dict(provenance or {}),
    }
    path = out / f"{name}.json"
    path.write_text(json.dumps(tree, indent=2) + "\n")
    return path


def machine_provenance() -> dict[str, Any]:
    """Versions, processor, threads, date and the commit that is checked out, if any."""
    return {
        "versions": {package: _version(package) for package in _PACKAGES},
        "python": platform.python_version(),
        "cpu_model": device_name(torch.device("cpu")),
        "num_cores": os.cpu_count(),
        **({"device": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": checked_out_commit(),
    }


def machine_name(provenance: Mapping[str, Any]) -> str:
    """Return the folder of `benchmarks/results/` for results with this provenance, such as `amd-epyc-2c` or `h100`."""
    if "device" in provenance:
        return re.findall(r"[a-z]+\d+\w*", str(provenance["device"]).lower())[0]
    words = re.sub(r"\([^)]*\)|processor|cpu|@.*", " ", str(provenance["cpu_model"]).lower())
    return "-".join([*re.findall(r"[a-z0-9.]+", words), f"{provenance['num_cores']}c"])


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def checked_out_commit() -> str | None:
    """Return the commit of this checkout, with `-dirty` behind it where files differ; None without git."""
    return git("describe", "--always", "--dirty", "--exclude=*")


def git(*arguments: str, root: Path = ROOT) -> str | None:
    """Return what git says of a checkout; None where it fails or is not there."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
