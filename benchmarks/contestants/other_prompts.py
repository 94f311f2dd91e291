"""Prompts of another kind than a head was made from: code and chat."""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlhfspec.core.records import Prompt

CODE = (
    "Write a Python function that returns the longest common prefix of a list of strings.",
    "Write a SQL query that finds the three best paid employees of every department.",
    "Explain what this does and rewrite it without recursion: def f(n): return n if n < 2 else f(n-1) + f(n-2)",
    "Write a JavaScript function that debounces another function.",
    "Implement a queue with two stacks in Java.",
    "Write a bash script that renames all .jpeg files in a folder to .jpg.",
    "Write unit tests for a function that parses dates in the form YYYY-MM-DD.",
    "Write a C function that reverses a linked list in place.",
)
CHAT = (
    "What should I see in Lisbon in two days?",
    "Write a short poem about the first snow.",
    "My neighbour plays loud music at night. How do I ask them to stop politely?",
    "Summarise the plot of Romeo and Juliet in five sentences.",
    "Give me a recipe for pancakes without eggs.",
    "What is the difference between weather and climate?",
    "Help me write a thank-you note to my teacher.",
    "Which exercises help against back pain?",
)


def other_prompts(tokenizer: PreTrainedTokenizerBase, questions: tuple[str, ...]) -> list[Prompt]:
    """The questions as chat turns."""
    prompts = []
    for number, question in enumerate(questions):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        prompts.append(Prompt(prompt_id=number, token_ids=np.array(ids, dtype=np.int64), text=question))
    return prompts
