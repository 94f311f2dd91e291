"""Where a run's time went, what each mechanism gave, and what to change next: ten lines from its records.

A change is one config key with a value; the first of `_CHANGES` that fits the largest part of the time is told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...core.config import Config
from ...core.config_io import load_config
from ...core.errors import DataError
from ...core.metrics import read_metrics
from ..folder.layout import RunDir
from ..folder.plain_comparison import Comparison
from ..folder.run_status import describe_status
from ..placement.machine import num_cores
from .summary import Summary, summarise

_PARTS = {
    "generate": "generation",
    "update": "update",
    "publish": "publication",
    "score": "reward",
    "refit": "draft refit",
    "evaluate": "evaluation",
    "other": "other",
}
_MANY_TAUGHT_NOTHING = 0.3
"Of the iterations: above this share the rewards are to be fixed first."


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """The facts of one run; shares are of its iterations' seconds where nothing else is said."""

    config: Config
    metrics: Sequence[Mapping[str, float]]
    "lines of `metrics.jsonl`"
    summary: Summary
    "of these"
    num_cores: int
    "of the machine that explains, which the run's is taken to be like"
    comparison: Comparison | None = None

    def total(self, name: str) -> float:
        """Of a metric, over the iterations."""
        return sum(row.get(name, 0.0) for row in self.metrics)

    @property
    def decode_share(self) -> float | None:
        """Of the instances' seconds in generation, those in which they decoded; None of an earlier version's run."""
        if not any("rollout/decode_s" in row for row in self.metrics):
            return None
        instances_s = self.config.cluster.generation.num_actors * self.total("time/generate_s")
        return self.total("rollout/decode_s") / max(instances_s, 1e-9)

    def of_decoding(self, *names: str) -> float:
        """Share of some seconds in those of decoding."""
        return sum(self.total(name) for name in names) / max(self.total("rollout/decode_s"), 1e-9)

    @property
    def num_trainers(self) -> int:
        """At the start."""
        return self.config.cluster.trainer.num_actors

    def share(self, part: str) -> float:
        """Of the seconds of all iterations."""
        return self.summary.part_s[part] / max(self.summary.total_s, 1e-9)

    @property
    def largest(self) -> str:
        """The part that took most of the time."""
        return max(self.summary.part_s, key=lambda part: self.summary.part_s[part])

    def rows(self) -> list[tuple[str, str]]:
        """Label and text, ten of them."""
        summary = self.summary
        return [
            (
                "run",
                f"{summary.num_iterations} iterations in {summary.total_s:.0f} s{self._start_up()}, "
                f"{summary.num_samples:,} samples, {summary.num_response_tokens:,} tokens",
            ),
            ("reward", f"{summary.reward_first:.3f} to {summary.reward_last:.3f}, first to last fifth"),
            ("time", ", ".join(f"{_PARTS[part]} {self.share(part):.0%}" for part in summary.part_s)),
            ("waiting", self._waiting()),
            ("speculation", self._speculation()),
            ("drafting", self._drafting()),
            ("moves", self._moves()),
            ("measured", self._measured()),
            (
                "limit",
                f"generation in no time would make an iteration {summary.amdahl_bound:.2f} times as fast",
            ),
            ("change next", self.change()),
        ]

    def change(self) -> str:
        """What to change next: a key, a value, and why."""
        no_signal_share = self.total("learner/no_signal") / len(self.metrics)
        if no_signal_share > _MANY_TAUGHT_NOTHING and self.summary.signal:
            return f"the rewards first: {self.summary.signal[0][1]}"
        fitting = (one for one in _CHANGES if one.part == self.largest and one.holds(self))
        first = next(fitting, None)
        return "nothing that these records show" if first is None else first.text(self)

    def _start_up(self) -> str:
        start_up_s = self.summary.start_up_s
        return "" if start_up_s is None else f" after a start-up of {start_up_s:.0f} s"

    def _waiting(self) -> str:
        if self.decode_share is None:
            return "not recorded by the version that ran it"
        return (
            f"instances decoded {self.decode_share:.0%} of generation; the rest they had no sample, or waited for "
            "a core"
        )

    def _speculation(self) -> str:
        if not self.drafts:
            return "off: one token a sample and decode step"
        summary = self.summary
        return (
            f"{summary.mean_acceptance_length:.2f} tokens a sample and decode step (1 without), "
            f"{summary.acceptance_rate:.0%} of the drafted ones accepted"
        )

    def _drafting(self) -> str:
        if not self.drafts or self.decode_share is None:
            return "no seconds recorded"
        of_decoding = self.of_decoding("rollout/draft_s")
        return (
            f"{of_decoding:.0%} of decoding; the draft's refit {self.share('refit'):.0%} of all; acceptance "
            f"{self.summary.acceptance_first:.2f} to {self.summary.acceptance_last:.2f}, first to last fifth"
        )

    def _moves(self) -> str:
        if self.config.reallocation.policy in ("pull", "static"):
            return f"none: reallocation.policy is {self.config.reallocation.policy}"
        if self.decode_share is None:
            return f"{self.summary.num_moved:,} samples moved; what they gave and cost is not recorded"
        if not self.summary.num_moved:
            return "none was worth its cost"
        return (
            f"{self.summary.num_moved:,} samples moved, expected to shorten the tails by "
            f"{self.total('moves/expected_gain_s'):.1f} s; they cost "
            f"{self.of_decoding('moves/decode_thread_s', 'moves/planning_s'):.1%} of decoding"
        )

    def _measured(self) -> str:
        if self.comparison is None:
            return "nothing yet; `rlhfspec compare RUN` decodes the last batch once more, plain and static"
        return self.comparison.text

    @property
    def drafts(self) -> bool:
        """Whether anything was drafted."""
        speculation = self.config.speculation
        return speculation.policy != "off" and speculation.drafter != "none"

    @property
    def idle_share(self) -> float:
        """Of the instances' seconds in generation, those without decoding."""
        return 0.0 if self.decode_share is None else max(0.0, 1.0 - self.decode_share)

    @property
    def learns_on_cpu(self) -> bool:
        """Whether trainers compute on processors."""
        return self.config.cluster.trainer.num_gpus == 0


class _Change(NamedTuple):
    part: str
    "of the time, which must be the largest"
    holds: Callable[[Explained], bool]
    text: Callable[[Explained], str]


_LOW_ACCEPTANCE = 1.2
"Tokens a sample and decode step."
_MUCH_IDLE = 0.3
_CHANGES = (
    _Change(
        "generate",
        lambda run: not run.drafts,
        lambda run: (
            "speculation.policy=goodput with a draft in models.draft, or speculation.drafter=suffix: nothing drafts"
        ),
    ),
    _Change(
        "generate",
        lambda run: run.config.reallocation.policy in ("pull", "static"),
        lambda run: (
            "reallocation.policy=finish_time: samples stay where they began, and a batch ends with its longest"
        ),
    ),
    _Change(
        "generate",
        lambda run: run.summary.mean_acceptance_length < _LOW_ACCEPTANCE,
        lambda run: (
            "speculation.look_up=suffix, or another models.draft: this one's tokens are seldom accepted"
            if run.config.speculation.drafter in ("model", "head", "mtp")
            else "speculation.drafter=model with a draft in models.draft: what is looked up is seldom accepted"
        ),
    ),
    _Change(
        "generate",
        lambda run: run.idle_share > _MUCH_IDLE,
        lambda run: (
            f"rollout.prompts_per_iteration={2 * run.config.rollout.prompts_per_iteration}: instances stood idle for "
            f"{run.idle_share:.0%} of generation, behind the longest responses"
        ),
    ),
    _Change(
        "generate",
        lambda run: run.num_cores > run.config.cluster.generation.num_actors * run.config.engine.num_threads,
        lambda run: (
            f"cluster.generation.num_actors={run.num_cores // run.config.engine.num_threads}: the machine has "
            f"{run.num_cores} cores, instances used "
            f"{run.config.cluster.generation.num_actors * run.config.engine.num_threads}"
        ),
    ),
    _Change(
        "update",
        lambda run: run.learns_on_cpu and run.num_cores > run.config.trainer.num_threads * run.num_trainers,
        lambda run: (
            f"trainer.num_threads={run.num_cores // run.num_trainers}: the update used "
            f"{run.config.trainer.num_threads} a trainer of {run.num_cores} cores, and instances rest meanwhile"
        ),
    ),
    _Change(
        "update",
        lambda run: run.config.algorithm.kl_coef > 0.0,
        lambda run: (
            "algorithm.kl_coef=0, where the reward needs no reference: one forward less for every token, and a model"
        ),
    ),
    _Change(
        "update",
        lambda run: run.config.trainer.epochs > 1,
        lambda run: "trainer.epochs=1: every epoch computes all responses once more",
    ),
    _Change(
        "update",
        lambda run: run.config.rollout.samples_per_prompt == 1 and not run.config.algorithm.has_critic,
        lambda run: "rollout.samples_per_prompt=8: what a prompt's samples begin with is computed once",
    ),
    _Change(
        "update",
        lambda run: not run.config.rollout.max_staleness,
        lambda run: (
            "rollout.max_staleness=1 with algorithm.correction.kind=decoupled: the next batch is sampled while this "
            "one is learned from"
        ),
    ),
    _Change(
        "publish",
        lambda run: True,
        lambda run: (
            f"rollout.prompts_per_iteration={2 * run.config.rollout.prompts_per_iteration}: a publication for twice "
            "as many samples"
        ),
    ),
    _Change(
        "score",
        lambda run: True,
        lambda run: (
            f"cluster.reward.num_actors={2 * run.config.cluster.reward.num_actors}: rewards were waited for"
        ),
    ),
    _Change(
        "refit",
        lambda run: True,
        lambda run: (
            f"drafter_training.budget_share={run.config.drafter_training.budget_share / 2:g}: the draft's refit took "
            "most of the time"
        ),
    ),
    _Change(
        "evaluate",
        lambda run: True,
        lambda run: (
            f"evaluation.every={2 * max(run.config.evaluation.every, 1)}: evaluations took most of the time"
        ),
    ),
)


def explain_run(run_dir: RunDir, note: Callable[[str], None] = lambda line: None) -> Explained | None:
    """From a run folder; None where no iteration of RLHF finished.

    `note` is told of lines that are left out. Raises ConfigError: a config that cannot be read, or supervised
    training's.
    """
    file = run_dir.metrics_file
    metrics = read_metrics(file, note=note) if file.is_file() else []
    summary = summarise(metrics)
    if summary is None:
        return None
    return Explained(
        config=load_config(run_dir.config_file),
        metrics=metrics,
        summary=summary,
        num_cores=num_cores(),
        comparison=Comparison.read(run_dir.comparison_file),
    )


def no_iteration(run_dir: RunDir) -> DataError:
    """What is said of a run that has nothing to explain or to draw so far."""
    state = describe_status(run_dir.status())[0]
    return DataError(
        f"no iteration of RLHF has finished in {run_dir.path} ({state}): nothing to show; "
        "`rlhfspec status` says what a run does now"
    )


def explanation_text(explained: Explained) -> str:
    """The rows as plain text, one a line."""
    rows = explained.rows()
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {text}" for label, text in rows)
