"""What each mechanism of a run gave and cost, and what to change next: what its closing table does not say.

A change is one config key with a value; the first that fits the largest part of the time is told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...core.config import Config
from ...core.config_io import load_config
from ...core.errors import DataError
from ..folder.layout import RunDir
from ..folder.run_status import describe_status
from .run_record import Comparison, RunRecord
from .summary import MANY_CUT, Summary, as_text, signal_line, start_up_rows

_MANY_TAUGHT_NOTHING = 0.3
"Of the iterations: above this share the rewards are to be fixed first."
_LOW_ACCEPTANCE = 1.2
"Tokens a sample and decode step."
_MUCH_IDLE, _MANY_PROMPTS = 0.3, 0.5
"Of the seconds of generation; of an update's tokens."
_WAITS = ("time/rollout_wait_s", "time/backpressure_s", "time/pause_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """The facts of one run."""

    config: Config
    metrics: Sequence[Mapping[str, float]]
    "lines of `metrics.jsonl`"
    summary: Summary
    "of these"
    num_cores: int
    "of the machine that all actors stood on; 0: on several, or an earlier version's run"
    comparison: Comparison | None = None

    def mechanisms(self) -> list[tuple[str, str]]:
        """What instances waited for, and what drafting and moves gave and cost."""
        rows = [("waiting", self._waiting()), ("drafting", self._drafting()), ("moves", self._moves())]
        return rows + ([("ahead", self._ahead())] if self.config.rollout.look_ahead != "off" else [])

    def rows(self) -> list[tuple[str, str]]:
        """These, what a comparison measured, and what to change next."""
        compared = "nothing yet; `rlhfspec compare RUN` decodes the last batch once more, plain and static"
        return [
            *self.mechanisms(),
            ("measured", compared if self.comparison is None else self.comparison.text),
            ("change next", self.change()),
        ]

    def text(self) -> str:
        """The closing table with the start by its parts, and these rows."""
        rows, parts = self.summary.rows(), start_up_rows(self.metrics)
        below = 1 + [label for label, _ in rows].index("start-up") if parts else 0
        return as_text([*rows[:below], *parts, *rows[below:], *self.rows()])

    def change(self) -> str:
        """What to change next: a key, a value, and why."""
        no_signal_share = self._total("learner/no_signal") / len(self.metrics)
        lines = filter(None, (signal_line(number, row) for number, row in enumerate(self.metrics)))
        if no_signal_share > _MANY_TAUGHT_NOTHING and (line := next(lines, None)) is not None:
            return f"the rewards first: {line}"
        part_s = dict(self.summary.part_s)
        if self.config.rollout.max_staleness and self._total("time/pause_s"):
            # one is hidden behind the other, which waits where it is not
            part_s |= {"generate": self._total(_WAITS[0]), "update": self._total(_WAITS[1])}
        largest = max(part_s, key=lambda part: part_s[part]) if any(part_s.values()) else ""
        return next(self._changes(largest), "nothing that these records show")

    def _total(self, name: str) -> float:
        return sum(row.get(name, 0.0) for row in self.metrics)

    def _of_decoding(self, *names: str) -> float:
        """Share of some seconds in those of decoding."""
        return sum(map(self._total, names)) / max(self._total("rollout/decode_s"), 1e-9)

    @property
    def _decode_share(self) -> float | None:
        """Of the instances' seconds in generation, those in which they decoded; None of an earlier version's run."""
        if not any("rollout/decode_s" in row for row in self.metrics):
            return None
        instances_s = self.config.cluster.generation.num_actors * self._total("time/generate_s")
        return self._total("rollout/decode_s") / max(instances_s, 1e-9)

    def _waiting(self) -> str:
        if (share := self._decode_share) is None:
            return "not recorded by the version that ran it"
        decoded = f"instances decoded {share:.0%} of generation; else they had no sample, or no core"
        if not any("time/pause_s" in row for row in self.metrics):
            return decoded
        waits = [self._total(name) for name in _WAITS]
        who = "Trainers waited {:.1f} s for samples, instances {:.1f} s for trainers and {:.1f} s for publications"
        return f"{decoded}. {who.format(*waits)}"

    def _drafting(self) -> str:
        if not self.config.speculation.drafts:
            return "off: one token a sample and decode step"
        if self._decode_share is None:
            return "no seconds recorded"
        refit_share = self.summary.part_s["refit"] / max(self.summary.total_s, 1e-9)
        return f"{self._of_decoding('rollout/draft_s'):.0%} of decoding; the draft's refit {refit_share:.0%} of all"

    def _ahead(self) -> str:
        num_attempts = self._total("rollout/num_attempts")
        if not num_attempts:
            cost = self.metrics[-1].get("rollout/proving_cost", 0.0)
            return f"nothing begun: to prove a token would cost {cost:.2f} of decoding it, as predicted"
        shares = [row["rollout/attempts_proved"] for row in self.metrics if "rollout/attempts_proved" in row]
        proved = f"{sum(shares) / len(shares):.0%}" if shares else "none so far"
        return f"{num_attempts:.0f} samples begun under the weights before; of their tokens proved: {proved}"

    def _moves(self) -> str:
        if self.config.reallocation.policy in ("pull", "static"):
            return f"none: reallocation.policy is {self.config.reallocation.policy}"
        if self._decode_share is None:
            return "what they gave and cost is not recorded"
        if not self.summary.num_moved:
            return "none was worth its cost"
        return (
            f"expected to shorten the tails by {self._total('moves/expected_gain_s'):.1f} s; they cost "
            f"{self._of_decoding('moves/decode_thread_s', 'moves/planning_s'):.1%} of decoding"
        )

    def _changes(self, largest: str) -> Iterator[str]:
        """What would make the largest part of the time shorter, the surest first; then what cut most responses."""
        config = self.config
        if largest == "generate":
            yield from self._changes_of_generation()
        elif largest == "update":
            yield from self._changes_of_updates()
        elif largest == "publish":
            yield f"{self._twice_the_prompts}: a publication for twice as many samples"
        elif largest == "score":
            yield f"cluster.reward.num_actors={2 * config.cluster.reward.num_actors}: rewards were waited for"
        elif largest == "refit":
            share = config.drafter_training.budget_share / 2
            yield f"drafter_training.budget_share={share:g}: the draft's refit took most of the time"
        elif largest == "evaluate":
            yield f"evaluation.every={2 * max(config.evaluation.every, 1)}: evaluations took most of the time"
        if self._total("rollout/length_cut_share") > MANY_CUT * len(self.metrics):
            yield f"sampling.max_new_tokens={2 * config.sampling.max_new_tokens}: most responses are cut"

    @property
    def _twice_the_prompts(self) -> str:
        return f"rollout.prompts_per_iteration={2 * self.config.rollout.prompts_per_iteration}"

    def _changes_of_updates(self) -> Iterator[str]:
        config, trainer, cores = self.config, self.config.trainer, self.num_cores
        trainers, pool = config.cluster.trainer, config.cluster.generation
        learning = trainer.num_threads * trainers.num_actors * (trainers.num_gpus == 0)
        decoding = config.engine.num_threads * pool.num_actors * (pool.num_gpus == 0)
        is_ahead, is_corrected = config.rollout.max_staleness > 0, config.algorithm.advantage != "none"
        if 0 < learning < cores and not is_ahead:
            yield f"trainer.num_threads={cores // trainers.num_actors}: updates used {learning} of {cores} cores"
        if is_ahead and learning and pool.num_actors > 1 and 0 < cores < learning + decoding:
            yield f"cluster.generation.num_actors={pool.num_actors - 1}: instances share the trainers' cores"
        if config.algorithm.kl_coef > 0.0:
            yield "algorithm.kl_coef=0, where the reward needs no reference: no forwards of it, or of equal rewards"
        if trainer.epochs > 1:
            yield "trainer.epochs=1: every epoch computes all responses once more"
        prompts = 1.0 - self.summary.num_response_tokens / max(self._total("update/num_tokens"), 1.0)
        if prompts > _MANY_PROMPTS and not config.algorithm.has_critic:
            more = 2 * config.rollout.samples_per_prompt
            yield f"rollout.samples_per_prompt={more}: {prompts:.0%} of its tokens are prompts', once for all of one"
        # on the cores that each has now they would only slow each other down
        if not is_ahead and learning + decoding <= cores:
            corrected = " with algorithm.correction.kind=decoupled" if is_corrected else ""
            yield f"rollout.max_staleness=1{corrected}: the next batch is sampled while this one is learned from"

    def _changes_of_generation(self) -> Iterator[str]:
        config, speculation = self.config, self.config.speculation
        if not speculation.drafts:
            draft = "policy=goodput" if speculation.policy == "off" else "drafter=suffix"
            yield f"speculation.{draft}: nothing drafts"
        if config.reallocation.policy in ("pull", "static"):
            yield "reallocation.policy=finish_time: samples stay where they began, the longest too"
        if self.summary.mean_acceptance_length < _LOW_ACCEPTANCE:
            yield (
                "speculation.look_up=suffix, or another models.draft: this one's tokens are seldom accepted"
                if speculation.drafter in ("model", "head", "mtp")
                else "speculation.drafter=model with a draft in models.draft: what is looked up is seldom accepted"
            )
        idle = 0.0 if self._decode_share is None else 1.0 - self._decode_share
        if idle > _MUCH_IDLE:
            yield f"{self._twice_the_prompts}: instances stood idle for {idle:.0%} of generation, behind the longest"
        cores, used = self.num_cores, config.cluster.generation.num_actors * config.engine.num_threads
        if cores > used:
            more = cores // config.engine.num_threads
            yield f"cluster.generation.num_actors={more}: instances used {used} of {cores} cores"


def explain_run(run: RunRecord) -> Explained | None:
    """None where no iteration of RLHF finished. Raises ConfigError: the config cannot be read, or is supervised."""
    summary = run.summary
    if summary is None:
        return None
    return Explained(
        config=load_config(run.run_dir.config_file),
        metrics=run.metrics,
        summary=summary,
        num_cores=round(run.metrics[-1].get("pool/cores", 0.0)),
        comparison=Comparison.read(run.run_dir.comparison_file),
    )


def no_iteration(run_dir: RunDir) -> DataError:
    """What is said of a run that has nothing to explain or to draw so far."""
    state = describe_status(run_dir.status())[0]
    return DataError(
        f"no iteration of RLHF has finished in {run_dir.path} ({state}): nothing to show; "
        "`rlhfspec status` says what a run does now"
    )
