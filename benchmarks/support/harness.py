"""One benchmark's run: of which size, on which prompts, its console, figures, rows, result."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from ...cluster.observe.console import PipeConsole
from .result import write_result
from .timing import Figures


class Bench:
    """What a benchmark's `run(bench) -> exit code` is given, and what it keeps."""

    def __init__(
        self,
        name: str,
        *,
        out: Path,
        mode: str = "default",
        data: Path | None = None,
        is_real: bool = False,
        minutes: float | None = None,
    ) -> None:
        """Begin, on one thread.

        Args:
            name: of the benchmark. Its result is OUT/NAME.json, and OUT/NAME.parquet where there are rows; of the
                real model OUT/NAME_real.json.
            out: a folder; it is made where it is missing.
            mode: `quick`, `default` or `full`.
            data: real prompts, for benchmarks that use any.
            is_real: SmolLM2-135M-Instruct instead of a made model, for benchmarks that can.
            minutes: in place of the mode's, for benchmarks that watch.
        """
        torch.set_num_threads(1)
        self.name = f"{name}_real" if is_real else name
        self.out, self.mode, self.data, self.is_real = out.absolute(), mode, data, is_real
        self._minutes = minutes
        self.out.mkdir(parents=True, exist_ok=True)
        self._began_s = time.monotonic()
        self.console, self.figures, self.rows = PipeConsole(), Figures(), list[dict[str, Any]]()

    @property
    def is_quick(self) -> bool:
        """Whether it is to take a few minutes at most."""
        return self.mode == "quick"

    @property
    def is_full(self) -> bool:
        """Whether it may take hours."""
        return self.mode == "full"

    def minutes(self, usual: Mapping[str, float]) -> float:
        """How long to watch: as asked for, else the mode's."""
        return usual[self.mode] if self._minutes is None else self._minutes

    def write(self, **provenance: Any) -> Path:
        """Write what is known by now; one that is broken off keeps what it has. Raises RlhfSpecError."""
        if self.rows:
            pq.write_table(pa.Table.from_pylist(self.rows), self.out / f"{self.name}.parquet")
        known = {
            "mode": self.mode,
            "num_threads": 1,
            "data": self.data.name if self.data else None,
            "seconds": round(time.monotonic() - self._began_s),
        }
        path = write_result(
            self.out, self.name, self.figures.values, self.figures.intervals, known | provenance
        )
        self.console.print(self.figures.values, markup=False)
        return path
