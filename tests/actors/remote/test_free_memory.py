"""What was freed between what lasts goes back to the system."""

from pathlib import Path

import pytest

from rlhfspec.actors.remote import process_metrics
from rlhfspec.actors.remote.process_metrics import give_back_free_memory
from rlhfspec.core.proc_files import PROC, sizes

MIB = 2**20


def anonymous_bytes() -> int:
    return sizes(PROC / "self" / "smaps_rollup")["Anonymous"]


@pytest.mark.skipif(
    process_metrics._malloc_trim is None or not Path("/proc/self/smaps_rollup").is_file(),
    reason="glibc on Linux only",
)
def test_memory_freed_between_what_lasts_is_given_back() -> None:
    # above 512 bytes an object is the C library's
    made = [bytes(1000) for _ in range(60_000)]
    lasting = made[::300]
    full = anonymous_bytes()
    del made
    give_back_free_memory()
    assert full - anonymous_bytes() > 40 * MIB
    assert len(lasting) == 200


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_metrics, "_malloc_trim", None)
    give_back_free_memory()
