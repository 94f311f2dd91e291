"""Ray's own processes on a busy machine."""

from __future__ import annotations

from typing import Any

import ray

SLOW_START = "timed out during startup"
"What Ray says when its own processes did not come up within 30 s, whatever the load."


def start_twice(**settings: Any) -> Any:
    """Call `ray.init`, once more where Ray did not come up in time. Raises as it does."""
    try:
        return ray.init(**settings)
    except Exception as error:
        if SLOW_START not in str(error):
            raise
    ray.shutdown()
    return ray.init(**settings)
