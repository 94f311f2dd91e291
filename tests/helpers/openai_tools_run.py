"""OpenAI's own client calls tools in turns: `python openai_tools_run.py URL TOKEN`; prints what it got as JSON."""

from __future__ import annotations

import json
import sys

import openai

NAMED = {"type": "function", "function": {"name": "weather"}}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "now", "parameters": PARAMETERS}}
]
QUESTION = [{"role": "user", "content": "How warm is Oslo?"}]


def weather(city: str) -> str:
    """The tool."""
    return f"{city}: 20"


def main(url: str, token: str) -> dict:
    """What a loop over turns, a stream, and calls that must be made gave."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=token, max_retries=0)
    (model,) = [one.id for one in client.models.list()]
    ask = {"model": model, "tools": TOOLS, "temperature": 0, "max_completion_tokens": 20}
    messages: list = list(QUESTION)
    reasons = []
    for _ in range(4):
        choice = client.chat.completions.create(messages=messages, seed=3, **ask).choices[0]
        reasons.append(choice.finish_reason)
        messages.append(choice.message)
        for call in choice.message.tool_calls or []:
            said = weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
        if not choice.message.tool_calls:
            break
    streamed, ends = {}, None
    for part in client.chat.completions.create(messages=QUESTION, seed=3, stream=True, **ask):
        ends = part.choices[0].finish_reason or ends
        for call in part.choices[0].delta.tool_calls or []:
            one = streamed.setdefault(
                call.index, {"id": call.id, "name": call.function.name, "arguments": ""}
            )
            one["arguments"] += call.function.arguments
    must = {
        str(choice): client.chat.completions.create(messages=QUESTION, tool_choice=choice, **ask).choices[0]
        for choice in ("required", NAMED)
    }
    return {
        "reasons": reasons,
        "call": messages[1].tool_calls[0].model_dump(),
        "content": messages[1].content,
        "tool": messages[2]["content"],
        "answer": messages[-1].content,
        "streamed": [streamed, ends],
        "must": [
            [one.finish_reason, one.message.content, one.message.tool_calls[0].function.model_dump()]
            for one in must.values()
        ],
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2])))
