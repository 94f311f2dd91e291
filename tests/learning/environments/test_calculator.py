"""The calculator answers annotations, keeps out of everything else, and scores the end."""

import numpy as np
import pytest

from rlhfspec.core.errors import ConfigError
from rlhfspec.core.records import Prompt
from rlhfspec.learning.environments.calculator import Calculator, calculate
from rlhfspec.learning.environments.environment_protocol import Step, is_raw

PROMPT = Prompt(prompt_id=0, token_ids=np.arange(3), text="q", reference="so #### 72")

WRONG = {"correct": 0.0}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("48/2", "24"),
        ("48+24", "72"),
        ("(1+2)*3 - 4", "5"),
        ("1/3", "0.3333"),
        ("0.1+0.2", "0.3"),
        ("-3*2", "-6"),
        ("7", "7"),
        ("1/0", "?"),
        ("2**99", "?"),
        ("x+1", "?"),
        ("__import__('os')", "?"),
        ("9" * 40, "?"),
        ("((((1", "?"),
        ("", "?"),
    ],
)
def test_sums_have_their_exact_value_and_nothing_else_is_run(text, value):
    assert calculate(text) == value


def test_an_annotation_is_answered_and_the_end_scored():
    calculator = Calculator()
    calculator.reset(PROMPT)
    assert calculator.step("half of 48 is 48/2 =") == Step("", parts=WRONG), (
        "a bare equals sign is the policy's own"
    )
    assert calculator.step(" <<48/2=") == Step("24>>", parts=WRONG)
    assert calculator.step("24. Then <<48+24=").observation == "72>>"
    end = calculator.step("72\n#### 72")
    assert end.done and end.reward == pytest.approx(1.0) and end.parts == {"correct": 1.0}


def test_without_a_reference_nothing_is_right_or_wrong():
    calculator = Calculator()
    calculator.reset(Prompt(prompt_id=0, token_ids=np.arange(3), text="q"))
    assert calculator.step("#### 72") == Step(done=True)


def test_every_call_may_be_answered_and_paid():
    calculator = Calculator(answer_all=True, turn_reward=0.1)
    calculator.reset(PROMPT)
    assert calculator.step("abc 3+4=") == Step("7", reward=0.1, parts=WRONG)
    assert calculator.step("xyz=") == Step("?", parts=WRONG)


def test_the_calculator_goes_on_inside_of_the_policys_message_and_raw_is_a_bool():
    assert is_raw(Calculator())
    calculator = Calculator()
    calculator.raw = "yes"  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="expected True or False"):
        is_raw(calculator)
