"""Shared by all tests: no network, one thread, nothing written into the home folder."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import pytest


@pytest.fixture(scope="session", autouse=True)
def _private_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Caches of libraries and of the project itself go to a folder of this test session."""
    home = tmp_path_factory.mktemp("home")
    for name in ("MPLCONFIGDIR", "HF_HOME", "XDG_CACHE_HOME"):
        os.environ[name] = str(home / name.lower())
