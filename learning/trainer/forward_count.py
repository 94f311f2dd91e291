"""How far the learning of this process has got, for those who wait for it: the number of forwards it has made."""

from __future__ import annotations

_num_forwards = 0


def note_forward() -> None:
    """One more was made."""
    global _num_forwards
    _num_forwards += 1


def forwards_made() -> int:
    """So far, of all models; from any thread."""
    return _num_forwards
