"""How a server that scores is asked: JSON over HTTP with bounded waits, and again where it may answer later."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping
from http.client import HTTPException
from typing import Any, TypeVar
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from ...core.errors import RewardServerLost, one_line
from ...core.settings.reward import RewardServerConfig

T = TypeVar("T")

_TRY_AGAIN = (408, 425, 429, 500, 502, 503, 504)
_LONGEST_BACKOFF_S = 30.0


class Refused(Exception):
    """The server would answer the same again; the message says what."""


class NotNow(Exception):
    """Raised by a reader: the server answers that it could not, for now."""


def ask(
    url: str,
    body: Mapping[str, Any],
    read: Callable[[bytes], T],
    server: RewardServerConfig,
    *,
    called: str,
    headers: Mapping[str, str] = {},
) -> T:
    """What `read` makes of the answer to a POST; `called` names the server in messages.

    Raises Refused, and RewardServerLost where `reward.server.retries` tries are used up.
    """
    fault, headers = "", {"Content-Type": "application/json", **headers}
    for attempt in range(server.retries + 1):
        if attempt:
            wait_s = min(server.backoff_s * 2 ** (attempt - 1), _LONGEST_BACKOFF_S)
            time.sleep(wait_s * random.uniform(0.75, 1.25))
        try:
            with urlopen(
                Request(url, json.dumps(body).encode(), headers), timeout=server.timeout_s
            ) as answer:
                return read(answer.read())
        except HTTPError as error:
            said = one_line(error.read().decode(errors="replace"))
            # JSON says why, at whatever length; a page does not
            fault = f"HTTP {error.code}: {said if said.startswith('{') else said[:200]}"
            if error.code not in _TRY_AGAIN:
                raise Refused(fault) from None
        except (OSError, HTTPException, NotNow) as error:
            fault = one_line(f"{type(error).__name__}: {error}")
    raise RewardServerLost(
        f"{called} at {url} did not answer in {server.retries + 1} tries; the last one: {fault}; start it, or fix "
        "reward.url; reward.server says how often and how long it is asked"
    )
