"""Operations over raw addresses touch nothing beside their buffers, whatever the shapes, and follow their formulas."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.forked_script import as_main, output_of

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("seed", [1, 2])
def test_no_operation_touches_a_byte_beside_its_buffers(seed: int) -> None:
    """In a process of its own: the pages beside the buffers may not be touched, and one that does so ends."""
    said = output_of(as_main("tests.helpers.guarded_operations"), seed)
    assert said.split() == ["ran", "26", "missing"]


def test_the_guard_ends_a_process_that_reads_one_value_too_many() -> None:
    script = (
        "import ctypes, numpy as np\n"
        "from tests.helpers.guarded import guarded\n"
        "held = guarded(np.ones(5, np.float32), at_end=True)\n"
        "ctypes.string_at(held.ctypes.data, 20)\n"
        "print('inside', flush=True)\n"
        "ctypes.string_at(held.ctypes.data, 21)\n"
        "print('beside', flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["inside"] and done.returncode < 0
