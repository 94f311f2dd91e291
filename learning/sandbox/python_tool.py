"""A tool for models: Python in a sandbox (`environment.tools: rlhfspec.learning.sandbox.python_tool:python`)."""

from __future__ import annotations

from functools import cache

from .sandbox import Sandbox

MAX_CHARS = 4000
"Of an answer; of what is longer the middle is left out."


def python(code: str) -> str:
    """
    Runs a Python program and returns what it prints. Every call starts anew, without files or network.

    Args:
        code: The program. What it shall answer must be printed.

    Returns:
        What it printed, and the last line of its error if it failed.
    """
    outcome = _sandbox().run(code)
    lines = [outcome.stdout.rstrip()]
    if outcome.fault == "error":
        lines.append(outcome.stderr.rstrip().rpartition("\n")[2] or f"exit code {outcome.code}")
    elif outcome.fault:
        lines.append(_SAID[outcome.fault])
    text = "\n".join(line for line in lines if line) or "(nothing was printed)"
    if len(text) <= MAX_CHARS:
        return text
    return (
        f"{text[: MAX_CHARS // 2]}\n[{len(text) - MAX_CHARS} characters left out]\n{text[-MAX_CHARS // 2 :]}"
    )


_SAID = {
    "timeout": "TimeoutError: the program was ended, as it took too long",
    "memory": "MemoryError",
    "output": "[the program was ended, as it printed too much]",
}


@cache
def _sandbox() -> Sandbox:
    """Of this process."""
    return Sandbox()
