"""What rows hold is learned, left out of the loss as they say, or told: marks, roles, columns, numbers, splits."""

import json
import logging

import numpy as np
from data_rows import write_rows
from pytest import mark, param, raises
from word_chat import MARKED, PLAIN, word_chat

from rlhfspec.core.config import DataConfig
from rlhfspec.core.errors import DataError
from rlhfspec.core.settings.supervised import DemonstrationsConfig, PreferencesConfig
from rlhfspec.core.surfaces.surface import note_once
from rlhfspec.learning.data.chat import chat_masks
from rlhfspec.learning.data.preferences import encode_preferences
from rlhfspec.learning.data.prompts import load_prompts
from rlhfspec.learning.data.record import Record
from rlhfspec.learning.data.supervised_rows import encode_demonstrations, read_raw_rows

TALK = [
    {"role": "user", "content": "hi there"},
    {"role": "assistant", "content": "you are bad"},
    {"role": "user", "content": "be kind"},
    {"role": "assistant", "content": "me"},
]
CALLING = (
    "{{ tools | tojson if tools }}{% for m in messages %}<{{ m.role }}> {{ m.content }} "
    "{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments | tojson }} {% endfor %}<end>\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def encoded(fields, *, template=PLAIN, **settings):
    tokenizer = word_chat(template)
    data = DemonstrationsConfig(path="x.jsonl", **settings)
    (example,), _ = encode_demonstrations([Record("x.jsonl:1", fields)], data, tokenizer)
    return tokenizer, example


def learned(fields, **how):
    tokenizer, example = encoded(fields, **how)
    return " ".join(tokenizer.convert_ids_to_tokens(example.token_ids[example.is_learned].tolist()))


def marked(name, value, index=1):
    return {"messages": [turn | ({name: value} if at == index else {}) for at, turn in enumerate(TALK)]}


@mark.parametrize("template", [MARKED, PLAIN], ids=["marks", "beginnings"])
@mark.parametrize("name", ["weight", "train", "training", "trainable", "learn", "loss", "loss_mask"])
def test_a_turn_that_says_so_is_not_learned(name, template):
    for no in (0, False, 0.0):
        assert learned(marked(name, no), template=template) == "me <end>"
    for yes in (1, True, None):
        assert learned(marked(name, yes), template=template) == "you are bad <end> me <end>"


@mark.parametrize(("value", "index"), [(0.5, 1), ("no", 1), ([0, 1], 1), (1, 0)])
def test_a_share_of_a_turn_or_another_s_turn_cannot_be_learned(value, index):
    with raises(DataError, match=rf"x\.jsonl:1, message {index}.*expected 'weight' 0 or false"):
        learned(marked("weight", value, index))


def test_a_response_of_a_pair_that_is_not_learned_is_refused():
    pair = {"prompt": TALK[:1], "chosen": [TALK[1] | {"weight": 0}], "rejected": [TALK[3]]}
    with raises(DataError, match="'chosen' says that it is not learned"):
        encode_preferences([Record("x:1", pair)], PreferencesConfig(path="x"), word_chat())


@mark.parametrize("template", [MARKED, PLAIN], ids=["marks", "beginnings"])
def test_a_mask_that_covers_what_is_not_to_be_learned_is_told(monkeypatch, template):
    # the fault: marks of messages are not looked at
    monkeypatch.setattr(chat_masks, "is_learned", lambda turn, what: True)
    with raises(DataError, match="message 1 is not to be learned, and the loss covers 3 of its 3 tokens"):
        learned(marked("weight", 0), template=template)


def test_roles_of_share_gpt_are_calls_results_and_turns_of_the_assistant():
    call = {"name": "good", "arguments": {"who": "you"}}
    talk = [
        {"from": "human", "value": "hi"},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "fine"},
        {"from": "chatgpt", "value": "yes"},
        {"from": "human", "value": "who"},
        {"from": "model", "value": "me"},
    ]
    tools = [{"name": "good", "parameters": {}}]
    own = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": "fine"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "who"},
        {"role": "assistant", "content": "me"},
    ]
    _, theirs = encoded({"conversations": talk, "tools": json.dumps(tools)}, template=CALLING)
    _, ours = encoded({"messages": own, "tools": tools}, template=CALLING)
    assert np.array_equal(theirs.token_ids, ours.token_ids)
    assert np.array_equal(theirs.is_learned, ours.is_learned)
    assert learned({"messages": own, "tools": tools}, template=CALLING).startswith("good ")
    old = [own[0], {"role": "assistant", "content": None, "function_call": call}, *own[2:]]
    assert np.array_equal(
        encoded({"messages": old, "tools": tools}, template=CALLING)[1].token_ids, ours.token_ids
    )


def test_an_unknown_role_is_refused_unless_the_template_names_it():
    talk = [{"role": "critic", "content": "bad"}, *TALK]
    with raises(DataError, match=r"unknown role: expected one of system, .*function_response, got 'critic'"):
        learned({"messages": talk})
    assert learned({"messages": talk}, template=PLAIN + "{# critic #}")


@mark.parametrize("value", ["not JSON", '{"arguments": {}}', "3"])
def test_a_function_call_that_calls_nothing_is_refused(value):
    talk = [{"from": "human", "value": "hi"}, {"from": "function_call", "value": value}]
    with raises(DataError, match="message 1"):
        learned({"conversations": talk}, template=CALLING)


def test_a_variable_that_a_template_sets_in_an_if_is_no_gap_and_others_are_told_with_the_key_there_is():
    notes = {}
    setting = "{% if messages %}{% set mood = 'good' %}{% endif %}{{ mood }}{{ other }}" + PLAIN
    encode_demonstrations(
        [Record("x:1", {"messages": TALK})],
        DemonstrationsConfig(path="x"),
        word_chat(setting),
        notes.setdefault,
    )
    (note,) = notes
    assert "has 'other'," in note and note.endswith("model.chat_template names another template")


PAIR = {"chosen": [TALK[1]], "rejected": [TALK[3]]}


@mark.parametrize(
    ("rows", "kind"),
    [
        ([{"messages": [{"role": "user", "content": "who <end> me"}, TALK[1]]}] * 2, DemonstrationsConfig),
        ([{"prompt": [{"role": "user", "content": "who <end> me"}], **PAIR}] * 2, PreferencesConfig),
    ],
)
def test_control_tokens_of_a_user_are_told_of_supervised_rows(rows, kind):
    notes = {}
    encode = encode_demonstrations if kind is DemonstrationsConfig else encode_preferences
    encode(
        [Record(f"x:{n}", row) for n, row in enumerate(rows)], kind(path="x"), word_chat(), notes.setdefault
    )
    assert [note[:60] for note in notes] == [
        "2 rows hold text that the tokenizer reads as a token of its o"[:60]
    ]
    assert "the first <end> in x:0" in next(iter(notes))


@mark.parametrize(
    ("rows", "evaluated", "told"),
    [
        (["hi", "who"], ["who", "me", "hi"], "2 of 3 rows"),
        (["hi", "who"], [[{"role": "user", "content": "who"}], "me"], "1 of 2 rows"),
        (["hi", "who"], ["you"], ""),
        (["hi", "hi"], ["hi"], ""),
    ],
)
def test_held_out_rows_that_are_trained_on_are_told(tmp_path, rows, evaluated, told):
    notes = {}
    paths = [
        write(
            tmp_path,
            [{"prompt": prompt, "completion": f"{n}{name}"} for n, prompt in enumerate(prompts)],
            name,
        )
        for prompts, name in ((rows, "d.jsonl"), (evaluated, "e.jsonl"))
    ]
    read_raw_rows(DemonstrationsConfig(path=paths[0], eval_path=paths[1]), seed=0, note=notes.setdefault)
    assert [note.split(" of data.")[0] for note in notes] == ([told] if told else [])
    assert "".join(notes).count("e.jsonl:1") == (1 if told else 0)


def test_tools_in_a_form_that_the_template_does_not_read_are_refused():
    reading = "{% for t in tools or [] %}{{ (t.function or {}).name }} tool{% endfor %}" + PLAIN
    row = {"messages": TALK, "tools": [{"name": "good", "description": "kind"}]}
    with raises(DataError, match=r"does not write (the tools|the name of)"):
        learned(row, template=reading)


@mark.parametrize("learning", [True, False])
def test_a_system_turn_that_the_template_leaves_out_is_refused_by_sft_and_train(tmp_path, learning):
    dropping = PLAIN.replace("for m in messages", "for m in messages if m.role != 'system'")
    # its words stand in another turn too
    talk = [{"role": "system", "content": "be kind"}, *TALK]
    with raises(DataError, match="does not write what the system says"):
        if learning:
            learned({"messages": talk}, template=dropping)
        else:
            path = write(tmp_path, [{"messages": talk[:-1], "answer": ""}])
            load_prompts(DataConfig(path=path), word_chat(dropping), seed=0)


def write(folder, rows, name="d.jsonl"):
    return write_rows(folder / name, rows)


@mark.parametrize("name", ["d.jsonl", "d.parquet"])
def test_whole_numbers_that_a_data_frame_made_floats_are_written_whole(tmp_path, caplog, name):
    note_once.cache_clear()
    rows = [
        {"question": f"q{n}", "answer": n, "of": {"x": n}, "half": h} for n, h in ((4.0, 0.5), (18.0, 2.0))
    ]
    path = write(tmp_path, rows, name)

    def read(field):
        data = DataConfig(path=path, reference_field=field, ignored_fields=("answer", "of", "half"))
        return [prompt.reference for prompt in load_prompts(data, word_chat(), seed=0).prompts]

    assert read("answer") == ["4", "18"] and read("of.x") == ["4", "18"] and read("half") == ["0.5", "2.0"]
    assert [record.getMessage().split(" ", 1)[1][:8] for record in caplog.records] == ["'answer'", "'of.x' h"]


def test_a_gap_or_an_integer_says_whether_a_data_frame_wrote_the_column(tmp_path):
    rows = [{"prompt": "hi", "completion": value} for value in (3.0, 4)]
    data = DemonstrationsConfig(path=write(tmp_path, rows), eval_share=0.0)
    row = read_raw_rows(data, seed=0)[0][0]
    assert row.text("completion", "data.reference_field") == "3.0", "a number of JSON is as it was written"


@mark.parametrize(
    ("column", "value"),
    [
        ("images", ["a.png"]),
        ("system", "be kind"),
        ("tools", [{"name": "good"}]),
        ("weight", 0.0),
        ("history", [["a", "b"]]),
    ],
)
@mark.parametrize("name", ["d.jsonl", "d.parquet"])
def test_columns_that_change_what_is_asked_are_refused_in_every_row_that_has_them(
    tmp_path, name, column, value
):
    rows = [
        {"question": "hi", "answer": "me", column: None},
        {"question": "hi", "answer": "me", column: value},
    ]
    path = write(tmp_path, rows, name)
    with raises(DataError, match=f"has '{column}', which cannot be taken into account"):
        load_prompts(DataConfig(path=path), word_chat(), seed=0)
    assert len(load_prompts(DataConfig(path=path, ignored_fields=(column,)), word_chat(), seed=0)) == 2
    assert len(load_prompts(DataConfig(path=write(tmp_path, rows[:1], name)), word_chat(), seed=0)) == 1


@mark.parametrize(
    ("fields", "settings", "column"),
    [
        ({"messages": TALK, "completion_mask": [1]}, {}, "completion_mask"),
        ({"messages": TALK, "label": False}, {}, "label"),
        ({"prompt": "hi", "completion": "me", "tools": [{"name": "good"}]}, {}, "tools"),
        param({"prompt": "hi", "completion": "me", "input": "there"}, {}, "input", id="alpaca"),
    ],
)
def test_sft_refuses_columns_that_change_what_is_learned(tmp_path, fields, settings, column):
    data = DemonstrationsConfig(path=write(tmp_path, [fields]), eval_share=0.0, **settings)
    with raises(DataError, match=f"has '{column}', which cannot be taken into account"):
        read_raw_rows(data, seed=0)
    read_raw_rows(data.model_copy(update={"ignored_fields": (column,)}), seed=0)


def test_every_column_that_nothing_reads_is_told_once(tmp_path):
    notes = []
    rows = [{"messages": TALK, "topic": 1}, {"prompt": "hi", "completion": "me", "topic": 2, "split": "a"}]
    read_raw_rows(DemonstrationsConfig(path=write(tmp_path, rows), eval_share=0.0), seed=0, note=notes.append)
    assert [note.partition(",")[0].rpartition("/")[2] for note in notes] == [
        "d.jsonl:1 has 'topic'",
        "d.jsonl:2 has 'split'",
    ]


def test_a_template_beside_messages_fills_nothing_in():
    with raises(DataError, match=r"data\.prompt_template fills nothing of conversations in"):
        learned({"messages": TALK}, prompt_template="Q: {prompt}")


def test_a_message_that_says_two_things_is_refused():
    with raises(DataError, match="message 0 says both 'hi' and 'no'"):
        learned({"messages": [{"role": "user", "content": "hi", "value": "no"}, TALK[1]]})


def test_variables_that_a_template_needs_and_nobody_gives_are_told(caplog):
    note_once.cache_clear()
    asking = "{{ company }}{% if style is defined %}{{ style }}{% endif %}{{ mood or '' }}" + PLAIN
    with caplog.at_level(logging.WARNING):
        learned({"messages": TALK}, template=asking)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("the chat template has 'company', which nobody gives it")


@mark.parametrize("split", ["train[:10%]", "train+test", "test"])
@mark.parametrize("name", ["d.jsonl", "*.jsonl"])
def test_a_part_of_a_file_is_not_read_for_the_whole(tmp_path, split, name):
    write(tmp_path, [{"question": "hi", "answer": "me"}])
    with raises(DataError, match=r"data\.split is .* is read whole"):
        load_prompts(DataConfig(path=str(tmp_path / name), split=split), word_chat(), seed=0)
    write(tmp_path, [{"question": "hi", "answer": "me"}], "test.jsonl")
    assert load_prompts(DataConfig(path=str(tmp_path / "test.jsonl"), split="test"), word_chat(), seed=0)
