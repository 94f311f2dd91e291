"""Shared by all tests: no network, one thread, nothing written into the home folder."""

import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
# as cluster.ray_start.quiet has it: a thread that waits for its team leaves the core to another test
os.environ.setdefault("GOMP_SPINCOUNT", "3000")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "120")

import pytest

from tests.helpers import seconds_of_tests, shape_checks

# before a conftest.py below imports what is checked
shape_checks.take_short_ways()


def pytest_addoption(parser: pytest.Parser) -> None:
    seconds_of_tests.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    seconds_of_tests.register(config)


@pytest.fixture(scope="session", autouse=True)
def _private_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Caches of libraries and of the project itself go to a folder of this test session."""
    home = tmp_path_factory.mktemp("home")
    for name in ("MPLCONFIGDIR", "HF_HOME", "XDG_CACHE_HOME"):
        os.environ[name] = str(home / name.lower())


@pytest.fixture(autouse=True)
def _no_user_folders_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders that a test's user code was imported from are forgotten with the test."""
    from rlhfspec.core import named_code

    monkeypatch.setattr(named_code, "_folders", [])
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture(scope="module", autouse=True)
def _shapes_are_checked_where_they_are_made(request: pytest.FixtureRequest) -> Iterator[None]:
    """Shape checks take half the time of a decode step: tests of what only uses the engine go without."""
    from jaxtyping import config

    folder = request.path.relative_to(Path(__file__).parent).parts[0]
    config.update("jaxtyping_disable", folder not in ("engine", "learning"))
    yield
    config.update("jaxtyping_disable", False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Proofs of minutes run where they are asked for; the longest files come first."""
    seconds_of_tests.longest_first(items)
    if not os.environ.get("RLHFSPEC_LONG_PROOFS"):
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="minutes: set RLHFSPEC_LONG_PROOFS"))


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name a long value by its length: pytest hands a test's name on in the environment, which has a limit."""
    return f"{type(val).__name__} of {len(val)}" if isinstance(val, str | bytes) and len(val) > 120 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyPair:
    """Folders of a random target and draft model with one character tokenizer; 128 positions."""

    target: Path
    draft: Path


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    """A pair that loads in milliseconds; its weights are random and the same in every session."""
    from random_pair import save_random_pair

    from rlhfspec.learning.models.tokenization import character_tokenizer
    from rlhfspec.learning.tasks.chain_task import ALPHABET

    folder = tmp_path_factory.mktemp("tiny_pair")
    tokenizer = character_tokenizer(ALPHABET)
    save_random_pair(folder, tokenizer, positions=128)
    return TinyPair(target=folder / "target", draft=folder / "draft")


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """One local Ray for the whole test session, ended with it; four CPUs on paper."""
    import ray

    from rlhfspec.cluster.folder.leftovers import remove_with_processes
    from rlhfspec.cluster.ray_start.forked_workers import begin_forking
    from rlhfspec.cluster.ray_start.ray_init import PATIENCE, start_twice

    root = Path(__file__).resolve().parents[1]
    os.environ.update(PATIENCE, PYTHONPATH=os.pathsep.join([str(root), str(root / "tests" / "helpers")]))
    folder = Path(tempfile.mkdtemp(prefix="rlhfspec-test-"))
    # the class of an actor that a test used in its own process has asked Ray for a context, which starts one
    ray.shutdown()
    start_twice(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=200 << 20,
        folder=folder,
        log_to_driver=False,
    )
    begin_forking()
    yield
    ray.shutdown()
    remove_with_processes(folder)
