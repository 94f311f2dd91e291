"""The order of test files, and the seconds that a quick test may take."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers import seconds_of_tests

ROOT = Path(__file__).resolve().parents[1]


def test_the_longest_files_come_first_those_of_ray_among_the_others_and_their_tests_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "tests" / "durations.json"
    file.parent.mkdir()
    took = {"b": 30.0, "c": 2.0, "ray_1": 60.0, "ray_2": 40.0}
    file.write_text(json.dumps({f"tests/{name}.py": seconds for name, seconds in took.items()}))
    monkeypatch.setattr(seconds_of_tests, "FILE", file)

    def item(name: str) -> SimpleNamespace:
        path = tmp_path / "tests" / f"{name.partition('-')[0]}.py"
        return SimpleNamespace(
            path=path, name=name, get_closest_marker=lambda mark: name.startswith(mark) or None
        )

    items = [item(name) for name in ("a", "c", "b-2", "b-1", "ray_2", "ray_1")]
    seconds_of_tests.longest_first(items)  # type: ignore[arg-type]
    assert [one.name for one in items] == ["b-2", "b-1", "ray_1", "ray_2", "c", "a"]


def test_who_may_take_longer_is_there_and_is_above_the_limit() -> None:
    timed = json.loads((ROOT / "tests" / "durations.json").read_text())
    assert [file for file in timed if not (ROOT / file).is_file()] == []
    for file, limits in json.loads(seconds_of_tests.SLOWER.read_text()).items():
        tree = ast.parse((ROOT / file).read_text())
        there = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert set(limits) <= there, file
        assert all(seconds > seconds_of_tests.QUICK_S for seconds in limits.values())


PASSES_AND_COMPUTES = """
import time

def test_idle():
    time.sleep(0.2)

def test_busy():
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass
"""


def test_a_quick_test_that_computes_for_too_long_fails_and_one_that_waits_does_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(seconds_of_tests, "QUICK_S", 0.1)
    (tmp_path / "test_two.py").write_text(PASSES_AND_COMPUTES)
    ended: dict[str, str] = {}
    watch = SimpleNamespace(
        pytest_runtest_logreport=lambda report: (
            ended.update({report.nodeid: report.outcome}) if report.when == "call" else None
        )
    )
    arguments = [str(tmp_path), "-c", "/dev/null", f"--rootdir={tmp_path}", "-p", "no:cacheprovider", "-q"]
    pytest.main(arguments, plugins=[seconds_of_tests.QuickLimit(), watch])
    assert {name.partition("::")[2]: how for name, how in ended.items()} == {
        "test_idle": "passed",
        "test_busy": "failed",
    }
