"""Two supervised trainers learn what one learns: replicated or sharded, tokens or pairs, with LoRA, resumed."""

import numpy as np
import pytest
from supervised_items import CASES, STRATEGIES, items_of, learn, learn_in_group, new_learner
from trainer_group import run_group

RUNS = [(strategy, *case) for strategy in STRATEGIES for case in CASES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("supervised")


@pytest.fixture(scope="module")
def alone(folder):
    return {
        (kind, form): learn(new_learner(kind, lora), items_of(kind), folder / "one" / f"{kind}-{form}")
        for (kind, form), lora in CASES.items()
    }


@pytest.fixture(scope="module")
def group(alone, folder):
    results = run_group(2, learn_in_group, folder / "two", folder / "one")
    assert not [result for result in results if isinstance(result, BaseException)]
    return results


def assert_same(one, other):
    (weights, metrics), (others, other_metrics) = one, other
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        np.testing.assert_allclose(others[name], weight, rtol=0, atol=2e-5, err_msg=name)
    assert other_metrics == pytest.approx(metrics, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize(("strategy", "kind", "form"), RUNS)
def test_two_trainers_learn_what_one_learns(group, alone, strategy, kind, form):
    for of_rank in group:
        assert_same(alone[kind, form], of_rank[strategy, kind, form])


@pytest.mark.parametrize(("strategy", "kind", "form"), RUNS)
def test_what_one_saved_two_go_on_with(group, alone, strategy, kind, form):
    for of_rank in group:
        assert_same(alone[kind, form], of_rank["resumed", strategy, kind, form])


@pytest.mark.parametrize(("strategy", "kind", "form"), RUNS)
def test_what_two_saved_one_goes_on_with(group, alone, folder, strategy, kind, form):
    resumed = new_learner(kind, CASES[kind, form])
    resumed.load(folder / "two" / f"{strategy}-{kind}-{form}")
    assert_same(alone[kind, form], learn(resumed, items_of(kind)))
