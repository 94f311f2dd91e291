"""GSM8K and user rewards: what counts as a number, and which sample a fault is laid at."""

import sys
from decimal import Decimal

import numpy as np
from pytest import approx, mark, raises

from rlhfspec.core.config import RewardConfig
from rlhfspec.core.errors import ConfigError, ModelError, RewardError
from rlhfspec.core.records import Prompt
from rlhfspec.learning.rewards.reward_function import build_reward
from rlhfspec.learning.tasks.gsm8k import final_number, gsm8k_reward


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
        ("#### $5/hour", "5"),
        ("#### **no** #### 5: so", "5"),
        ("#### 5\\%", "5"),
        ("#### 5 \\text{ m}", "5"),
        ("#### 18, 20", "18"),
        ("#### \u22125", "-5"),
        ("#### 5!", "5"),
        ("#### 5 or 6", "5"),
        ("**#### 5** (2 dozen) -- so", "5"),
        ("#### 5 - so", "5"),
        ("#### 10 = 10", "10"),
        ("#### 18=$18.", "18"),
    ],
)
def test_the_number_behind_the_last_marks(text, number):
    assert final_number(text) == Decimal(number)


@mark.parametrize("text", ["72", "### 72", "#### seventy", "####\n72", ""])
def test_no_number_in_the_form(text):
    assert final_number(text) is None


TERMS = [
    "1/2",
    "1 / 2",
    "-1,000/3",
    "2^10",
    "10:30",
    "3.5e2",
    "2\\frac{1}{2}",
    "3 \\sqrt{2}",
    "2*3",
    "1 000",
    "2 1/2",
    "7 + 3 = 10",
    "3 - 1",
    "3\u22121",
    "5! = 120",
    "$5 + $3",
    "2**3",
    "2 ** 3",
    "2\u00b73",
    "5\u00b2",
    "2 \u00bd",
    "5 - -3",
    "3 + (-2)",
    "3 = -3",
    "7 + x",
    "6 x 7",
]


@mark.parametrize("term", TERMS)
def test_the_beginning_of_another_number_is_no_number(term):
    assert final_number(f"#### {term}") is None
    with raises(RewardError, match="must be a plain number"):
        gsm8k_reward(prompt(term), "#### 1")


def test_gsm8k_pays_for_form_and_for_the_number():
    reference = "He has 2*3=<<2*3=6>>6.\n#### 6"
    rewards = [gsm8k_reward(prompt(reference), said) for said in ("#### 6.0", "#### 7", "6", "a\n#### $6.")]
    assert [r.value for r in rewards] == approx([1.0, 0.2, 0.0, 1.0])
    assert [r.parts["correct"] for r in rewards] == [1.0, 0.0, 0.0, 1.0]
    assert [r.parts["format"] for r in rewards] == [1.0, 1.0, 0.0, 1.0]


def test_gsm8k_takes_a_bare_reference():
    assert gsm8k_reward(prompt("1,000"), "#### 1000").value == approx(1.0)


def test_gsm8k_names_the_prompt_without_a_number():
    with raises(RewardError, match="prompt 4"):
        gsm8k_reward(prompt("none", 4), "#### 1")


def length_reward(prompt: str, response: str, reference: str) -> float:
    return float(len(response))


def dict_reward(prompt: str, response: str, reference: str) -> dict[str, float]:
    return {"value": 0.5, "correct": 1.0}


def test_a_user_function_gives_a_number_or_a_dict():
    number = build_reward(RewardConfig(kind=f"{__name__}:length_reward"))
    assert number.score([prompt()], ["abc"])[0].value == 3.0
    parts = build_reward(RewardConfig(kind=f"{__name__}:dict_reward")).score([prompt()], [""])[0]
    assert (parts.value, parts.parts) == (0.5, {"correct": 1.0})


@mark.parametrize("kind", ["nonsense", "no_such_module:f", f"{__name__}:no_such_name"])
def test_an_unknown_reward_is_a_config_error(kind):
    with raises(ConfigError):
        build_reward(RewardConfig(kind=kind))


def test_a_missing_reward_model_is_a_model_error(tmp_path):
    with raises(ModelError, match="cannot load reward"):
        build_reward(RewardConfig(kind="model", model=str(tmp_path / "nothing")))


@mark.parametrize("kind", [":f", "module:", ":", "a b:f", ".m:f", "m:f:g", "m:f.", "m:.g"])
def test_a_path_that_names_no_function_is_a_config_error(kind):
    with raises(ConfigError, match="names no function: expected package"):
        build_reward(RewardConfig(kind=kind))


@mark.parametrize(
    ("source", "words"),
    [
        ("x = 1\n1 / 0\n", r"raised ZeroDivisionError: division by zero \(mine_\w+\.py, line 2\)"),
        ("import sys\nsys.exit('bye')\n", "raised SystemExit: bye"),
        ("from math import nothing\n", "raised ImportError: cannot import name 'nothing'"),
        ("def score(:\n", "cannot import mine"),
        ("def score(prompt): return 0.0\n", r"cannot be called as score\(prompt, response, reference\)"),
    ],
)
def test_a_module_of_the_caller_s_folder_is_found_and_its_faults_are_config_errors(
    source, words, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    name = f"mine_{abs(hash(source))}"
    (tmp_path / f"{name}.py").write_text(source)
    with raises(ConfigError, match=words):
        build_reward(RewardConfig(kind=f"{name}:score"))
    (tmp_path / f"{name}_good.py").write_text("def score(prompt, response, reference): return 0.5\n")
    assert build_reward(RewardConfig(kind=f"{name}_good:score")).score([prompt()], ["a"])[0].value == 0.5
