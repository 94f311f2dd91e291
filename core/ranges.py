"""What sampling parameters may be, for the config and for the API."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from .errors import ConfigError

LEAST_TEMPERATURE = 1e-5
"Below it logits over T overflow; 0 is meant."
LARGEST_TEMPERATURE = 1e30
"Every token is as likely as any other long before; float32 holds it."


def require_sampling_ranges(
    temperature: Any, top_k: Any, top_p: Any, min_p: Any, max_new_tokens: Any, stop_token_ids: Any, stop: Any
) -> None:
    """Raise ConfigError for the first that is not a number of its kind within its range."""
    number = (int, float, np.integer, np.floating)
    warm = f"a number from {LEAST_TEMPERATURE} to {LARGEST_TEMPERATURE}"
    is_greedy = isinstance(temperature, number) and temperature == 0
    is_warm = isinstance(temperature, number) and LEAST_TEMPERATURE <= temperature <= LARGEST_TEMPERATURE
    _require("temperature", temperature, f"0 (greedy) or {warm}", is_greedy or is_warm)
    _require("top_k", top_k, "an integer of at least 0, of 63 bits", _is_whole(top_k, 0) and top_k < 2**63)
    _require("top_p", top_p, "a number above 0 and at most 1", isinstance(top_p, number) and 0 < top_p <= 1)
    _require("min_p", min_p, "a number from 0 to 1", isinstance(min_p, number) and 0 <= min_p <= 1)
    _require("max_new_tokens", max_new_tokens, "an integer of at least 1", _is_whole(max_new_tokens, 1))
    are_ids = isinstance(stop_token_ids, Iterable) and all(_is_whole(token, 0) for token in stop_token_ids)
    _require("stop_token_ids", stop_token_ids, "token ids of at least 0", are_ids)
    are_texts = isinstance(stop, Iterable) and all(isinstance(text, str) and text for text in stop)
    _require("stop", stop, "texts of at least one character", are_texts)


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= least)


def _require(name: str, value: object, expected: str, holds: object) -> None:
    if not holds or isinstance(value, bool):
        raise ConfigError(f"sampling.{name} must be {expected}, got {value!r}")
