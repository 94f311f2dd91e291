"""The preference task: a rule worth 1 in three parts, demonstrations with room above, pairs that the rule orders."""

import numpy as np
import pytest

from rlhfspec.benchmarks.support.preference_task import (
    MAX_ANSWER_WORDS,
    chat_tokenizer,
    draw_answer,
    draw_pair,
    draw_question,
    gold_score,
)


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("sure the fox runs fast", 1.0),
        ("ugh the fox runs fast", 0.7),
        ("sure the owl runs fast", 0.5),
        ("sure the fox runs fast and the owl runs fast", 0.3),
        ("sure the fox runs fast and it sleeps late and it likes water", 0.8),
        ("well it runs fast", 0.2),
        ("", 0.0),
    ],
)
def test_the_rule_pays_for_the_subject_for_courtesy_and_for_brevity(answer, score):
    assert gold_score("fox", answer) == pytest.approx(score)


def test_demonstrations_leave_room_above_their_mean():
    rng = np.random.default_rng(0)
    questions = [draw_question(rng) for _ in range(1000)]
    scores = [gold_score(one.subject, draw_answer(one, rng)) for one in questions]
    assert 0.45 < np.mean(scores) < 0.65


def test_of_a_pair_the_first_is_better_by_the_rule():
    rng = np.random.default_rng(0)
    for _ in range(200):
        question, better, worse = draw_pair(rng)
        assert gold_score(question.subject, better) > gold_score(question.subject, worse)


def test_every_word_is_a_token_and_comes_back_as_it_was():
    tokenizer, rng = chat_tokenizer(), np.random.default_rng(0)
    for _ in range(200):
        question, better, worse = draw_pair(rng)
        for text in (question.text, better, worse):
            ids = tokenizer(text)["input_ids"]
            assert len(ids) == len(text.split()) < MAX_ANSWER_WORDS
            assert tokenizer.unk_token_id not in ids
            assert tokenizer.decode(ids, skip_special_tokens=True) == text
