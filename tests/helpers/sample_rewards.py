"""Reward functions as a user would write them; Ray workers import them by name."""

import sys
import time


def vowel_share(prompt: str, response: str, reference: str) -> dict[str, float]:
    """Rewards a random model unevenly, so that an update moves the weights."""
    share = sum(letter in "aeiou" for letter in response) / max(len(response), 1)
    return {"value": share, "length": float(len(response))}


def opened(prompt: str, response: str, reference: str, prefill: str) -> float:
    """See what the prompt has opened of the answer."""
    return float(prefill + response == "<think> good </think> fine")


def broken(prompt: str, response: str, reference: str) -> float:
    """Return something that is no reward."""
    return float("nan")


def leaving(prompt: str, response: str, reference: str) -> float:
    """End the process, as a script would."""
    sys.exit(3)


def hanging(prompt: str, response: str, reference: str) -> float:
    """Never come back within a test."""
    time.sleep(600)
    return 0.0
