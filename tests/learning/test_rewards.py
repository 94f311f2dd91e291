"""GSM8K and user rewards: what counts as a number, and which sample a fault is laid at."""

import math
from decimal import Decimal

import numpy as np
from pytest import approx, mark, raises

from core.config import RewardConfig
from core.errors import ConfigError, ModelError, RewardError
from core.records import Prompt
from learning.tasks.base import build_reward
from learning.tasks.gsm8k import Gsm8kReward, final_number


def prompt(reference: str = "", prompt_id: int = 0) -> Prompt:
    return Prompt(prompt_id=prompt_id, token_ids=np.array([1]), text="q", reference=reference)


@mark.parametrize(
    ("text", "number"),
    [
        ("so\n#### 72", "72"),
        ("#### 1,234", "1234"),
        ("#### $5.50", "5.50"),
        ("#### -3", "-3"),
        ("#### -$3", "-3"),
        ("#### $-3", "-3"),
        ("#### 18.", "18"),
        ("####18", "18"),
        ("#### 1\nno: #### 2", "2"),
        ("#### 10 apples", "10"),
    ],
)
def test_the_number_behind_the_last_marks(text, number):
    assert final_number(text) == Decimal(number)


@mark.parametrize("text", ["72", "### 72", "#### seventy", "####\n72", ""])
def test_no_number_in_the_form(text):
    assert final_number(text) is None


def test_gsm8k_pays_for_form_and_for_the_number():
    reference = "He has 2*3=<<2*3=6>>6.\n#### 6"
    rewards = Gsm8kReward().score([prompt(reference)] * 4, ["#### 6.0", "#### 7", "6", "a\n#### $6."])
    assert [r.value for r in rewards] == approx([1.0, 0.2, 0.0, 1.0])
    assert [r.parts["correct"] for r in rewards] == [1.0, 0.0, 0.0, 1.0]
    assert [r.parts["format"] for r in rewards] == [1.0, 1.0, 0.0, 1.0]


def test_gsm8k_takes_a_bare_reference():
    assert Gsm8kReward().score([prompt("1,000")], ["#### 1000"])[0].value == approx(1.0)


def test_gsm8k_names_the_prompt_without_a_number():
    with raises(RewardError, match="prompt 4"):
        Gsm8kReward().score([prompt("none", 4)], ["#### 1"])


def length_reward(prompt: str, response: str, reference: str) -> float:
    return float(len(response))


def dict_reward(prompt: str, response: str, reference: str) -> dict[str, float]:
    return {"value": 0.5, "correct": 1.0}


def failing_reward(prompt: str, response: str, reference: str) -> float:
    if response == "bad":
        raise KeyError("nothing here")
    return math.nan if response == "nan" else 0.0


def test_a_user_function_gives_a_number_or_a_dict():
    number = build_reward(RewardConfig(kind=f"{__name__}:length_reward"))
    assert number.score([prompt()], ["abc"])[0].value == 3.0
    parts = build_reward(RewardConfig(kind=f"{__name__}:dict_reward")).score([prompt()], [""])[0]
    assert (parts.value, parts.parts) == (0.5, {"correct": 1.0})


@mark.parametrize(("response", "words"), [("bad", "raised KeyError"), ("nan", "returned nan")])
def test_a_failing_user_function_names_the_sample(response, words):
    reward = build_reward(RewardConfig(kind=f"{__name__}:failing_reward"))
    with raises(RewardError, match=rf"sample 1 of the batch \(prompt 77\).*{words}"):
        reward.score([prompt(), prompt(prompt_id=77)], ["fine", response])


@mark.parametrize("kind", ["nonsense", "no_such_module:f", f"{__name__}:no_such_name"])
def test_an_unknown_reward_is_a_config_error(kind):
    with raises(ConfigError):
        build_reward(RewardConfig(kind=kind))


def test_a_missing_reward_model_is_a_model_error(tmp_path):
    with raises(ModelError, match="cannot load reward"):
        build_reward(RewardConfig(kind="model", model=str(tmp_path / "nothing")))
