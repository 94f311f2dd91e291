"""Direct preference optimisation: the formulas by hand, batches that add up, and TRL's own losses and gradients."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forked_script import as_main, output_of
from supervised_items import OBJECTIVES, VOCABULARY, feedback_items, new_learner, tiny

from rlhfspec.benchmarks.peers.build import TRL_RELEASES, trl_folder
from rlhfspec.core.settings.supervised import DpoLossConfig, DpoTrainerConfig
from rlhfspec.core.settings.trainer import LoraConfig
from rlhfspec.learning.training.objectives.direct_preferences import DirectPreferences
from rlhfspec.learning.training.objectives.supervised_objectives import kto_losses, pair_losses
from rlhfspec.learning.training.supervised_job import SupervisedLearner

ROOT = Path(__file__).resolve().parents[4]
CHOSEN, REJECTED = [-0.5, -2.0, -0.125], [-1.0, -0.25, -3.0]


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def odds(x: float) -> float:
    return math.exp(x) / (1.0 - math.exp(x))


BY_HAND = {
    "sigmoid": lambda c, r: -math.log(sigmoid(0.5 * (c - r))),
    "smoothed": lambda c, r: -0.9 * math.log(sigmoid(0.5 * (c - r))) - 0.1 * math.log(sigmoid(0.5 * (r - c))),
    "hinge": lambda c, r: max(0.0, 1.0 - 0.5 * (c - r)),
    "ipo": lambda c, r: (c - r - 1.0) ** 2,
    "orpo": lambda c, r: -0.5 * math.log(sigmoid(math.log(odds(c) / odds(r)))),
}


@pytest.mark.parametrize("kind", list(BY_HAND))
def test_the_loss_of_a_pair_is_the_paper_s(kind):
    settings = {"label_smoothing": 0.1} if kind == "smoothed" else {"type": kind}
    chosen, rejected = (torch.tensor(one, dtype=torch.float64) for one in (CHOSEN, REJECTED))
    found = pair_losses(chosen, rejected, DpoLossConfig(beta=0.5, **settings))
    by_hand = [BY_HAND[kind](c, r) for c, r in zip(CHOSEN, REJECTED, strict=True)]
    assert found.tolist() == pytest.approx(by_hand, rel=1e-12)


def test_the_loss_of_a_judged_response_is_kto_s():
    loss = DpoLossConfig(type="kto", beta=0.5, desirable_weight=2.0, undesirable_weight=0.5)
    ratios, desirable = torch.tensor([1.5, 1.5], dtype=torch.float64), torch.tensor([1.0, 0.0])
    expected = [2.0 * (1.0 - sigmoid(0.5 * 0.5)), 0.5 * (1.0 - sigmoid(-0.5 * 0.5))]
    assert kto_losses(ratios, desirable, 1.0, loss).tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", ["sigmoid", "ipo", "hinge", "kto", "orpo"])
def test_packs_of_any_size_add_up_to_the_same_step(kind):
    items = feedback_items(7, 1, single=kind == "kto")
    items = [replace(one, reference=()) for one in items] if kind == "orpo" else items
    objective = DirectPreferences(loss=DpoLossConfig(type=kind), vocab_size=VOCABULARY)
    found = []
    for most in (20, 4096):
        settings = DpoTrainerConfig(max_tokens_per_forward=most)
        learner = SupervisedLearner(tiny("dpo"), objective, settings, total_steps=1, seed=0)
        assert (len(learner.batch(items).packs) > 2) == (most == 20)
        found.append(learner.step(items))
    assert found[0] == pytest.approx(found[1], rel=1e-4, abs=1e-5)
    assert ("kl" in found[0]) == (kind == "kto") and found[0]["grad_norm"] > 0.0


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)], ids=["full", "lora"])
def test_a_policy_that_is_its_reference_has_the_loss_of_no_preference(lora):
    learner = new_learner("dpo", lora)
    learner.objective = replace(OBJECTIVES["dpo"], loss=DpoLossConfig())
    items = learner.with_reference([replace(one, reference=()) for one in feedback_items(5, 2)])
    assert [len(one.reference) for one in items] == [4] * 5
    assert learner.evaluate(items)["loss"] == pytest.approx(math.log(2.0), abs=1e-5)
    before = learner.step(items)
    assert learner.evaluate(items)["loss"] < before["loss"]


def test_a_batch_of_desirable_responses_alone_has_no_margin():
    items = [one for one in feedback_items(7, 1, single=True) if one.is_chosen[0]]
    found = new_learner("dpo", None).evaluate(items)
    assert "kl" in found and not {"chosen_reward", "rejected_reward", "margin"} & found.keys()


@pytest.mark.slow
def test_losses_and_gradients_are_trl_s(tmp_path):
    folder = trl_folder(TRL_RELEASES[-1])
    if folder is None:
        pytest.skip("no TRL: python -m rlhfspec.benchmarks.peers.build --only trl (make bench-peers)")
    helpers = ROOT / "tests" / "helpers"
    said = output_of(
        as_main("trl_preferences"), folders=[folder, helpers], cwd=tmp_path, CUDA_VISIBLE_DEVICES=""
    )
    found = json.loads(said.splitlines()[-1])
    assert set(found) == {"sigmoid", "hinge", "ipo", "kto", "orpo"}
    for kind, of in found.items():
        assert of["packs"] > 1
        assert of["ours"] == pytest.approx(of["theirs"], rel=1e-6), kind
        assert of["gradient"] < 1e-6, kind
