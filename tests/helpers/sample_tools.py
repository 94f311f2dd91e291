"""Tools for tests, as users write theirs."""

import asyncio
import sys
import time
from typing import Literal

__all__ = ["add"]


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


async def wait(unit: Literal["s", "ms"], also: list[int] | None = None) -> dict:
    """Wait.

    Args:
        unit: of time
        also: numbers
    """
    await asyncio.sleep(0)
    return {"unit": unit, "also": also}


def hang(text: str) -> str:
    """Never answer.

    Args:
        text: any
    """
    time.sleep(3600)
    return text


def leave() -> str:
    """Leave the process."""
    sys.exit("bye\nand more")


def _private(a: int) -> int:
    return a
