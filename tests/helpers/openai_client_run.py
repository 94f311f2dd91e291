"""OpenAI's own client asks a server: `python openai_client_run.py URL TOKEN MAX_OPEN`; prints what it got as JSON."""

from __future__ import annotations

import json
import sys

import openai

MESSAGES = [{"role": "user", "content": "hé"}]


def main(url: str, token: str, max_open: int) -> dict:
    """What each kind of request gave."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=token, max_retries=0)
    (model,) = [one.id for one in client.models.list()]
    whole = client.completions.create(model=model, prompt="a", max_tokens=12, seed=3, logprobs=0)
    chat = client.chat.completions.create(
        model=model, messages=MESSAGES, max_completion_tokens=12, seed=3, logprobs=True
    )
    parts = client.chat.completions.create(
        model=model,
        messages=MESSAGES,
        max_completion_tokens=12,
        seed=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    said, usage = "", None
    for part in parts:
        said += "".join(choice.delta.content or "" for choice in part.choices)
        usage = part.usage or usage
    refused = {}
    attempts = {
        "room": lambda: client.completions.create(model=model, prompt="a", max_tokens=4),
        "token": lambda: openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0).models.list(),
        "model": lambda: client.completions.create(model="other", prompt="a"),
        "key": lambda: client.completions.create(model=model, prompt="a", presence_penalty=1.0),
    }
    full = client.completions.create(
        model=model,
        prompt="x",
        n=max_open,
        max_tokens=480,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(full)
    for name, attempt in attempts.items():
        try:
            attempt()
        except openai.APIStatusError as error:
            refused[name] = [type(error).__name__, error.status_code, error.message]
    full.close()
    return {
        "text": whole.choices[0].text,
        "text_logprobs": whole.choices[0].logprobs.token_logprobs,
        "usage": whole.usage.completion_tokens,
        "chat": chat.choices[0].message.content,
        "chat_logprobs": [one.logprob for one in chat.choices[0].logprobs.content],
        "streamed": said,
        "streamed_usage": usage.completion_tokens,
        "refused": refused,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
