"""A process that uses a folder: for tests of what ends such processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def user_of(folder: Path) -> Iterator[subprocess.Popen]:
    """A process that works in a folder and does not end by itself."""
    folder.mkdir(exist_ok=True)
    child = subprocess.Popen([sys.executable, "-c", "input()"], cwd=folder, stdin=subprocess.PIPE)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()
