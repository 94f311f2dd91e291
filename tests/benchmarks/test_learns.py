"""What `bench learns` teaches a judge, how it ranks a group, and which bars it finds unmet."""

import json
from pathlib import Path

from rlhfspec.benchmarks.learns import REWARDS, RULE, _has_digit, _met, _taught
from rlhfspec.benchmarks.support.harness import Bench


def test_a_judge_is_taught_as_many_texts_with_a_digit_as_without(tmp_path: Path) -> None:
    data = tmp_path / "gsm8k.jsonl"
    rows = [
        {
            "question": f"Ann has {n} red apples. How many are that?",
            "answer": f"She has {n}<<{n}={n}>> of them.",
        }
        for n in range(9)
    ]
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    taught = list(_taught(Bench("learns", out=tmp_path, mode="quick", data=data)))
    assert len(taught) == 16
    texts = [row["prompt"].removeprefix(RULE) for row in taught]
    assert [row["completion"] for row in taught] == [f"Score: {_has_digit(text):.0f}" for text in texts]
    assert sum(map(_has_digit, texts)) == 8
    assert not any("<<" in text for text in texts)


def test_a_place_in_the_group_is_the_share_of_answers_with_fewer_vowels() -> None:
    names: dict = {}
    exec(REWARDS, names)
    found = names["place"](["aeio", "bcdf", "abcd"])
    assert [one["value"] for one in found] == [1.0, 0.0, 0.5]
    assert [one["vowels"] for one in found] == [1.0, 0.0, 0.25]
    assert names["shortness"]("a b") == -2


def test_bars_are_met_on_their_side() -> None:
    assert _met("distill_loss_last_over_first", 0.5)
    assert not _met("distill_loss_last_over_first", 0.51)
    assert _met("judge_agreement", 0.9)
    assert not _met("judge_agreement", 0.89)
