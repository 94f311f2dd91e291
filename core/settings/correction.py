"""What the loss does about samples of another policy than the one that learns: older weights, or other rounding.

A kind is a row of `CORRECTIONS`: choices of parts that stand for themselves. Whatever a config says beside `kind`
replaces that part of the row. docs/reference/algorithms.md shows the table with its sources and other projects' names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from .section import Section

CorrectionKind = Literal["none", "tis", "sequence_tis", "icepop", "mis", "geometric", "decoupled"]

CORRECTIONS: Mapping[str, Mapping[str, object]] = {
    "none": {},
    "tis": {"weight": "token"},
    "sequence_tis": {"weight": "sequence"},
    "icepop": {"weight": "token", "weight_cap": None, "mask": "token", "mask_low": 0.5, "mask_high": 5.0},
    "mis": {"weight": "sequence", "weight_cap": None, "mask": "sequence"},
    "geometric": {"mask": "geometric", "mask_high": 1.01},
    "decoupled": {"weight": "token", "weight_cap": 5.0},
}
"What each `algorithm.correction.kind` sets; what a row leaves out has the default below."


class CorrectionConfig(Section):
    """A row of `CORRECTIONS`, and the parts of it that are chosen otherwise."""

    kind: CorrectionKind | None = None
    "null: nothing is corrected, and rollout.max_staleness above 0 is refused; none: the same, and it is taken"
    old_logprobs: Literal["auto", "sampler", "trainer"] = "auto"
    "what ratios are over: the sampler's log-probabilities, or those of one more forward of the trainer before its "
    "first step (the proximal policy); auto: the trainer's where tokens are promised without every bit (CUDA, several "
    "threads), and with max_staleness above 0 where there are weights or masks"
    weight: Literal["none", "token", "sequence"] = "none"
    "the policy loss is weighed by trainer over sampler, of each token or of the whole response"
    weight_cap: float | None = Field(default=2.0, ge=1.0)
    "a larger weight counts as this; null: no weight is cut"
    mask: Literal["none", "token", "sequence", "geometric"] = "none"
    "tokens, or responses, whose trainer over sampler lies outside the band are no part of the policy loss; geometric: "
    "responses by the mean ratio of a token"
    mask_low: float | None = Field(default=None, ge=0.0)
    "null: 1 / mask_high"
    mask_high: float = Field(default=2.0, gt=1.0)

    @property
    def compares(self) -> bool:
        """Whether the trainer's log-probabilities are compared with the sampler's: there are weights or masks."""
        return self.weight != "none" or self.mask != "none"

    @property
    def band(self) -> tuple[float, float]:
        """Ratios that a mask keeps, both ends included."""
        return (1.0 / self.mask_high if self.mask_low is None else self.mask_low), self.mask_high

    def recomputes_old(self, *, is_exact: bool, max_staleness: int) -> bool:
        """Whether ratios are over the trainer's own log-probabilities.

        `is_exact`: the sampler's are the trainer's, to the bit or nearly, where both have the same weights.
        """
        if self.old_logprobs != "auto":
            return self.old_logprobs == "trainer"
        return self.compares if max_staleness > 0 else not is_exact

    @model_validator(mode="before")
    @classmethod
    def _row(cls, given: Any) -> Any:
        """Fill in the correction's row; a kind that is none is refused where fields are checked.

        A word alone is a kind, and null no correction was asked for.
        """
        if given is None or isinstance(given, str):
            given = {} if given is None else {"kind": given}
        if not isinstance(given, dict):
            return given
        kind = given.get("kind")
        return {**CORRECTIONS.get(kind if isinstance(kind, str) else "", {}), **given}

    @model_validator(mode="after")
    def _parts(self) -> CorrectionConfig:
        if self.kind == "none" and self.compares:
            raise ValueError(
                f"kind none corrects nothing, and {self.title} does; leave kind out, or weight and mask"
            )
        if self.kind not in (None, "none", "decoupled") and not self.compares:
            raise ValueError(
                f"kind {self.kind} with weight none and mask none corrects nothing; leave weight and mask out, or take "
                "kind none"
            )
        if self.compares and self.old_logprobs == "sampler":
            raise ValueError(
                f"{self.title} compares the trainer's log-probabilities with the sampler's, and old_logprobs sampler "
                "computes none of the trainer's: every weight would be 1; set old_logprobs auto or trainer, or kind "
                "none"
            )
        for name in ("mask_low", "mask_high"):
            if self.mask == "none" and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} {getattr(self, name)} is of a mask, and mask is none; take token, sequence or geometric, "
                    f"or leave {name} out"
                )
        if self.mask != "none" and not self.band[0] < 1.0:
            raise ValueError(
                f"mask {self.mask} keeps ratios from {self.band[0]} to {self.band[1]}, and that of a token on which "
                "trainer and sampler agree is 1: it would be masked; take a mask_low below 1"
            )
        return self

    @property
    def title(self) -> str:
        """What it is called in messages: its kind, or its parts."""
        if self.kind is not None and self.kind != "none":
            return f"kind {self.kind}"
        return f"weight {self.weight}" if self.mask == "none" else f"weight {self.weight}, mask {self.mask}"


def require_level(correction: CorrectionConfig, ratio_level: str) -> None:
    """Raise ValueError where single tokens would be corrected in an objective that takes a response for one action."""
    part = "weight" if correction.weight == "token" else "mask" if correction.mask == "token" else None
    if part is not None and ratio_level != "token":
        raise ValueError(
            f"correction.{part} token corrects single tokens, and ratio_level {ratio_level} takes the response for one "
            f"action: the tokens of one ratio would count unequally, which is biased; take correction.{part} sequence "
            "(kind sequence_tis or mis), or ratio_level token"
        )


def require_correction(correction: CorrectionConfig, max_staleness: int) -> None:
    """Raise ValueError where samples may be of older weights and nothing is done about it, unless that is said."""
    if max_staleness == 0 or correction.kind == "none":
        return
    if not correction.compares:
        raise ValueError(
            f"rollout.max_staleness is {max_staleness}: samples come from weights up to {max_staleness} versions older "
            "than those that learn, and nothing corrects for it; set algorithm.correction.kind to decoupled (or tis, "
            "sequence_tis, icepop, mis), or to none to learn from them as they are"
        )
    if correction.weight == "none":
        raise ValueError(
            f"rollout.max_staleness is {max_staleness}, and algorithm.correction has {correction.title}, which rejects "
            "and does not weigh: what it keeps would count as of the newest weights, which is biased; set "
            "algorithm.correction.weight to sequence or token beside the mask, or kind to none without one"
        )


def correction_warning(correction: CorrectionConfig, max_staleness: int) -> str | None:
    """What a run says at its start where stale samples are not corrected; None where they are, or are not stale."""
    if max_staleness == 0 or correction.weight != "none":
        return None
    ratio = (
        "ratios begin at 1 over the trainer's own log-probabilities: stale samples count as new ones"
        if correction.recomputes_old(is_exact=True, max_staleness=max_staleness)
        else "all that is left is the loss's own ratio over the sampler's log-probabilities, clipped about old weights"
    )
    return (
        f"warning: algorithm.correction.kind is none with rollout.max_staleness {max_staleness}: {ratio}; kind "
        "decoupled corrects for it"
    )
