"""What tests take: seconds of a processor for the limit of a quick one, seconds of the clock for the order of files.

Files that `tests/durations.json` says take long are begun first, so that no process is left alone with one at the end;
`make durations` writes that file anew. Those of Ray, whose tests wait most of their time, and those of others, which
compute, are spread over the whole run: of two processes one then waits while the other computes.
"""

from __future__ import annotations

import json
import resource
import time
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from itertools import compress
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[1] / "durations.json"
QUICK_S = 2.0
"Of a processor, in a test that is neither `ray` nor `slow`; a busy machine changes little of it."
SLOWER = FILE.with_name("quick_limits.json")
"By file and function, tests that were above it when it was set, and their seconds: an entry may only fall or go."
_IMPORTED = (
    "transformers.models.llama.modeling_llama",
    "pyarrow.parquet",
    "ray",
    "peft",
)
"What tests import late: the first of them would pay for all."


def add_options(parser: pytest.Parser) -> None:
    """Name what `make` asks for."""
    parser.addoption(
        "--limit-quick", action="store_true", help=f"a quick test above {QUICK_S:g} s of CPU fails"
    )
    parser.addoption(
        "--keep-durations", action="store_true", help=f"write what each file took to {FILE.name}"
    )


def register(config: pytest.Config) -> None:
    """Do what the command line asks for."""
    if config.getoption("limit_quick"):
        config.pluginmanager.register(QuickLimit())
    # of the processes of a run the one that gathers the reports of all
    if config.getoption("keep_durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(KeptDurations())


def longest_first(items: list[pytest.Item]) -> None:
    """Order files as above; tests of one file stay as they stand in it."""
    took: dict[str, float] = json.loads(FILE.read_text())
    with_ray = {_file(item) for item in items if item.get_closest_marker("ray")}
    files = sorted({_file(item) for item in items}, key=lambda file: (-took.get(file, 0.0), file))
    begins: dict[str, float] = {}
    for kind in ([file in with_ray for file in files], [file not in with_ray for file in files]):
        own = list(compress(files, kind))
        all_s, before_s = sum(took.get(file, 0.0) for file in own) or 1.0, 0.0
        for file in own:
            begins[file] = before_s / all_s
            before_s += took.get(file, 0.0)
    items.sort(key=lambda item: begins[_file(item)])


def _file(item: pytest.Item) -> str:
    return item.path.relative_to(FILE.parents[1]).as_posix()


def _cpu_s() -> float:
    """Of this process and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


class QuickLimit:
    """Fails a quick test that computes for too long."""

    def __init__(self) -> None:
        self._slower: dict[str, dict[str, float]] = json.loads(SLOWER.read_text())
        for name in _IMPORTED:
            import_module(name)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        began_s = _cpu_s()
        yield
        took_s, (file, _, name) = _cpu_s() - began_s, item.nodeid.partition("::")
        limit_s = self._slower.get(file, {}).get(name.partition("[")[0], QUICK_S)
        is_quick = not item.get_closest_marker("ray") and not item.get_closest_marker("slow")
        if is_quick and took_s > limit_s:
            pytest.fail(
                f"{took_s:.1f} s of a processor, expected at most {limit_s:g}; make it smaller or mark it slow"
            )


class KeptDurations:
    """Writes what each file took, its fixtures with it."""

    def __init__(self) -> None:
        self._took: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._took[report.nodeid.split("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        took = {name: round(seconds, 1) for name, seconds in self._took.most_common() if seconds >= 0.5}
        FILE.write_text(json.dumps(took, indent=0) + "\n")
