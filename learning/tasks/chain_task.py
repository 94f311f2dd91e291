"""The chain task: letters shifted step by step, with a heavy-tailed number of steps.

A prompt `03:c+5=` gives the number of steps, a letter and a shift; the answer writes out every step,
counts down, and ends with the last letter: `h;02:h+5=m;01:m+5=b;#b`. The alphabet is a ring of sixteen
letters. Whatever one step needs stands at a fixed distance before it, so a very small model learns the
task in a minute; a response of n steps has 9n - 5 characters and an end token. The number of steps is
log-normal and capped: the 99th percentile of the response length is more than six times the median.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...core.errors import RewardError
from ...core.records import Prompt, Reward

LETTERS = "abcdefghijklmnop"
MAX_SHIFT = 5
ALPHABET = LETTERS + "0123456789:+=;#"
MAX_STEPS = 28
MEDIAN_STEPS = 4.2
SIGMA = 0.9
MAX_RESPONSE_TOKENS = 9 * MAX_STEPS - 5 + 1
STEP_SHARE = 0.2
"part of the reward paid for the share of right steps; the rest is for the right answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainProblem:
    """One problem: `num_steps` shifts of `letter` (0-15) by `shift` (1-5)."""

    num_steps: int
    letter: int
    shift: int

    @property
    def prompt(self) -> str:
        """The prompt text."""
        return f"{self.num_steps:02d}:{LETTERS[self.letter]}+{self.shift}="

    @property
    def answer(self) -> str:
        """The last letter."""
        return LETTERS[(self.letter + self.num_steps * self.shift) % len(LETTERS)]


def draw_problem(rng: np.random.Generator) -> ChainProblem:
    """Draw one problem; the number of steps is log-normal(median 4.2, sigma 0.9), 1 to 28."""
    steps = int(np.clip(round(float(rng.lognormal(np.log(MEDIAN_STEPS), SIGMA))), 1, MAX_STEPS))
    return ChainProblem(
        num_steps=steps, letter=int(rng.integers(len(LETTERS))), shift=int(rng.integers(1, MAX_SHIFT + 1))
    )


def solution(problem: ChainProblem, *, slip_rate: float = 0.0, rng: np.random.Generator | None = None) -> str:
    """Write out the response. A slip writes a wrong letter and goes on from it, as a person would."""
    letter, parts = problem.letter, []
    for left in range(problem.num_steps, 0, -1):
        if left < problem.num_steps:
            parts.append(f"{left:02d}:{LETTERS[letter]}+{problem.shift}=")
        letter = (letter + problem.shift) % len(LETTERS)
        if slip_rate > 0.0 and rng is not None and rng.random() < slip_rate:
            letter = (letter + int(rng.integers(1, len(LETTERS)))) % len(LETTERS)
        parts.append(f"{LETTERS[letter]};")
    return "".join(parts) + "#" + LETTERS[letter]


def parse_prompt(text: str) -> ChainProblem:
    """Read a prompt back. Raises ValueError when it is not a chain prompt."""
    if len(text) != 7 or text[2] != ":" or text[4] != "+" or text[6] != "=" or text[3] not in LETTERS:
        raise ValueError(f"'{text}' is not a chain prompt such as 03:c+5=")
    return ChainProblem(num_steps=int(text[:2]), letter=LETTERS.index(text[3]), shift=int(text[5]))


def chain_reward(prompt: Prompt, response: str) -> Reward:
    """0.8 for the right letter behind `#`, 0.2 times the share of steps that are right in themselves.

    A step is right when it counts down, repeats the letter written before it and shifts it rightly;
    one slip costs one step there but, as a rule, the whole 0.8. Parts: `correct` (0 or 1), `steps`.
    Raises RewardError when a prompt is no chain prompt.
    """
    try:
        problem = parse_prompt(prompt.text)
    except ValueError as error:
        raise RewardError(f"prompt {prompt.prompt_id}: {error}; use data.task chain with it") from error
    *steps, final = response.split(";")
    share = _num_right_steps(problem, steps) / max(problem.num_steps, len(steps))
    correct = float(final == "#" + problem.answer)
    return Reward(
        value=STEP_SHARE * share + (1.0 - STEP_SHARE) * correct,
        parts={"correct": correct, "steps": share},
    )


def _num_right_steps(problem: ChainProblem, steps: Sequence[str]) -> int:
    num_right, letter = 0, problem.letter
    for index, step in enumerate(steps[: problem.num_steps]):
        start = f"{problem.num_steps - index:02d}:{LETTERS[letter]}+{problem.shift}=" if index else ""
        num_right += step == start + LETTERS[(letter + problem.shift) % len(LETTERS)]
        # go on from what was written; where that is no letter, from what should have been
        written = LETTERS.find(step[-1:]) if step else -1
        letter = written if written >= 0 else (letter + problem.shift) % len(LETTERS)
    return num_right
