"""Faults at chosen moments of a run: while a phase goes on beside an update, or just before an update begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlhfspec.cluster.run.update import Update
from rlhfspec.cluster.system.system import System


def before_updates(monkeypatch: pytest.MonkeyPatch, strike: Callable[[System], Any]) -> None:
    """Call `strike` when a batch is whole, before it is learned from."""
    really = Update._begin

    def begin(update: Update) -> None:
        strike(update._system)
        really(update)

    monkeypatch.setattr(Update, "_begin", begin)


def beside_updates(monkeypatch: pytest.MonkeyPatch, look: Callable[[Update, System], Any]) -> None:
    """Call `look` all along the phases that an update is beside."""
    really = Update.look

    def looks(update: Update) -> None:
        really(update)
        look(update, update._system)

    monkeypatch.setattr(Update, "look", looks)
