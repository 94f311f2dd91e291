"""Reallocation policies by name."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.errors import ConfigError
from .finish_time_policy import FinishTimePolicy
from .gate import Gate
from .paper_rule import PaperRule
from .pool_records import ReallocationPolicy
from .rate_curve import RateCurve

REALLOCATION_POLICIES = ("static", "pull", "paper_rule", "finish_time")


def make_reallocation_policy(
    name: str,
    *,
    curve: RateCurve,
    gate: Gate,
    earlier_lengths: Sequence[int] = (),
) -> ReallocationPolicy | None:
    """Make the policy with this name; None of `static` and `pull`, which move nothing.

    Args:
        name: one of REALLOCATION_POLICIES.
        curve: what an instance delivers over its number of samples; finish_time corrects it.
        gate: migrate or recompute; learns from what moves take.
        earlier_lengths: finish_time: response lengths of an earlier iteration.

    Raises ConfigError for an unknown name.
    """
    match name:
        case "static" | "pull":
            return None
        case "paper_rule":
            return PaperRule(curve, gate)
        case "finish_time":
            return FinishTimePolicy(curve, gate, earlier_lengths=earlier_lengths)
    raise ConfigError(f"no reallocation policy '{name}'; expected one of: {', '.join(REALLOCATION_POLICIES)}")
