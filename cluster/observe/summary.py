"""What a run achieved, and when its rewards taught nothing: from its metrics alone, so a folder tells the same."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from ...core.records import Reward
from .console import START_UP_STAGES
from .outcome_checks import faults

Metrics = Mapping[str, float]
NO_SIGNAL, START_UP = "learner/no_signal", "time/start_up_s"
MANY_CUT = 0.5
"Of an iteration's responses: more than this share is told."
_CUT_ADVICE = "raise it, or see in samples/ whether responses end as the model's chat template ends a turn"


def with_signal(row: Metrics) -> dict[str, float]:
    """The metrics of an iteration, and whether its rewards could teach nothing."""
    return {**row, NO_SIGNAL: float(any(_causes(row)))}


def signal_line(iteration: int, row: Metrics) -> str | None:
    """What a person is told of an iteration (counted from 0) that could teach nothing, or was mostly cut."""
    what, advice = next(_causes(row), ("", ""))
    cut = row.get("rollout/length_cut_share", 0.0)
    of_cut = f"{cut:.0%} of the responses were cut at sampling.max_new_tokens" if cut > MANY_CUT else ""
    if not what:
        return f"iteration {iteration + 1}: {of_cut}; {_CUT_ADVICE}" if of_cut else None
    # a response that is cut seldom earns anything: that is what to fix first
    if of_cut:
        what, advice = f"{what}, {of_cut}", _CUT_ADVICE
    return f"iteration {iteration + 1}: its rewards taught nothing: {what}; {advice}"


def unread_share(parts: Mapping[str, float]) -> float:
    """Of a judge's answers, by the parts of a reward or the metrics of an iteration; of several judges the most."""
    return max((value for name, value in parts.items() if f"/{name}".endswith("/unread")), default=0.0)


def unread_line(rewards: Sequence[Reward]) -> str | None:
    """What a person is told of judges' answers that could not be read, and count as reward.default."""
    share = sum(unread_share(reward.parts) for reward in rewards) / max(len(rewards), 1)
    first = next((reward.unread for reward in rewards if reward.unread), "is of an earlier process")
    shown = re.sub(r"^(answered '.{80}).+(', in which)", r"\1...\2", first)
    return f"{share:.1%} of the judge's answers count as reward.default; the first {shown}" if share else None


def signal_rows(metrics: Sequence[Metrics]) -> list[tuple[str, str]]:
    """Rows of the closing table: iterations that could teach nothing, and those that were mostly cut."""
    num_rows = len(metrics)
    num_cut = sum(row.get("rollout/length_cut_share", 0.0) > MANY_CUT for row in metrics)
    unread = [share for row in metrics if (share := unread_share(row))]
    firsts = Counter(what for row in metrics for what, _ in islice(_causes(row), 1))
    rows = []
    if firsts:
        why = ", ".join(f"{what} ({count})" for what, count in firsts.most_common())
        rows.append(("rewards taught nothing", f"{firsts.total()} of {num_rows} iterations: {why}"))
    if unread:
        most = f"{len(unread)} of {num_rows} iterations, at most {max(unread):.1%} of one's"
        rows.append(("judge's answers unread", most))
    if num_cut:
        rows.append(("most responses cut", f"{num_cut} of {num_rows} iterations, at sampling.max_new_tokens"))
    return rows


def _causes(row: Metrics) -> Iterator[tuple[str, str]]:
    """Ways in which nothing can be learned, and what to do; the first is what to fix first."""
    by_rewards = "learner/distill_loss" not in row
    if by_rewards and _are_equal(row, "reward/min", "reward/max") and row.get("rollout/num_samples", 0.0) > 1:
        yield (
            "all rewards are equal",
            "see in samples/ whether the reward can tell responses apart, and whether any prompt is neither too hard "
            "nor too easy",
        )
    if by_rewards and _are_equal(row, "learner/num_zero_advantage_groups", "learner/num_groups"):
        yield (
            "the rewards of no prompt's responses differ",
            "raise rollout.samples_per_prompt or sampling.temperature, or take prompts that are solved at times",
        )
    if row.get("learner/distill_loss", 1.0) < _NO_DIVERGENCE:
        yield (
            "the teacher says what the student says (distill_loss is 0)",
            "name another model in models.teacher, or let it read more: data.teacher_prompt_template",
        )
    if row.get("mismatch/masked_share") == 1.0:
        yield (
            "algorithm.correction masks every token",
            "see mismatch/ratio_mean, and widen the mask or lower rollout.max_staleness",
        )
    if row.get("learner/lr") == 0.0:
        yield "the learning rate is 0", "see trainer.learning_rate and trainer.schedule"
    if row.get("learner/grad_norm") == 0.0:
        yield (
            "the gradient is 0",
            "see algorithm.truncated, algorithm.clip_ratio and the advantages in metrics.jsonl",
        )


def _are_equal(row: Metrics, one: str, other: str) -> bool:
    """Whether both are known and the same."""
    return one in row and row[one] == row.get(other)


_NO_DIVERGENCE = 1e-7
"Nats a token: rounding alone."


def start_up_metrics(whole_s: float, stages_s: Metrics) -> dict[str, float]:
    """Seconds of a start and of its parts."""
    parts = {part: stages_s[stage] for part, stage in START_UP_STAGES.items() if stage in stages_s}
    return {START_UP: whole_s} | {f"time/start_up_{part}_s": seconds for part, seconds in parts.items()}


def start_up_rows(metrics: Sequence[Metrics]) -> list[tuple[str, str]]:
    """The parts of a start, of the process that ran last; none of an earlier version's run."""
    row = next((row for row in reversed(metrics) if START_UP in row), {})
    parts = {stage: row.get(f"time/start_up_{part}_s") for part, stage in START_UP_STAGES.items()}
    found = {stage: seconds for stage, seconds in parts.items() if seconds is not None}
    if not found:
        return []
    found["the rest"] = max(0.0, row[START_UP] - sum(found.values()))
    shares = {stage: seconds / max(row[START_UP], 1e-9) for stage, seconds in found.items()}
    return [(f"  {stage}", f"{seconds:.1f} s ({shares[stage]:.0%})") for stage, seconds in found.items()]


STEP_PARTS = ("generate", "score", "update", "publish", "refit", "evaluate")
"Parts of an iteration that the loop times as `time/<part>_s`."


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Totals and means over a run; `first` and `last` are means over a fifth of the iterations."""

    num_iterations: int
    num_samples: int
    num_response_tokens: int
    reward_first: float
    reward_last: float
    distill_first: float | None
    "divergence from the teacher, nats a token; None: there is none"
    distill_last: float | None
    accuracy_first: float | None
    accuracy_last: float | None
    mean_acceptance_length: float
    acceptance_rate: float
    acceptance_first: float
    acceptance_last: float
    goodput_tokens_per_s: float
    "response tokens over the seconds of generation"
    num_moved: int
    "samples moved between instances while they ran"
    is_invariant: bool | None
    "bits were promised in every iteration; None: the metrics do not say"
    total_s: float
    part_s: Mapping[str, float]
    "seconds by part of the iteration; `other` is what no part claims"
    start_up_s: float | None = None
    "of the process that ran last; None: not recorded"
    update_hidden_s: float = 0.0
    "of updates, behind the sampling of later batches"
    update_line: str | None = None
    "see `update_line`"
    signal: Sequence[tuple[str, str]] = ()
    "rows about iterations that could teach nothing (`cluster.observe.summary`)"
    faults: Sequence[str] = ()
    "see `cluster.observe.outcome_checks.faults`"

    @property
    def amdahl_bound(self) -> float:
        """How many times faster the iterations were if generation took no time."""
        return amdahl_bound(self.total_s, self.part_s["generate"] - self.update_hidden_s)

    @property
    def reward_gain(self) -> float:
        """Mean reward of the last fifth less that of the first."""
        return self.reward_last - self.reward_first

    def rows(self) -> list[tuple[str, str]]:
        """The closing table: label and value."""
        rows = [
            ("iterations", str(self.num_iterations)),
            ("samples", f"{self.num_samples:,}"),
            ("response tokens", f"{self.num_response_tokens:,}"),
            (
                "mean reward, first to last fifth",
                f"{self.reward_first:.3f} to {self.reward_last:.3f} ({self.reward_gain:+.3f})",
            ),
        ]
        for label, first, last, form, unit in (
            ("distill_loss", self.distill_first, self.distill_last, ".4f", " nats a token"),
            ("accuracy", self.accuracy_first, self.accuracy_last, ".3f", ""),
        ):
            if first is not None and last is not None:
                rows.append((f"{label}, first to last fifth", f"{first:{form}} to {last:{form}}{unit}"))
        rows += self.signal
        if self.num_moved:
            rows.append(("samples moved", f"{self.num_moved:,}"))
        if self.faults:
            rows.append(("FAULTS", "; ".join(self.faults)))
        elif self.is_invariant is not None:
            promise = (
                "every bit"
                if self.is_invariant
                else "the distribution, not every bit (see the run's first lines)"
            )
            rows.append(("tokens reproduce", promise))
        rows += [
            ("mean acceptance length", f"{self.mean_acceptance_length:.2f} tokens a decode step"),
            ("acceptance rate", f"{self.acceptance_rate:.3f} of the draft tokens"),
            ("  first to last fifth", f"{self.acceptance_first:.3f} to {self.acceptance_last:.3f}"),
            ("goodput", f"{self.goodput_tokens_per_s:,.0f} tokens/s"),
        ]
        if self.start_up_s is not None:
            rows.append(("start-up", f"{self.start_up_s:.1f} s, before the first iteration"))
        rows.append(("time", f"{self.total_s:.1f} s"))
        rows += [
            (f"  {name}", f"{seconds:.1f} s ({seconds / max(self.total_s, 1e-9):.0%})")
            for name, seconds in self.part_s.items()
            if seconds or name != "evaluate"
        ]
        if self.update_line is not None:
            rows.append(("the update's parts", self.update_line))
        twice = amdahl_bound(self.total_s, self.part_s["generate"] - self.update_hidden_s, times=2.0)
        faster = f"{twice:.2f} x if 2 x as fast, {self.amdahl_bound:.2f} x if free"
        return [*rows, ("faster generation (Amdahl)", faster)]


def as_text(rows: Sequence[tuple[str, str]]) -> str:
    """A table as plain text, one row a line."""
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in rows) + "\n"


UPDATE_PARTS = (
    "collate",
    "teacher",
    "first_forwards",
    "advantages",
    "scoring",
    "forward",
    "backward",
    "optimizer",
    "checks",
    "observers",
    "outside",
)
"Parts of an update that are timed as `update/<part>_s`."
_SMALL_PACK_TOKENS = 256


def update_line(metrics: Sequence[Metrics]) -> str | None:
    """Where the updates' seconds went, and what to change where one cause stands out; None: nothing was timed."""
    total = {part: _total(metrics, f"update/{part}_s") for part in UPDATE_PARTS}
    whole_s = sum(total.values())
    if whole_s <= 0.0:
        return None
    share = {part: seconds / whole_s for part, seconds in total.items()}
    shown = sorted((part for part in UPDATE_PARTS if share[part] >= 0.05), key=lambda part: -share[part])
    line = ", ".join(f"{part.replace('_', ' ')} {share[part]:.0%}" for part in shown)
    pack_tokens = _total(metrics, "update/num_tokens") / max(_total(metrics, "update/num_packs"), 1.0)
    causes = (
        (share["outside"] > 0.25, "it waits: rollouts on their way, other processes on its cores"),
        (share["observers"] > 0.25, "a draft model learns in it: see drafter_training"),
        (
            share["first_forwards"] > 0.3,
            "forwards before it learns: for algorithm.kl_coef, a critic or old log-probabilities",
        ),
        (share["scoring"] > 0.3, "the engine scores every minibatch again: see trainer.scoring"),
        (share["advantages"] > 0.25, "the critic: see trainer.value_epochs"),
        (share["optimizer"] > 0.25, "many steps for few tokens: raise trainer.minibatch_size"),
        (
            share["backward"] > 2.6 * share["forward"],
            "trainer.gradient_checkpointing, where it is on, computes activations twice",
        ),
        (
            # 0: no sample had a gradient
            0.0 < pack_tokens < _SMALL_PACK_TOKENS,
            f"packs of {pack_tokens:.0f} tokens: raise trainer.minibatch_size or trainer.max_tokens_per_forward",
        ),
    )
    cause = next((what for holds, what in causes if holds), None)
    return line if cause is None else f"{line}; {cause}"


def amdahl_bound(total_s: float, generate_s: float, *, times: float = math.inf) -> float:
    """How many times faster the whole were if generation were `times` as fast, by default infinitely.

    Source: Amdahl 1967, 'Validity of the single processor approach to achieving large scale computing capabilities'.
    """
    generate_s = min(max(generate_s, 0.0), total_s)
    left_s = total_s - generate_s + generate_s / times
    return total_s / max(left_s, 1e-9 * total_s, 1e-9)


def summarise(metrics: Sequence[Mapping[str, float]]) -> Summary | None:
    """Sum up the lines of `metrics.jsonl`; None when no iteration finished, or for supervised training's."""
    if not metrics or any("train/loss" in row for row in metrics):
        return None
    fifth = max(1, len(metrics) // 5)
    samples = [row.get("rollout/num_samples", 0.0) for row in metrics]
    tokens = [
        n * row.get("rollout/response_tokens_mean", 0.0) for n, row in zip(samples, metrics, strict=True)
    ]
    taken_over = [
        row.get("rollout/num_taken_over", 0.0) * row.get("rollout/response_tokens_mean", 0.0)
        for row in metrics
    ]
    # the last update of a run ahead has nothing beside it
    decoded = [row for row in metrics if "rollout/acceptance_rate" in row]
    promised = [row["rollout/invariant"] == 1.0 for row in metrics if "rollout/invariant" in row]
    part_s = {part: _total(metrics, f"time/{part}_s") for part in STEP_PARTS}
    total_s = _total(metrics, "time/iteration_s")
    part_s["other"] = max(0.0, total_s - sum(part_s.values()))
    return Summary(
        num_iterations=len(metrics),
        num_samples=round(sum(samples)),
        num_response_tokens=round(sum(tokens)),
        reward_first=_mean(metrics[:fifth], "reward/mean") or 0.0,
        reward_last=_mean(metrics[-fifth:], "reward/mean") or 0.0,
        distill_first=_mean(metrics[:fifth], "learner/distill_loss"),
        distill_last=_mean(metrics[-fifth:], "learner/distill_loss"),
        accuracy_first=_mean(metrics[:fifth], "reward/accuracy"),
        accuracy_last=_mean(metrics[-fifth:], "reward/accuracy"),
        mean_acceptance_length=_mean(metrics, "rollout/mean_acceptance_length") or 1.0,
        acceptance_rate=_mean(metrics, "rollout/acceptance_rate") or 0.0,
        acceptance_first=_mean(decoded[:fifth], "rollout/acceptance_rate") or 0.0,
        acceptance_last=_mean(decoded[-fifth:], "rollout/acceptance_rate") or 0.0,
        goodput_tokens_per_s=(sum(tokens) - sum(taken_over)) / max(part_s["generate"], 1e-9),
        num_moved=round(_total(metrics, "moves/num_moved")),
        is_invariant=all(promised) if promised else None,
        total_s=total_s,
        part_s=part_s,
        start_up_s=next((row[START_UP] for row in reversed(metrics) if START_UP in row), None),
        update_hidden_s=_total(metrics, "time/update_hidden_s"),
        update_line=update_line(metrics),
        signal=signal_rows(metrics),
        faults=faults(metrics),
    )


def _total(metrics: Iterable[Mapping[str, float]], name: str) -> float:
    return sum(row.get(name, 0.0) for row in metrics)


def _mean(metrics: Iterable[Mapping[str, float]], name: str) -> float | None:
    values = [row[name] for row in metrics if name in row]
    return sum(values) / len(values) if values else None


SILENT_ADVICE = (
    "see whether the rows differ in what is to be learned, and whether their margins or the steps so far leave "
    "anything"
)


def is_silent(row: Mapping[str, float]) -> bool:
    """Whether a step had no gradient, and so learned nothing."""
    return row.get("train/grad_norm") == 0.0


def supervised_rows(metrics: Sequence[Metrics]) -> list[tuple[str, str]]:
    """The closing table of supervised training; none where no step of it stands in the metrics."""
    steps = [row for row in metrics if "train/loss" in row]
    if not steps:
        return []
    evaluations = [row for row in metrics if "eval/loss" in row]
    rows = [("steps", f"{steps[-1]['iteration']:,.0f}")]
    for name in ("loss", "accuracy", "margin"):
        values = [row[f"eval/{name}"] for row in evaluations if f"eval/{name}" in row]
        if values:
            rows.append((f"held-out {name}, first to last", f"{values[0]:.4f} to {values[-1]:.4f}"))
    fifth = max(1, len(steps) // 5)
    first, last = (_total(some, "train/loss") / fifth for some in (steps[:fifth], steps[-fifth:]))
    rows.append(("training loss, first to last fifth", f"{first:.4f} to {last:.4f}"))
    if num_silent := sum(is_silent(row) for row in steps):
        rows.append(("steps that learned nothing", f"{num_silent:,}, with a gradient of 0"))
    return [
        *rows,
        ("speed", f"{_total(steps, 'train/tokens_per_s') / len(steps):,.0f} tokens/s"),
        ("time of the steps", f"{_total(steps, 'time/step_s'):.1f} s"),
    ]
