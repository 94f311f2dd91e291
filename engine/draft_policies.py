"""The draft policy that a config asks for."""

from __future__ import annotations

from ..core.config import SpeculationConfig
from ..core.errors import ConfigError
from ..policies.drafting.baselines import BanditPolicy, FixedPolicy, OffPolicy, WithBrought
from ..policies.drafting.draft_policy import DraftPolicy
from ..policies.drafting.look_up_or_draft import AdaptiveDrafting
from ..profiles.profile import Profile


def build_policy(
    speculation: SpeculationConfig, profile: Profile | None = None, *, takes_drafts: bool = False
) -> DraftPolicy:
    """Return the draft policy a config asks for, over drafts of requests too where they may bring some.

    Raises ConfigError for `goodput` without a profile.
    """
    if speculation.policy == "goodput" and speculation.drafts:
        if profile is None:
            raise ConfigError(
                "speculation.policy goodput needs a profile of this pair on this machine and got none; "
                "set speculation.profile to auto or to a folder that `rlhfspec profile` made"
            )
        return AdaptiveDrafting(
            profile,
            max_nodes=speculation.max_nodes,
            max_depth=speculation.max_depth,
            computes=not speculation.looks_up,
            looks_up=takes_drafts or "suffix" in (speculation.drafter, speculation.look_up),
        )
    policy = _without_profile(speculation)
    return WithBrought(policy, most=_longest_brought(speculation)) if takes_drafts else policy


def _without_profile(speculation: SpeculationConfig) -> DraftPolicy:
    if not speculation.drafts:
        return OffPolicy()
    if speculation.policy == "fixed":
        return FixedPolicy(
            num_nodes=speculation.num_nodes, depth=speculation.depth, branching=speculation.branching
        )
    return BanditPolicy(max_nodes=speculation.max_nodes, max_depth=speculation.max_depth, seed=0)


def _longest_brought(speculation: SpeculationConfig) -> int:
    return min(speculation.max_nodes, speculation.max_depth)


def most_nodes(speculation: SpeculationConfig, *, takes_drafts: bool = False) -> int:
    """Return the most draft nodes per sample that a config's policy verifies: what the KV pool reserves."""
    most = _longest_brought(speculation) if takes_drafts else 0
    if speculation.drafts and speculation.policy in ("goodput", "bandit"):
        return speculation.max_nodes
    return max(_without_profile(speculation).max_nodes, most)
