"""Reward functions as a user would write them; Ray workers import them by name."""


def vowel_share(prompt: str, response: str, reference: str) -> dict[str, float]:
    """Rewards a random model unevenly, so that an update moves the weights."""
    share = sum(letter in "aeiou" for letter in response) / max(len(response), 1)
    return {"value": share, "length": float(len(response))}


def broken(prompt: str, response: str, reference: str) -> float:
    """Return something that is no reward."""
    return float("nan")
