"""The preference task: a chat about animals, with a rule that says how good an answer is.

A user asks about an animal; a good answer names it and no other, is polite, and is short. Demonstrations slip in all
three, so there is room above their imitation; pairs of them are ordered by the rule, which a reward model can learn
and PPO never sees. Words are tokens, so a very small model learns the task in a minute.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerFast

from ...learning.models.tokenization import word_tokenizer

SUBJECTS = "fox owl bear wolf crow hare frog bee deer goat duck seal mole swan toad lynx".split()  # noqa: SIM905
_ASKS = ("tell me about the {}", "what does the {} do", "say something of the {}", "describe the {} for me")
_OPENINGS = ("sure", "gladly", "of course")
_RUDE = ("ugh", "well", "whatever")
_FACTS = ("runs fast", "eats grass", "sleeps late", "likes water", "hides well", "sings at night")
_CLOSINGS = ("thank you", "you are welcome")
POLITE = frozenset({"sure", "gladly", "course", "thank", "welcome"})
MAX_WORDS = 9
"Of a short answer: one fact with every courtesy, or two with one."
MAX_ANSWER_WORDS = 32
NAMED, POLITE_SHARE, SHORT = 0.5, 0.3, 0.2
"What the rule pays for each of its three parts; they sum to 1."
RIGHT_SUBJECT, IS_POLITE = 0.65, 0.5
"Chances of a demonstration."
USER, ASSISTANT, END = "<user>", "<assistant>", "<end>"
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<assistant>{% generation %} {{ m.content }} <end>"
    "{% endgeneration %}\n{% else %}<user> {{ m.content }} <end>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a user asks, and which animal of."""

    text: str
    subject: str


def draw_question(rng: np.random.Generator) -> Question:
    """Draw one of 64 questions."""
    subject = SUBJECTS[rng.integers(len(SUBJECTS))]
    return Question(text=_ASKS[rng.integers(len(_ASKS))].format(subject), subject=subject)


def draw_answer(question: Question, rng: np.random.Generator) -> str:
    """Draw an answer as demonstrations have them: one to four facts, sometimes of another animal, polite or not."""
    subject = question.subject
    if rng.random() >= RIGHT_SUBJECT:
        subject = SUBJECTS[rng.integers(len(SUBJECTS))]
    polite = rng.random() < IS_POLITE
    facts = rng.permutation(len(_FACTS))[: rng.integers(1, 5)]
    words = [(_OPENINGS if polite else _RUDE)[rng.integers(3)], "the", subject, _FACTS[facts[0]]]
    words += [f"and it {_FACTS[fact]}" for fact in facts[1:]]
    if polite and rng.random() < 0.5:
        words.append(_CLOSINGS[rng.integers(len(_CLOSINGS))])
    return " ".join(words)


def gold_score(subject: str, answer: str) -> float:
    """The rule: 0.5 for naming the subject and no other animal, 0.3 for a polite word, 0.2 for at most nine words."""
    words = answer.split()
    named = {word for word in words if word in SUBJECTS} == {subject}
    is_polite = bool(POLITE & set(words))
    return NAMED * named + POLITE_SHARE * is_polite + SHORT * (0 < len(words) <= MAX_WORDS)


def draw_pair(rng: np.random.Generator) -> tuple[Question, str, str]:
    """Draw a question with a better and a worse answer to it."""
    question = draw_question(rng)
    while True:
        answers = [draw_answer(question, rng) for _ in range(2)]
        scores = [gold_score(question.subject, answer) for answer in answers]
        if scores[0] != scores[1]:
            better = int(np.argmax(scores))
            return question, answers[better], answers[1 - better]


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of the task's words, with a chat template that marks what the assistant writes."""
    texts = (*_ASKS, *_OPENINGS, *_RUDE, *_FACTS, *_CLOSINGS, "the and it")
    words = dict.fromkeys(word for text in texts for word in text.split() if word != "{}")
    tokenizer = word_tokenizer([*words, *SUBJECTS], special=(USER, ASSISTANT), end=END)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
