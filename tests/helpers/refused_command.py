"""A command that must fail on bad input."""

from __future__ import annotations

import pytest

from rlhfspec.cluster.cli import main


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """Run it; its one error message."""
    assert main([str(arg) for arg in argv]) == 2
    error = capsys.readouterr().err
    assert error.count("error: ") == 1 and error.startswith("error: ") and "Traceback" not in error
    return error
