"""Reward functions that misbehave, each as its name says, where the response says `bad`."""

import asyncio
import os
import statistics
import subprocess
import sys
import time


def fine(prompt, response, reference):
    """The length."""
    return float(len(response))


def hangs(prompt, response, reference):
    """A loop that no exception ends."""
    while response == "bad":
        pass
    return float(len(response))


def sleeps_in_c(prompt, response, reference):
    """A call into C that never comes back."""
    if response == "bad":
        time.sleep(3600)
    return float(len(response))


def raises(prompt, response, reference):
    """An exception of the user's."""
    if response == "bad":
        raise ValueError("no such thing")
    return float(len(response))


def leaves(prompt, response, reference):
    """The end, as of a script."""
    if response == "bad":
        sys.exit(3)
    return float(len(response))


def crashes(prompt, response, reference):
    """The process is gone, as after a fault in C."""
    if response == "bad":
        os._exit(7)
    return float(len(response))


def gives_none(prompt, response, reference):
    """A forgotten return."""
    return None if response == "bad" else float(len(response))


def gives_nan(prompt, response, reference):
    """No number."""
    return float("nan") if response == "bad" else float(len(response))


def gives_infinity(prompt, response, reference):
    """No number either."""
    return float("inf") if response == "bad" else float(len(response))


def gives_text(prompt, response, reference):
    """A number as text is text."""
    return "1.0" if response == "bad" else float(len(response))


def gives_bad_part(prompt, response, reference):
    """A part that is no number."""
    return {"value": 1.0, "part": None if response == "bad" else 2.0}


async def waits(prompt, response, reference):
    """A coroutine."""
    return float(len(response))


_arrived: list[str] = []


async def waits_for_ten(prompt, response, reference):
    """Comes back when ten calls have come."""
    _arrived.append(response)
    while len(_arrived) < 10:
        await asyncio.sleep(0.001)
    return float(len(response))


async def hangs_in_await(prompt, response, reference):
    """A judge that never answers."""
    if response == "bad":
        await asyncio.sleep(3600)
    return float(len(response))


async def raises_in_await(prompt, response, reference):
    """A judge whose line breaks off."""
    await asyncio.sleep(0)
    if response == "bad":
        raise ValueError("no such thing")
    return float(len(response))


async def crashes_in_await(prompt, response, reference):
    """The process is gone while other calls wait."""
    await asyncio.sleep(0)
    if response == "bad":
        os._exit(7)
    return float(len(response))


def asks(prompt, response, reference, *, finish_reason, num_tokens, messages, sample_index):
    """By name, what the stage knows beside the texts."""
    assert messages == [{"role": "user", "content": "hi"}]
    return {"value": float(num_tokens), "index": sample_index, "cut": finish_reason == "length"}


def asks_for_a_column(prompt, response, answer, *, level):
    """A column of the data set; its third argument is called as another."""
    return float(level)


def sees_a_column(prompt, response, reference, **columns):
    """The same with all columns."""
    return float(columns["level"])


def takes_all(prompt, response, reference, **columns):
    """Whatever there is."""
    known = ["finish_reason", "iteration", "messages", "num_tokens", "prefill", "prompt_id"]
    return float(sorted(columns) == [*known, "response_turns", "sample_index", "token_ids"])


def slow(prompt, response, reference):
    """A fifth of a second each; tells in which replica."""
    time.sleep(0.2)
    return {"value": float(len(response)), "replica": os.getppid()}


def forks(prompt, response, reference):
    """A copy of the process that answers too, or a process that outlives the call."""
    if response == "sleeper":
        return {"value": 0.0, "pid": subprocess.Popen(["sleep", "3600"]).pid}
    os.fork()
    return float(len(response))


def against_the_others(completions, **columns):
    """TRL's form: each response's length against those beside it, in standard deviations; 'bad' is no response."""
    if "hang" in completions:
        time.sleep(60.0)
    lengths = [len(completion) for completion in completions]
    std = statistics.pstdev(lengths) or 1.0
    scores = [(length - statistics.mean(lengths)) / std for length in lengths]
    return [None if text == "bad" else score for text, score in zip(completions, scores, strict=True)]


async def in_turn(responses, sample_index):
    """Ours with lists: the place of each response in its list, and whose it is."""
    await asyncio.sleep(0)
    return [{"value": float(place), "index": index} for place, index in enumerate(sample_index)]


def pays_tokens(response, num_tokens):
    """A tenth for each token but the last; of "bad" one number too many."""
    return {"tokens": [0.1] * (num_tokens - 1) + [0.0] * (1 + (response == "bad")), "why": 1.0}


def prints(prompt, response, reference):
    """Two lines, of which one is no text of ASCII."""
    print(f"saw {response}\nä")
    return 1.0
