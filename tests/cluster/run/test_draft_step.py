"""The loop's side of a refit: the seconds it grants, and that only weights that were taken are published."""

from types import SimpleNamespace

import pytest

import rlhfspec.cluster.run.draft_step
from rlhfspec.cluster.run.draft_step import refit_draft
from rlhfspec.core.config_io import config_from_dict
from rlhfspec.learning.drafts.draft_learner import RefitReport

PACK_AND_PUBLISH_S = 0.5


class Bench:
    """A system of one trainer, whose refits take the whole budget, and of a pool that only listens."""

    def __init__(self, monkeypatch, **sections) -> None:
        tree = {"data": {"task": "chain"}, "models": {"draft": "demo"}} | sections
        self.now_s, self.outcome = 0.0, "taken"
        self.budgets_s: list[float] = []
        self.published: list[str] = []
        self.notes: list[str] = []
        self.system = SimpleNamespace(
            config=config_from_dict(tree),
            draft="version 0",
            refit_overhead_s=0.0,
            trainers=SimpleNamespace(refit=self.learn, take="new {}".format),
            generation=SimpleNamespace(publish=self.publish),
        )
        monkeypatch.setattr(rlhfspec.cluster.run.draft_step.time, "perf_counter", lambda: self.now_s)

    def learn(self, rollouts: str, budget_s: float) -> RefitReport:
        self.budgets_s.append(budget_s)
        took_s = budget_s if self.outcome == "taken" else 0.0
        self.now_s += took_s
        return RefitReport(
            outcome=self.outcome,  # type: ignore[arg-type]
            weight_version=7,
            num_steps=3,
            num_tokens=50,
            kl_before=0.25,
            kl_after=None,
            refit_s=took_s,
        )

    def publish(self, weights: str) -> None:
        self.published.append(weights)
        self.now_s += PACK_AND_PUBLISH_S

    def refit(self) -> dict[str, float]:
        report = SimpleNamespace(note=self.notes.append)
        return refit_draft(self.system, "rollouts", iteration_s=20.0, report=report)  # type: ignore[arg-type]


def test_learning_and_publication_together_stay_within_the_share(monkeypatch):
    bench = Bench(monkeypatch, drafter_training={"budget_share": 0.1})
    bench.refit()
    began_s = bench.now_s
    bench.refit()
    assert bench.budgets_s == pytest.approx([2.0, 1.5])
    assert bench.now_s - began_s == pytest.approx(2.0)


def test_a_refit_that_is_taken_is_published_and_checkpointed(monkeypatch):
    bench = Bench(monkeypatch)
    metrics = bench.refit()
    assert bench.published == ["new draft"] and bench.system.draft == "new draft"
    assert metrics["draft/weight_version"] == 7 and metrics["draft/refit_taken"] == 1
    assert metrics["draft/kl_before"] == 0.25 and "draft/kl_after" not in metrics


@pytest.mark.parametrize("outcome", ["worse", "not_finite", "no_time", "one_sample"])
def test_a_refit_that_is_not_taken_is_not_published(monkeypatch, outcome):
    bench = Bench(monkeypatch)
    bench.outcome = outcome
    metrics = bench.refit()
    assert bench.published == [] and bench.system.draft == "version 0"
    assert metrics["draft/refit_taken"] == 0


def test_a_publication_dearer_than_the_share_makes_refits_rare_but_does_not_end_them(monkeypatch):
    bench = Bench(monkeypatch, drafter_training={"budget_share": 0.02})
    bench.refit()
    bench.outcome = "no_time"
    for _ in range(5):
        bench.refit()
    assert bench.budgets_s[1] < 0.0 < bench.budgets_s[-1]


@pytest.mark.parametrize(
    "sections",
    [{"drafter_training": {"refit": False}}, {"speculation": {"policy": "off"}}],
    ids=["refits off", "nothing drafted"],
)
def test_no_refit_is_requested_where_refits_or_drafting_are_off(monkeypatch, sections):
    bench = Bench(monkeypatch, **sections)
    assert bench.refit() == {} and bench.budgets_s == []


def test_a_draft_that_is_not_finite_is_never_published_and_a_note_says_which_one_stays(monkeypatch):
    bench = Bench(monkeypatch)
    bench.outcome = "not_finite"
    bench.refit()
    assert bench.published == [] and bench.system.draft == "version 0"
    (note,) = bench.notes
    assert "version 7 stays" in note and "drafter_training.learning_rate" in note
