"""Environments of the package `verifiers`, for tests that run beside it."""

from __future__ import annotations

import verifiers as vf  # type: ignore[import-not-found]
from datasets import Dataset


class Guess(vf.MultiTurnEnv):
    """Says what is wrong until the answer is said."""

    async def setup_state(self, state):
        state["tries"] = 0
        return state

    async def env_response(self, messages, state, **kwargs):
        state["tries"] += 1
        if state["answer"] in messages[-1].content:
            state["final_env_response"] = [vf.UserMessage(content="yes")]
            return []
        return [vf.UserMessage(content=f"try {state['tries']} of {state['info']['tries']}")]


def right(completion, answer):
    """Whether it was said at all."""
    return float(any(answer in one.content for one in completion))


def tries(state):
    """How often it was tried."""
    return state["tries"]


def best(completions):
    """A score that compares."""
    return [1.0 for _ in completions]


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: one
        b: the other
    """
    return a + b


def load_environment(kind: str = "multi", rows: int = 3):
    """Guess, in one turn or several, or scored in groups."""
    data = Dataset.from_list(
        [{"question": f"guess {i}", "answer": str(i), "info": {"tries": 3}} for i in range(rows)]
    )
    own = {"dataset": data, "system_prompt": "Guess."}
    if kind == "group":
        return vf.SingleTurnEnv(rubric=vf.Rubric(funcs=[right, best]), **own)
    if kind == "tools":
        return vf.ToolEnv(tools=[add], rubric=vf.Rubric(funcs=[right]), **own)
    rubric = vf.Rubric(
        funcs=[right, tries] if kind == "multi" else [right], weights=[1.0, 0.1][: 1 + (kind == "multi")]
    )
    return (
        Guess(rubric=rubric, max_turns=3, **own)
        if kind == "multi"
        else vf.SingleTurnEnv(rubric=rubric, **own)
    )
