"""What a machine is measured for once, before it first generates for another library's trainer: said, and kept."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError, ProfileError
from ..engine.calibration.profiler import MadeProfile, Progress
from ..engine.model.invariance_probe import KeptVerdicts, Verdict
from ..profiles.profile import Profile, load_profile, save_profile
from ..profiles.provenance import Provenance

logger = logging.getLogger(__name__)
SAID_EVERY_S = 5.0


def named_profile(folder: Path, described: Provenance) -> Profile:
    """The profile in a folder; a warning where it is of something else. Raises ProfileError: there is none."""
    profile = load_profile(folder)
    made = profile.provenance
    # any batch and length that it was measured for may serve
    described = replace(described, num_slots=made.num_slots, max_total_tokens=made.max_total_tokens)
    try:
        made.require_match(described, where=str(folder), weights=False)
    except ProfileError as error:
        logger.warning("rollout_func: how much is drafted may not be what pays: %s", error)
    return profile


def kept_profile(
    cache: Path | None, described: Provenance, measure: Callable[[], MadeProfile], budget_s: float
) -> Profile | None:
    """The profile in the cache, else one measured now; None: it cannot be, which is warned of."""
    folder = None if cache is None else cache / "profiles" / described.key
    if folder is not None and (folder / "profile.json").exists():
        try:
            return load_profile(folder)
        except (ProfileError, OSError) as error:
            logger.warning("rollout_func: what was measured before is damaged: %s", error)
    logger.warning("rollout_func: what drafting costs on this machine is measured once: about %d s", budget_s)
    try:
        made = measure()
    except ConfigError as error:
        logger.warning("rollout_func: how much to draft is found by trying (bandit): %s", error)
        return None
    if folder is not None:
        try:
            save_profile(made.profile, folder, made.costs, made.drafts)
        except OSError as error:
            logger.warning("rollout_func: it is not kept for the next start in %s: %s", folder, error)
    return made.profile


def said_now_and_then() -> Progress:
    """Says now and then how far measuring is."""
    said_s = time.monotonic()

    def say(what: str, share: float) -> None:
        nonlocal said_s
        if time.monotonic() - said_s >= SAID_EVERY_S:
            said_s = time.monotonic()
            logger.warning("rollout_func: %s, %d%%", what, 100 * share)

    return say


class NotedVerdicts(KeptVerdicts):
    """Says so where one is missing: finding it takes a while."""

    def read(self, facts: dict[str, Any]) -> Verdict | None:
        """As `KeptVerdicts.read`."""
        verdict = super().read(facts)
        if verdict is None:
            logger.warning(
                "rollout_func: that a response does not depend on its batch is proven once for a model, a machine and "
                "these sizes: up to a minute"
            )
        return verdict
