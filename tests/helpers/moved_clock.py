"""Another day for whatever reads the wall clock for a run's prompts."""

from datetime import datetime, timedelta
from typing import Any

import pytest

from rlhfspec.cluster.folder import run_time
from rlhfspec.learning.data.chat import template_time


def move_clock(monkeypatch: pytest.MonkeyPatch, **by: Any) -> None:
    """Move it on by a `timedelta` of these arguments, for this test."""

    class Moved(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + timedelta(**by)

    for module in (template_time, run_time):
        monkeypatch.setattr(module, "datetime", Moved)
