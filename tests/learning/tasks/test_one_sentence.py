"""The one-sentence task: its prompts and its reward."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from rlhfspec.core.records import Prompt, Reward
from rlhfspec.learning.tasks.one_sentence import QUESTIONS, SUBJECTS, draw_prompts, one_sentence_reward


def score(response: str, subject: str = "lamp") -> Reward:
    prompt = Prompt(prompt_id=0, token_ids=np.arange(3), text="What is a lamp?", reference=subject)
    reward = one_sentence_reward(prompt, response)
    return reward


def test_a_short_whole_sentence_that_names_its_subject_earns_everything() -> None:
    reward = score("A lamp gives light in the dark.")
    assert reward.value == pytest.approx(1.0)
    assert reward.parts == {"brevity": 1.0, "sentence": 1.0, "subject": 1.0}


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("A lamp gives light in the dark and", 0.7),  # no end
        ("A lamp gives light. It is a thing.", 0.7),  # two sentences
        ("It gives light in the dark.", 0.8),  # of what?
        ("Lamp.", 0.0),  # no sentence
        ("", 0.0),
        ("A lamp is " + "very " * 40 + "bright.", 0.5),  # far too long
    ],
)
def test_each_fault_costs_its_share(response: str, value: float) -> None:
    assert score(response).value == pytest.approx(value)


def test_brevity_falls_with_every_character_between_the_limits() -> None:
    values = [score("A lamp is " + "a" * count + " x.").parts["brevity"] for count in range(37, 138)]
    assert values[0] == 1.0 and values[-1] == 0.0
    assert all(b < a for a, b in pairwise(values))


def test_prompts_are_all_pairs_in_the_order_of_the_seed() -> None:
    count = len(QUESTIONS) * len(SUBJECTS)
    assert len(set(SUBJECTS)) == len(SUBJECTS)
    drawn = draw_prompts(count, np.random.default_rng(0))
    assert len(set(drawn)) == count
    assert all(subject in text for text, subject in drawn)
    assert drawn == draw_prompts(count, np.random.default_rng(0))
    assert drawn != draw_prompts(count, np.random.default_rng(1))
