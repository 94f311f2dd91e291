"""A profile: the fitted models of one pair on one machine, with provenance; a folder on disk.

profile.json      models, curves, provenance, quality; all that a run reads
costs.parquet     the measured decode steps
drafts.parquet    the recorded drafts
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..core.errors import ProfileError
from .acceptance import AcceptanceModel
from .cost import CostModel, CostTable, Shape
from .provenance import Provenance
from .recording import DraftRecording

SCHEMA_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class YieldCurve:
    """Mean accepted nodes among the n best candidates of a draft of this shape, n = 0, 1, ..; one sample, one step."""

    branching: int
    width: int
    levels: int
    curve: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What the goodput policy knows before its first decode step."""

    provenance: Provenance
    cost: CostModel
    acceptance: AcceptanceModel
    yields: tuple[YieldCurve, ...]
    "the longest chain first, then trees of several depths"
    max_samples: int
    "largest batch measured"
    quality: dict[str, float] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION


def save_profile(
    profile: Profile, folder: Path, costs: CostTable | None = None, drafts: list[DraftRecording] | None = None
) -> None:
    """Write the profile; profile.json last and at once, so that a folder is whole or not a profile."""
    folder.mkdir(parents=True, exist_ok=True)
    if costs is not None:
        shape = {name: np.asarray(getattr(costs.shape, name)) for name in costs.shape.__dataclass_fields__}
        seconds = {name: getattr(costs, name) for name in ("draft_s", "verify_s", "rest_s")}
        pq.write_table(pa.table(shape | seconds), folder / "costs.parquet")
    if drafts:
        pq.write_table(pa.concat_tables([_draft_table(draft) for draft in drafts]), folder / "drafts.parquet")
    with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".json", delete=False) as file:
        json.dump(asdict(profile), file, indent=2)
        # as any other file there: this one would be for its writer alone
        os.fchmod(file.fileno(), 0o644)
    os.replace(file.name, folder / "profile.json")


def load_profile(folder: Path) -> Profile:
    """Read a profile. Raises ProfileError when there is none or it cannot be read."""
    path = folder / "profile.json"
    if not path.is_file():
        raise ProfileError(
            f"no profile at {folder}: profile.json is missing; make one with `rlhfspec profile --out {folder}`"
        )
    try:
        return profile_from_tree(json.loads(path.read_text()))
    except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ProfileError(f"{path} is not a profile this version can read: {error}; make it anew") from error


def profile_from_tree(tree: dict[str, Any]) -> Profile:
    """Return the profile that `asdict` took apart. Raises ValueError for another version, KeyError, TypeError."""
    if tree["schema_version"] != SCHEMA_VERSION:
        raise ValueError(f"schema_version {tree['schema_version']}, expected {SCHEMA_VERSION}")
    profile = Profile(
        provenance=Provenance(**tree["provenance"]),
        cost=CostModel(**{name: tuple(values) for name, values in tree["cost"].items()}),
        acceptance=AcceptanceModel(**{name: tuple(values) for name, values in tree["acceptance"].items()}),
        yields=tuple(YieldCurve(**curve | {"curve": tuple(curve["curve"])}) for curve in tree["yields"]),
        max_samples=tree["max_samples"],
        quality=tree["quality"],
    )
    _require_numbers(profile)
    return profile


def _require_numbers(profile: Profile) -> None:
    cost, one = profile.cost, Shape(**dict.fromkeys(Shape.__dataclass_fields__, 1.0))
    # another number of coefficients is an error of each of these
    for call in (cost.draft_s, cost.rest_s):
        call(one)
    profile.acceptance.coefficients(np.ones(1), np.ones(1))
    costs = [*cost.draft, *cost.verify, *cost.rest, *sum((each.curve for each in profile.yields), ())]
    every = [*costs, *profile.acceptance.first, *profile.acceptance.other]
    if min(costs) < 0 or profile.max_samples < 1 or not (np.isfinite(every).all() and cost.verify_s(one) > 0):
        raise ValueError("a cost, a yield or max_samples is negative, or a number is not finite")


def _draft_table(draft: DraftRecording) -> pa.Table:
    """One row a candidate."""
    drafts, candidates = draft.margin.shape
    number = np.arange(drafts * candidates)
    return pa.table(
        {
            "branching": np.full(len(number), draft.branching),
            "width": np.full(len(number), draft.width),
            "draft": number // candidates,
            "sample": np.repeat(draft.sample, candidates),
            "level": np.tile(draft.level, drafts),
            "rank": np.tile(draft.rank, drafts),
            "parent": draft.parent.ravel(),
            "margin": draft.margin.ravel(),
            "logprob": draft.logprob.ravel(),
            "accepted": draft.accepted.ravel(),
        }
    )
