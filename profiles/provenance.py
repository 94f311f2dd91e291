"""What a profile was measured with, and the refusal of one that does not match what runs."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields

from ..core.errors import ProfileError

_NOT_COMPARED = ("date", "versions")


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Names everything that costs or acceptance depend on."""

    device: str
    "processor or GPU model"
    num_threads: int
    dtype: str
    numerics: str
    target_model: str
    "architecture and size"
    draft_model: str
    target_weights: str
    "checksum; costs do not depend on it, acceptance does"
    draft_weights: str
    sampling: str
    "temperature, top-k, top-p"
    num_slots: int
    "largest batch"
    max_total_tokens: int
    "longest sample"
    torch_version: str
    kv_cache: str = "full lengths"
    "limit of the caches; batches that have no room were not measured"
    num_ranks: int = 1
    "of an instance"
    engine_code: str = ""
    "revision of the code whose costs were measured; profiles from before it was kept have none"
    versions: str
    "of the other packages; recorded, not compared"
    date: str
    "recorded, not compared"

    @property
    def key(self) -> str:
        """A name for everything that is compared: equal keys match."""
        compared = {field.name: getattr(self, field.name) for field in fields(self)}
        text = json.dumps({name: compared[name] for name in sorted(compared) if name not in _NOT_COMPARED})
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def require_match(self, running: Provenance, *, where: str, weights: bool = True) -> None:
        """Compare with what runs.

        Args:
            running: the present.
            where: what the profile is called in the message.
            weights: False where the models have been trained on since: costs stay, acceptance is corrected online.

        Raises:
            ProfileError: something differs, all of it named.
        """
        # where drafts are looked up both are 'none', and nothing that was measured depends on weights
        weights = weights and running.draft_weights != running.draft_model
        ignored = _NOT_COMPARED if weights else (*_NOT_COMPARED, "target_weights", "draft_weights")
        differs = [
            f"{field.name} is '{getattr(running, field.name)}', measured with '{getattr(self, field.name)}'"
            for field in fields(self)
            if field.name not in ignored and getattr(running, field.name) != getattr(self, field.name)
        ]
        if differs:
            raise ProfileError(
                f"{where} does not describe this run: {'; '.join(differs)}; make one with `rlhfspec profile`, "
                "or set speculation.profile=auto"
            )
