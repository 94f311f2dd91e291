"""The chain task: its text, its tail, its reward."""

import numpy as np
from pytest import approx, mark, raises

from rlhfspec.core.errors import RewardError
from rlhfspec.core.records import Prompt
from rlhfspec.learning.tasks.chain_task import (
    ChainProblem,
    chain_reward,
    draw_problem,
    parse_prompt,
    solution,
)

THREE = ChainProblem(num_steps=3, letter=2, shift=5)  # c -> h -> m -> b (the ring ends at p)


def score(response: str, prompt: str = THREE.prompt):
    return chain_reward(Prompt(prompt_id=9, token_ids=np.arange(7), text=prompt, reference=""), response)


def test_prompt_and_solution_are_as_the_docstring_says():
    assert THREE.prompt == "03:c+5="
    assert solution(THREE) == "h;02:h+5=m;01:m+5=b;#b"
    assert len(solution(THREE)) == 9 * 3 - 5
    assert parse_prompt(THREE.prompt) == THREE


def test_the_alphabet_is_a_ring():
    assert solution(ChainProblem(num_steps=1, letter=15, shift=1)) == "a;#a"


@mark.parametrize("seed", [0, 1, 2])
def test_response_lengths_are_heavy_tailed(seed):
    rng = np.random.default_rng(seed)
    lengths = [len(solution(draw_problem(rng))) + 1 for _ in range(4000)]
    p50, p99 = np.percentile(lengths, [50, 99])
    assert p99 >= 6 * p50


def test_the_right_solution_earns_one():
    reward = score(solution(THREE))
    assert reward.value == approx(1.0)
    assert reward.parts == {"correct": 1.0, "steps": 1.0}


def test_one_slip_costs_one_step_and_the_answer():
    # the second step writes n for m and goes on rightly from it: n + 5 = c; 2 of 3 steps
    reward = score("h;02:h+5=n;01:n+5=c;#c")
    assert reward.parts == {"correct": 0.0, "steps": approx(2 / 3)}
    assert reward.value == approx(0.2 * 2 / 3)


def test_a_right_letter_needs_the_right_form():
    assert score("#b").parts == {"correct": 1.0, "steps": 0.0}
    assert score("b").parts["correct"] == 0.0
    assert score(solution(THREE) + "b").parts["correct"] == 0.0
    assert score("").value == 0.0


def test_extra_steps_dilute():
    # three right steps among five written: 3/5
    assert score("h;02:h+5=m;01:m+5=b;00:b+5=g;;#b").parts["steps"] == approx(3 / 5)


def test_slips_are_wrong_letters_carried_on():
    text = solution(THREE, slip_rate=1.0, rng=np.random.default_rng(0))
    assert score(text).parts["steps"] == 0.0


def test_a_foreign_prompt_is_named():
    with raises(RewardError, match="prompt 9"):
        score("x", prompt="What is 2+2?")
