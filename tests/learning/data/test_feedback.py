"""Pairs and judged responses in TRL's formats become what `sft` would learn, and KTO's partners have another prompt."""

import numpy as np
import pytest
from word_chat import word_chat

from rlhfspec.core.errors import DataError
from rlhfspec.core.settings.supervised import DpoLossConfig, FeedbackConfig
from rlhfspec.learning.data.feedback import encode_feedback, with_unrelated
from rlhfspec.learning.data.record import Record

USER = {"role": "user", "content": "who are you"}
GOOD, BAD = {"role": "assistant", "content": "me"}, {"role": "assistant", "content": "no"}
PAIR = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}


def encoded(*rows, unpaired=True, note=None, **settings):
    records = [Record(f"x.jsonl:{index}", fields) for index, fields in enumerate(rows, start=1)]
    data = FeedbackConfig(path="x.jsonl", **settings)
    return encode_feedback(records, data, word_chat(), note, takes_unpaired=unpaired)


def words(one, learned=False):
    return " ".join(
        word_chat().convert_ids_to_tokens(one.token_ids[one.is_learned if learned else slice(None)].tolist())
    )


@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        (PAIR, {}),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, {}),
        ({"prompt": "who are you", "chosen": "me", "rejected": "no"}, {"chat": True}),
    ],
    ids=["messages", "implicit", "text as a turn"],
)
def test_every_format_of_a_pair_gives_the_same_ids(fields, settings):
    (pair,), left_out = encoded(fields, **settings)
    assert (pair.is_chosen, left_out) == ((True, False), 0)
    assert [words(one) for one in pair.responses] == [
        f"<user> who are you <end> <assistant> {word} <end>" for word in ("me", "no")
    ]
    assert [words(one, learned=True) for one in pair.responses] == ["me <end>", "no <end>"]


def test_plain_text_ends_with_the_end_token():
    (pair,), _ = encoded({"prompt": "who are", "chosen": "you", "rejected": "me no"})
    assert [words(one, learned=True) for one in pair.responses] == ["you <end>", "me no <end>"]


@pytest.mark.parametrize(("label", "is_chosen"), [(True, True), (False, False), (1, True), (0, False)])
def test_a_response_with_a_label_is_judged_alone(label, is_chosen):
    (one,), _ = encoded({"prompt": [USER], "completion": [GOOD], "label": label})
    assert one.is_chosen == (is_chosen,)
    assert [words(each, learned=True) for each in one.responses] == ["me <end>"]


@pytest.mark.parametrize(
    ("fields", "unpaired", "said"),
    [
        ({"prompt": [USER], "completion": [GOOD], "label": "yes"}, True, "must be true or false"),
        ({"prompt": [USER], "completion": [GOOD], "label": True}, False, "set loss.type to kto"),
        ({"prompt": "who", "chosen": "me", "rejected": "me"}, False, "the same response"),
        ({"prompt": "who", "chosen": "you ", "rejected": "you"}, False, "the same 3 tokens"),
        ({**PAIR, "rejected": [USER]}, False, "one message of role assistant"),
    ],
)
def test_rows_that_say_nothing_are_refused(fields, unpaired, said):
    with pytest.raises(DataError, match=f"x.jsonl:1.*{said}"):
        encoded(fields, unpaired=unpaired)


def test_pairs_that_are_cut_to_the_same_tokens_are_left_out_and_cut_ones_told():
    notes = {}
    longer = {"prompt": "who are", "chosen": "you me no", "rejected": "you me you"}
    short = {"prompt": "who are", "chosen": "me", "rejected": "no"}
    found, left_out = encoded(longer, short, note=notes.setdefault, max_tokens=4)
    assert (len(found), left_out) == (1, 1)
    assert any("lost their end" in line for line in notes)
    with pytest.raises(DataError, match="no row left of 1"):
        encoded(longer, max_tokens=3)


def test_a_partner_is_the_row_before_with_another_prompt():
    rows = [
        {"prompt": prompt, "completion": answer, "label": True}
        for prompt, answer in (("who", "me"), ("are", "no"), ("are", "you"))
    ]
    items, _ = encoded(*rows)
    found = [words(one.unrelated[0]) for one in with_unrelated(items, items, 64)]
    assert found == ["who you <end>", "are me <end>", "are me <end>"]
    cut = with_unrelated(items, items, 2)[0].unrelated[0]
    assert words(cut) == "who you" and np.array_equal(cut.is_learned, [False, True])
    with pytest.raises(DataError, match="two prompts at least"):
        with_unrelated(items[1:], items[1:], 64)


def test_keys_of_another_loss_are_refused():
    with pytest.raises(ValueError, match=r"loss\.desirable_weight is of loss\.type kto, and the type is ipo"):
        DpoLossConfig(type="ipo", desirable_weight=2.0)
    with pytest.raises(ValueError, match=r"loss\.label_smoothing is of loss\.type sigmoid"):
        DpoLossConfig(type="kto", label_smoothing=0.1)
