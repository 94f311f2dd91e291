"""Actors that live in the tests' own process."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from rlhfspec.actors.remote import actor_start


@pytest.fixture(scope="session", autouse=True)
def _heap_is_not_set_aside() -> Iterator[None]:
    """An actor collects its process's heap once; here that is the heap of all tests, a second for every actor."""
    nothing = SimpleNamespace(collect=lambda: None, freeze=lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(actor_start, "gc", nothing)
        yield
