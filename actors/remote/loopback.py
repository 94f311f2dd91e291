"""Servers on this machine's loopback are asked directly, whatever proxy the environment names for the rest."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1", "127.0.0.0/8")
"""As HTTP clients take them.

Not `[::1]`: httpx up to 0.28, and so OpenAI's client, raises InvalidURL at it in whatever form. urllib alone wants that
form, so it asks `http://[::1]` through the proxy; `127.0.0.1` and `localhost` are asked directly by all.
"""
_VARIABLES = ("no_proxy", "NO_PROXY")


def spare_loopback(environment: MutableMapping[str, str] = os.environ) -> None:
    """Add the loopback's names to `no_proxy` and `NO_PROXY`, for this process and all that it starts.

    A proxy answers for its own loopback, not for this machine's. What stands there already stays.
    """
    given = [
        name.strip()
        for variable in _VARIABLES
        for name in environment.get(variable, "").split(",")
        if name.strip()
    ]
    # clients differ in which of the two they read
    names = ",".join(dict.fromkeys([*given, *LOOPBACK_NAMES])) if "*" not in given else "*"
    for variable in _VARIABLES:
        environment[variable] = names
