"""The one-sentence task: a chat model is asked about an everyday thing and is to answer in one short sentence.

Prompts are a question and a subject, both from the lists below (our own); nothing is asked of the model's knowledge.
The reward checks the form by rules, so a small model that tends to go on and on learns it within minutes.
"""

from __future__ import annotations

import re

import numpy as np

from ...core.records import Prompt, Reward

_WORDS = """
apple airport anchor balloon bakery bridge bicycle butterfly calendar camel candle carpet castle cheese
clock cloud coffee compass cow desert diamond doctor dolphin donkey dragon eagle elephant engine farmer
feather festival fire flute forest fountain garden giraffe glacier glove guitar hammer harbor helmet
honey horse hotel island jacket jungle kettle kitchen ladder lake lamp lemon library lighthouse lion
magnet map market mirror monkey moon mountain museum mushroom needle ocean olive onion orange orchestra
oven owl painter paper parrot pencil penguin piano pilot pirate planet potato puzzle rabbit radio rainbow
river robot rocket rose sailor salt scarf school shadow sheep ship shoe snow spider spoon station storm
sugar sun teacher telescope tiger tomato train tree umbrella valley village violin volcano wallet watch
waterfall whale wheel window winter wolf zebra
"""
SUBJECTS = tuple(_WORDS.split())
QUESTIONS = (
    "In one short sentence: what is a {0}?",
    "In one short sentence, describe a {0}.",
    "Say one short thing about the {0}.",
    "Explain the word {0} in one short sentence.",
)
MAX_CHARS = 50
"an answer of at most so many characters is short"
TOO_MANY_CHARS = 150
"from here on nothing is paid for its length"
MIN_WORDS = 4
"below, it is no sentence"
BREVITY_SHARE, SENTENCE_SHARE, SUBJECT_SHARE = 0.5, 0.3, 0.2
_END = re.compile(r"[.!?]+(?=\s|$)")


def draw_prompts(count: int, rng: np.random.Generator) -> list[tuple[str, str]]:
    """Return `count` prompts with their subjects: all pairs in an order of `rng`, again and again."""
    pairs = [(question, subject) for question in QUESTIONS for subject in SUBJECTS]
    order = rng.permutation(len(pairs))
    chosen = [pairs[order[index % len(pairs)]] for index in range(count)]
    return [(question.format(subject), subject) for question, subject in chosen]


def one_sentence_reward(prompt: Prompt, response: str) -> Reward:
    """0.5 for brevity, 0.3 for one whole sentence, 0.2 for naming the subject; 0 below four words.

    Brevity is 1 up to 50 characters and falls in a line to 0 at 150. `prompt.reference` is the subject. Parts:
    `brevity`, `sentence`, `subject`.
    """
    subject = prompt.reference
    text = response.strip()
    ends = [match.end() for match in _END.finditer(text)]
    sentence = float(ends == [len(text)])
    left = (TOO_MANY_CHARS - len(text)) / (TOO_MANY_CHARS - MAX_CHARS)
    brevity = min(max(left, 0.0), 1.0)
    named = float(subject.lower() in text.lower())
    value = BREVITY_SHARE * brevity + SENTENCE_SHARE * sentence + SUBJECT_SHARE * named
    return Reward(
        value=value if len(text.split()) >= MIN_WORDS else 0.0,
        parts={"brevity": brevity, "sentence": sentence, "subject": named},
    )
