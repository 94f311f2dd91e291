"""The reward of the stored run: the share of vowels in a response."""


def vowel_share(completions: list[str], **columns: object) -> list[float]:
    """One reward a response."""
    return [sum(letter in "aeiou" for letter in text) / max(len(text), 1) for text in completions]
