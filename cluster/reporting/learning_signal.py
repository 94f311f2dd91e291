"""Says when an iteration's rewards could teach nothing, or most responses were cut: from its metrics alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

Figures = Mapping[str, float]
NO_SIGNAL = "learner/no_signal"
MANY_CUT = 0.5
"Of an iteration's responses: more than this share is told."
_CUT_ADVICE = "raise it, or see in samples/ whether responses end as the model's chat template ends a turn"


class _Cause(NamedTuple):
    """One way in which nothing can be learned; the first that holds is what to mend first."""

    holds: Callable[[Figures], bool]
    what: str
    advice: str


_CAUSES = (
    _Cause(
        lambda figures: (
            _are_equal(figures, "reward/min", "reward/max") and figures.get("rollout/num_samples", 0.0) > 1
        ),
        "all rewards are equal",
        "see in samples/ whether the reward can tell responses apart, and whether any prompt is neither too hard nor "
        "too easy",
    ),
    _Cause(
        lambda figures: _are_equal(figures, "learner/num_zero_advantage_groups", "learner/num_groups"),
        "the rewards of no prompt's responses differ",
        "raise rollout.samples_per_prompt or sampling.temperature, or take prompts that are solved at times",
    ),
    _Cause(
        lambda figures: figures.get("mismatch/masked_share") == 1.0,
        "algorithm.correction masks every token",
        "see mismatch/ratio_mean, and widen the mask or lower rollout.max_staleness",
    ),
    _Cause(
        lambda figures: figures.get("learner/lr") == 0.0,
        "the learning rate is 0",
        "see trainer.learning_rate and trainer.schedule",
    ),
    _Cause(
        lambda figures: figures.get("learner/grad_norm") == 0.0,
        "the gradient is 0",
        "see algorithm.truncated, algorithm.clip_ratio and the advantages in metrics.jsonl",
    ),
)


def with_signal(figures: Figures) -> dict[str, float]:
    """The figures of an iteration, and whether its rewards could teach nothing."""
    return {**figures, NO_SIGNAL: float(bool(_causes(figures)))}


def signal_line(iteration: int, figures: Figures) -> str | None:
    """What a person is told of an iteration (counted from 0) that could teach nothing, or was mostly cut."""
    causes, cut = _causes(figures), figures.get("rollout/length_cut_share", 0.0)
    of_cut = f"{cut:.0%} of the responses were cut at sampling.max_new_tokens" if cut > MANY_CUT else ""
    if not causes:
        return f"iteration {iteration + 1}: {of_cut}; {_CUT_ADVICE}" if of_cut else None
    # a response that is cut seldom earns anything: that is what to mend first
    what, advice = (
        (f"{causes[0].what}, {of_cut}", _CUT_ADVICE) if of_cut else (causes[0].what, causes[0].advice)
    )
    return f"iteration {iteration + 1}: its rewards taught nothing: {what}; {advice}"


def signal_rows(metrics: Iterable[Figures]) -> list[tuple[str, str]]:
    """Rows of the closing table: iterations that could teach nothing, and those that were mostly cut."""
    firsts: Counter[str] = Counter()
    num_rows = num_cut = 0
    for figures in metrics:
        num_rows += 1
        num_cut += figures.get("rollout/length_cut_share", 0.0) > MANY_CUT
        firsts.update(cause.what for cause in _causes(figures)[:1])
    rows = []
    if firsts:
        why = ", ".join(f"{what} ({count})" for what, count in firsts.most_common())
        rows.append(("rewards taught nothing", f"{firsts.total()} of {num_rows} iterations: {why}"))
    if num_cut:
        rows.append(("most responses cut", f"{num_cut} of {num_rows} iterations, at sampling.max_new_tokens"))
    return rows


def _causes(figures: Figures) -> list[_Cause]:
    return [cause for cause in _CAUSES if cause.holds(figures)]


def _are_equal(figures: Figures, one: str, other: str) -> bool:
    """Whether both are known and the same."""
    return one in figures and figures[one] == figures.get(other)
