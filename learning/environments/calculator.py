"""A calculator for GSM8K: the policy writes `<<48/2=` and reads `24>>` (the data set's own annotations).

Source: Cobbe et al. 2021, 'Training verifiers to solve math word problems', section 3 and appendix C: sampling is
overridden behind an equals sign of an annotation.
"""

from __future__ import annotations

import ast
import operator
import re
from fractions import Fraction

from ...core.records import Prompt
from ..tasks.gsm8k import gsm8k_reward, reference_number
from .environment_protocol import Step

_CALL = re.compile(r"<<(?P<sum>[^<>=]{1,80})=$")
_BARE = re.compile(r"(?P<sum>[-+*/().\d ]{1,80})=$")
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_LARGEST = 10**15
UNKNOWN = "?"
CORRECT = "correct"


class Calculator:
    """Answers what stands before `=`; done when a turn ends otherwise, with the GSM8K reward of all that was said."""

    stop_texts = ("=",)
    raw = True

    def __init__(self, answer_all: bool = False, turn_reward: float = 0.0) -> None:
        """A calculator.

        Args:
            answer_all: answer every equals sign, outside of annotations too.
            turn_reward: for each call that has an answer.
        """
        self._answer_all = answer_all
        self._turn_reward = turn_reward
        self._said = ""
        self._prompt: Prompt | None = None

    def require_prompt(self, prompt: Prompt) -> None:
        """Raise RewardError where there is a reference, but no number in it."""
        if prompt.reference:
            reference_number(prompt)

    def reset(self, prompt: Prompt) -> None:
        """Begin."""
        self._said, self._prompt = "", prompt

    def step(self, response: str) -> Step:
        """Answer a call, or score the end."""
        self._said += response
        if not response.endswith("="):
            return self._end()
        call = _CALL.search(self._said)
        if call is None and not self._answer_all:
            return Step(parts=self._no_answer)
        found = call or _BARE.search(self._said)
        value = calculate(found["sum"]) if found is not None else UNKNOWN
        answer = f"{value}>>" if call is not None else value
        self._said += answer
        reward = 0.0 if value == UNKNOWN else self._turn_reward
        return Step(answer, reward=reward, parts=self._no_answer)

    @property
    def _no_answer(self) -> dict[str, float]:
        """Parts of a step that does not end the episode: one that is cut has not answered, and is wrong."""
        return {CORRECT: 0.0} if self._prompt is not None and self._prompt.reference else {}

    def _end(self) -> Step:
        if self._prompt is None or not self._prompt.reference:
            return Step(done=True)
        reward = gsm8k_reward(self._prompt, self._said)
        return Step(reward=reward.value, done=True, parts={CORRECT: reward.parts[CORRECT]})


def calculate(text: str) -> str:
    """Return the value of a sum, with at most four decimals, or `?` for what is none."""
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return UNKNOWN
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.4f}".rstrip("0").rstrip(".")


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number):
            value = Fraction(str(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            value = _OPERATORS[type(op)](_value(left), _value(right))
        case _:
            raise ValueError("no sum")
    if abs(value) > _LARGEST or value.denominator > _LARGEST:
        raise ValueError("too large")
    return value
