"""Two trainers that score by the engine: what one learns, and every log-probability the sampler's to the bit."""

import numpy as np
import pytest
from group_scoring import CASES, RUNS, learn_scored, learn_scored_in_group
from trainer_group import run_group


@pytest.fixture(scope="module")
def alone():
    return {case: learn_scored(case) for case in CASES}


@pytest.fixture(scope="module")
def group():
    results = run_group(2, learn_scored_in_group)
    assert not [result for result in results if isinstance(result, BaseException)]
    return results


@pytest.mark.parametrize(("strategy", "case"), RUNS)
def test_two_trainers_that_score_by_the_engine_learn_what_one_learns(group, alone, strategy, case):
    expected, _ = alone[case]
    for of_rank in group:
        weights, metrics = of_rank[strategy, case]
        for name, weight in expected.items():
            np.testing.assert_allclose(weights[name], weight, rtol=0, atol=1e-5, err_msg=name)
        for one in metrics:
            assert one["mismatch/bit_equal_share"] == 1.0
            assert one["ratio_at_first_minibatch"] == 1.0
        assert metrics[0]["reference_kl"] == 0.0 < metrics[1]["reference_kl"]
