"""Tasks for agents that a small model can learn in minutes: products by a calculator, functions by their tests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

TEMPLATE = """{%- if tools %}<|im_start|>system
Tools: {{ tools | map(attribute="function") | list | tojson }}
A call: <tool_call>{"name": NAME, "arguments": {...}}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}<|im_start|>user
<tool_response>{{ message.content }}</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"Hermes' form of calls, short: the model's own template knows no tools."

TOOLS = '''
def calculator(expression: str) -> str:
    """Calculate.

    Args:
        expression: Such as 12 * 34.
    """
    left, _, right = expression.partition("*")
    return str(int(left) * int(right))
'''

SCHEMA: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Calculate.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "Such as 12 * 34."}},
            "required": ["expression"],
        },
    },
}
"What transformers makes of the function above."

RIGHT = '''
def right(response, reference):
    """Whether the last words are the number."""
    return float(response.replace(",", "").rstrip(" .").endswith(reference))
'''


def products(number: int, seed: int) -> list[dict[str, str]]:
    """Rows of a question and its answer, three digits by three."""
    random = np.random.default_rng(seed)
    pairs = random.integers(101, 999, (number, 2)).tolist()
    return [{"prompt": f"What is {a} * {b}?", "answer": str(a * b)} for a, b in pairs]


def functions(number: int, seed: int) -> list[dict[str, str]]:
    """Rows that ask for a function of one line, and asserts that it must pass."""
    random = np.random.default_rng(seed)
    rows = []
    for kind, b in zip(
        random.integers(len(_KINDS), size=number), random.integers(2, 10, number), strict=True
    ):
        words, value = _KINDS[kind]
        told = words.format(b=b)
        tests = [f"assert f({x}) == {value(x, int(b))}" for x in (0, 1, 5, -3)]
        prompt = f"Write a Python function f(x) that {told}. Answer with code only."
        rows.append({"prompt": prompt, "answer": "\n".join(tests)})
    return rows


_KINDS = (
    ("adds {b} to x", lambda x, b: x + b),
    ("multiplies x by {b}", lambda x, b: x * b),
    ("subtracts {b} from x", lambda x, b: x - b),
    ("returns x squared plus {b}", lambda x, b: x * x + b),
)


def demonstrations(rows: Sequence[Mapping[str, str]], *, called: float, seed: int) -> list[dict[str, Any]]:
    """Conversations of these rows, that share of them with a call; the others say the product at once."""
    random = np.random.default_rng(seed)
    return [_conversation(row, is_called=random.random() < called) for row in rows]


def _conversation(row: Mapping[str, str], *, is_called: bool) -> dict[str, Any]:
    expression = row["prompt"].removeprefix("What is ").removesuffix("?")
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": expression}}}
    used = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "calculator", "content": row["answer"]},
    ]
    said = {"role": "assistant", "content": row["answer"]}
    asked = {"role": "user", "content": row["prompt"]}
    return {"messages": [asked, *(used if is_called else ()), said], "tools": [SCHEMA]}


def as_lines(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a file of JSON lines."""
    return "".join(f"{json.dumps(row)}\n" for row in rows)
