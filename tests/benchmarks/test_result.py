"""The result file of a benchmark: figures, intervals, provenance; nothing that is not finite."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhfspec.benchmarks.support.result import write_result
from rlhfspec.core.errors import RlhfSpecError


def test_the_file_holds_figures_intervals_and_where_they_come_from(tmp_path: Path) -> None:
    path = write_result(tmp_path, "speed", {"a_over_b": 1.5}, {"a_over_b": (1.4, 1.6)}, {"seed": 3})
    tree = json.loads(path.read_text())
    assert path == tmp_path / "speed.json"
    assert tree["figures"] == {"a_over_b": 1.5}
    assert tree["intervals"] == {"a_over_b": [1.4, 1.6]}
    assert tree["provenance"]["seed"] == 3
    assert {"versions", "cpu_model", "num_cores", "date", "commit"} <= set(tree["provenance"])


def test_a_figure_that_is_not_finite_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RlhfSpecError, match="figure a_over_b is nan"):
        write_result(tmp_path, "speed", {"a_over_b": float("nan")})
    assert not list(tmp_path.iterdir())
