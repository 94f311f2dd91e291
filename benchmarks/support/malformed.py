"""Bodies that no engine server can take: each a good one with one thing made wrong."""

from __future__ import annotations

import json
import random
from typing import Any

GOOD = {
    "completions": {"prompt": "a", "max_tokens": 2},
    "chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
}
_WRONG_KINDS: tuple[Any, ...] = ("x", -5, 0.5, [], [[]], {}, {"a": 1}, True, [None], 2**70, "\0" * 9)
_TAKEN = {
    "temperature": (0.5, 2**70), "top_p": (0.5,), "seed": (-5,), "stop_token_ids": ([],), "stream": (True,),
    "ignore_eos": (True,),
}  # fmt: skip
"Of the kinds above, what a key takes."
_MESSAGES: tuple[Any, ...] = (
    [],
    [{}],
    ["a"],
    [{"role": "user"}],
    [{"content": "a"}],
    [{"role": "nobody", "content": "a"}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    [{"role": 1, "content": "a"}],
)
_NO_JSON = (
    b"", b"{", b"[]", b"null", b"5", b'"a"', b"\xff\xfe", b"{'prompt': 1}", b'{"prompt": NaN}', b"[" * 5000,
    b'{"prompt": "\\ud800"}', b'{"prompt": "a", "temperature": Infinity}', b'{"a": 1' * 300, b"\0" * 50,
)  # fmt: skip


def malformed(
    count: int, seed: int, *, vocab_size: int, context_tokens: int, max_open: int
) -> list[tuple[str, bytes]]:
    """(route, body) of at least `count` requests that a server with these limits refuses; a function of the seed."""
    draw = random.Random(seed)
    made: list[tuple[str, bytes]] = [(route, raw) for route in GOOD for raw in _NO_JSON]
    too_long = "a b " * context_tokens
    outside = _outside(vocab_size, max_open)
    prompts: tuple[Any, ...] = (
        *([], [[]], "", [""], [-1], [[1], []], ["a", 1], [1, "a"], [[1, "a"]], [2**63]),
        *([vocab_size], too_long),
    )
    messages = (*_MESSAGES, [{"role": "user", "content": too_long}])
    for route, good in GOOD.items():
        for key, values in outside.items():
            made += [(route, _dump(good | {key: value})) for value in values]
        key, values = ("prompt", prompts) if route == "completions" else ("messages", messages)
        made += [(route, _dump(good | {key: value})) for value in values]
        made += [(route, _dump({name: held for name, held in good.items() if name != key}))]
    made += [("completions", _dump(GOOD["completions"] | {"logprobs": value})) for value in (21, 0.5, -1)]
    made += [
        ("chat/completions", _dump(GOOD["chat/completions"] | {"top_logprobs": value})) for value in (1, 20)
    ]
    keys = ["temperature", "top_p", "n", "seed", "stop_token_ids", "stream", "max_tokens", "ignore_eos"]
    while len(made) < count:
        route, key, value = draw.choice(list(GOOD)), draw.choice(keys), draw.choice(_WRONG_KINDS)
        if not any(value is taken or value == taken for taken in _TAKEN.get(key, ())):
            made.append((route, _dump(GOOD[route] | {key: value})))
    return made


def _outside(vocab_size: int, max_open: int) -> dict[str, tuple[Any, ...]]:
    """Values of the right kind that no server takes, or none of these limits, by key."""
    return {
        "temperature": (-0.1, 1e31, 1e-9),
        "top_p": (0, -1, 1.01),
        "top_k": (-2, 2**63),
        "n": (0, -1, 1025, max_open + 1),
        "max_tokens": (0, -1, 10_000, 2**62),
        "seed": (2**63, -(2**63) - 1),
        "stop": (["a"] * 17, "a" * 257, ["", "a"], ""),
        "stop_token_ids": ([-1], [vocab_size], [2**70], [True]),
        "best_of": (2,),
        "model": ("other",),
        "min_p": (-0.1, 1.01),
        "repetition_penalty": (1.1,),
        "presence_penalty": (1,),
        "frequency_penalty": (-1,),
        "logit_bias": ({"5": 1},),
        "response_format": ({"type": "json_object"},),
        "structured_outputs": ({"regex": "a"},),
        "no_such_key": (1,),
        "stream_options": ({"other": 1},),
    }


def _dump(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()
