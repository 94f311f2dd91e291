"""Pairs in TRL's formats become the ids that the reward model scores in PPO."""

import pytest
from word_chat import PLAIN, word_chat

from rlhfspec.core.errors import DataError, ModelError
from rlhfspec.core.settings.supervised import PreferencesConfig
from rlhfspec.learning.data.preferences import encode_preferences
from rlhfspec.learning.data.record import Record

USER = {"role": "user", "content": "who are you"}
GOOD, BAD = {"role": "assistant", "content": "me"}, {"role": "assistant", "content": "no"}
ASKED = "<user> who are you <end> <assistant>"


def pair_of(fields, *, template=PLAIN, **settings):
    tokenizer = word_chat(template)
    data = PreferencesConfig(path="x.jsonl", **settings)
    (pair,), _ = encode_preferences([Record("x.jsonl:1", fields)], data, tokenizer)
    both = (tokenizer.convert_ids_to_tokens(ids.tolist()) for ids in (pair.chosen_ids, pair.rejected_ids))
    return *(" ".join(tokens) for tokens in both), pair.margin


@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, {}),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, {}),
        ({"prompt": "who are you", "chosen": [GOOD], "rejected": [BAD]}, {}),
        ({"prompt": "who are you", "chosen": "me", "rejected": "no"}, {"chat": True}),
        (
            {"q": "are you", "a": "me", "b": "no"},
            {
                "chat": True,
                "prompt_template": "who {prompt}",
                "prompt_field": "q",
                "chosen_field": "a",
                "rejected_field": "b",
            },
        ),
    ],
    ids=["messages", "implicit", "text and messages", "text as a turn", "other names"],
)
def test_every_chat_format_gives_the_same_ids(fields, settings):
    assert pair_of(fields, **settings) == (f"{ASKED} me <end>", f"{ASKED} no <end>", 0.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "who are ", "chosen": "you", "rejected": "me no"},
        {"chosen": "who are you", "rejected": "who are me no"},
    ],
    ids=["explicit", "implicit"],
)
def test_plain_text_is_prompt_and_response(fields):
    assert pair_of(fields) == ("who are you", "who are me no", 0.0)


def test_an_implicit_prompt_ends_at_a_blank_so_that_no_word_is_cut():
    fields = {"chosen": "who are you hi be", "rejected": "who are you hi bad"}
    assert pair_of(fields, max_tokens=2)[:2] == ("hi be", "hi bad")


def test_the_margin_is_taken_from_its_column():
    fields = {"prompt": "hi ", "chosen": "me", "rejected": "no", "margin": 2, "gap": 0.5}
    assert pair_of(fields)[2] == 2.0
    assert pair_of(fields, margin_field="gap")[2] == 0.5


def test_long_prompts_lose_their_beginning_and_long_responses_are_refused_or_left_out():
    fields = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}
    assert pair_of(fields, max_tokens=4)[0] == "<end> <assistant> me <end>"
    long = {"prompt": "hi ", "chosen": "me me me", "rejected": "no"}
    with pytest.raises(DataError, match="has a response of 3 tokens"):
        pair_of(long, max_tokens=2)
    rows = [Record("x:1", long), Record("x:2", {**long, "chosen": "me"})]
    notes = {}
    settings = PreferencesConfig(path="x.jsonl", max_tokens=4)
    encode_preferences([Record("x:1", long)], settings, word_chat(), notes.setdefault)
    assert "1 of 1 pairs fill data.max_tokens 4" in next(iter(notes))
    settings = PreferencesConfig(path="x.jsonl", on_long="skip", max_tokens=2)
    kept, num_left_out = encode_preferences(rows, settings, word_chat())
    assert (len(kept), num_left_out) == (1, 1)


@pytest.mark.parametrize(
    ("fields", "template", "kind", "said"),
    [
        ({"prompt": "hi", "chosen": "me", "rejected": "me"}, PLAIN, DataError, "the same response"),
        # blanks and unknown words are lost on this tokenizer
        ({"prompt": "hi ", "chosen": "me  no", "rejected": "me no"}, PLAIN, DataError, "the same 3 tokens"),
        ({"prompt": "hi ", "chosen": "wolf", "rejected": "fox"}, PLAIN, DataError, "the same 2 tokens"),
        ({"prompt": "hi", "chosen": "me"}, PLAIN, DataError, "no field 'rejected'"),
        ({"prompt": [], "chosen": [GOOD], "rejected": [BAD]}, PLAIN, DataError, "field 'prompt'.*an empty"),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, None, ModelError, "no chat template"),
        (
            {"chosen": [USER, GOOD], "rejected": [USER]},
            PLAIN,
            DataError,
            "'rejected' must end in one message",
        ),
        (
            {"prompt": "hi", "chosen": "me", "rejected": "no", "margin": "much"},
            PLAIN,
            DataError,
            "must be a finite number, got 'much'",
        ),
    ],
)
def test_what_is_no_pair_is_named(fields, template, kind, said):
    with pytest.raises(kind, match=said):
        pair_of(fields, template=template)
