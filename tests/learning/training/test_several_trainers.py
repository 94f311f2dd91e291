"""Two and three trainers learn what one learns: replicated or sharded, PPO, GRPO and LoRA, resumed on other numbers."""

import numpy as np
import pytest
import torch
from group_learning import (
    CASES,
    RUNS,
    SAVED_AFTER,
    UPDATES,
    break_down,
    go_on_in_group,
    learn,
    learn_in_group,
    learn_over_bfloat16,
    new_learner,
    resume,
    tied_model,
)
from tiny_llama import tiny_llama
from trainer_group import run_group

from rlhfspec.core.errors import PeerLost
from rlhfspec.learning.training.parallel import join_group, new_store, store_at


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return tmp_path_factory.mktemp("trainers")


@pytest.fixture(scope="module")
def rollouts(rollout_maker):
    return rollout_maker(tied_model(), 9, group_size=3)


@pytest.fixture(scope="module")
def alone(rollouts, saved):
    return {case: learn(new_learner(case), rollouts, saved / "one" / case) for case in CASES}


def in_group(size, function, rollouts, folder):
    results = run_group(size, function, rollouts, folder)
    assert not [result for result in results if isinstance(result, BaseException)]
    return results


@pytest.fixture(scope="module")
def group_of_two(rollouts, saved):
    return in_group(2, learn_in_group, rollouts, saved / "2")


@pytest.fixture(scope="module")
def group_of_three(alone, rollouts, saved):
    """They learn the last update, from what one trainer saved after the others."""
    return in_group(3, go_on_in_group, rollouts, saved / "one")


def assert_same(one, other):
    (weights, _, metrics), (others, _, other_metrics) = one, other
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        np.testing.assert_allclose(others[name], weight, rtol=0, atol=1e-5, err_msg=name)
    assert other_metrics == pytest.approx(metrics, rel=1e-3, abs=1e-4)


def assert_same_targets(one, of_first):
    """What the first trainer refits a draft model from: the last epoch's, of all trainers' shares."""
    (_, kept, _), (_, others, _) = one, of_first
    assert kept.keys() == others.keys()
    for index, logprobs in kept.items():
        np.testing.assert_allclose(others[index], logprobs, atol=1e-5)


@pytest.mark.parametrize(("strategy", "case"), RUNS)
def test_two_trainers_learn_what_one_learns(group_of_two, alone, strategy, case):
    assert_same_targets(alone[case], group_of_two[0][strategy, case])
    for of_rank in group_of_two:
        assert_same(alone[case], of_rank[strategy, case])


@pytest.mark.parametrize(("strategy", "case"), RUNS)
def test_what_one_trainer_saved_is_gone_on_with_by_three(group_of_three, alone, strategy, case):
    assert_same_targets(alone[case], group_of_three[0][strategy, case])
    for of_rank in group_of_three:
        assert_same(alone[case], of_rank[strategy, case])


@pytest.mark.parametrize(("strategy", "case"), RUNS)
def test_what_two_trainers_saved_is_gone_on_with_by_one(group_of_two, alone, saved, rollouts, strategy, case):
    resumed = resume(new_learner(case), saved / "2" / f"{strategy}-{case}")
    assert resumed.weight_version == SAVED_AFTER
    assert_same(alone[case], learn(resumed, rollouts))


def test_adapters_over_bfloat16_linears_learn_the_same_in_a_sharded_group_and_in_copies(rollouts):
    """What LoRA holds on a GPU: float32 adapters and frozen bfloat16 weights in one group, gathered together."""
    for weights, groups in run_group(2, learn_over_bfloat16, rollouts):
        block, both = "model.layers.0", {"torch.float32", "torch.bfloat16"}
        assert groups[block] == groups["model.layers.1"] == both
        assert groups["model.embed_tokens"] == {"torch.float32"} and groups["lm_head"] == {"torch.bfloat16"}
        start = tiny_llama().get_parameter(f"{block}.mlp.up_proj.weight").detach().bfloat16().float()
        moved = np.abs(weights["ddp"][f"{block}.mlp.up_proj.weight"] - start.numpy()).max()
        assert moved > 1e-5
        for name, weight in weights["ddp"].items():
            np.testing.assert_allclose(
                weights["fsdp2"][name], weight, rtol=0, atol=0.01 * moved, err_msg=name
            )


def test_all_trainers_hear_of_one_s_trouble_and_of_one_s_death(rollouts):
    (said, lost), dead = run_group(2, break_down, rollouts)
    assert said.startswith("trainer 1 of 2: the loss of weight version 0 is nan")
    assert lost.startswith("trainer 0 of 2 could not tell each other how it went: another trainer died")
    assert isinstance(dead, ChildProcessError)


def test_a_trainer_that_does_not_come_is_an_error_within_the_limit():
    store = new_store("127.0.0.1", 2, 1.0)
    with pytest.raises(PeerLost, match="trainer 0 of 2 waited up to 1 s"):
        join_group(store, rank=0, size=2, device=torch.device("cpu"), timeout_s=1.0)


def test_a_first_trainer_that_cannot_be_reached_is_named():
    port = new_store("127.0.0.1", 2, 1.0).port
    with pytest.raises(PeerLost, match=f"at 127.0.0.1:{port} within 1 s"):
        store_at("127.0.0.1", port, 2, 1.0)


def test_of_the_older_samples_some_were_cut_and_some_masked(alone):
    """What the case with a correction compares has weights and a mask that are not all 1."""
    _, _, metrics = alone["untied"]
    assert metrics["mismatch/lag_max"] == UPDATES - 1
    assert 0.0 < metrics["mismatch/masked_share"] < 1.0
    assert metrics["mismatch/importance_mean"] != 1.0
