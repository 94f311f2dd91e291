"""Rows come from JSONL and Parquet alike, and which are held out is a matter of the seed alone."""

from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_rows import write_rows
from word_chat import word_chat

from rlhfspec.core.errors import DataError
from rlhfspec.core.settings.supervised import DemonstrationsConfig, ExamplesConfig, PreferencesConfig
from rlhfspec.learning.data.supervised_rows import encode_demonstrations, read_raw_rows

ROWS = [{"prompt": f"p{i}", "completion": f"c{i}"} for i in range(20)]


@pytest.fixture
def jsonl(tmp_path):
    return Path(write_rows(tmp_path / "rows.jsonl", ROWS))


def fields(rows):
    return [row.values for row in rows]


def test_parquet_and_jsonl_give_the_same_rows_and_messages(tmp_path, jsonl):
    write_rows(tmp_path / "rows.parquet", ROWS)
    both = [
        read_raw_rows(ExamplesConfig(path=str(path)), seed=3) for path in (jsonl, tmp_path / "rows.parquet")
    ]
    assert [fields(part) for part in both[0]] == [fields(part) for part in both[1]]
    asked = {"role": "user", "content": "a", "timestamp": datetime(2026, 1, 2, tzinfo=UTC)}
    talk = [asked, {"role": "assistant", "content": "b", "name": "me"}]
    pq.write_table(pa.Table.from_pylist([{"messages": talk}]), tmp_path / "talks.parquet")
    (row,), _ = read_raw_rows(ExamplesConfig(path=str(tmp_path / "talks.parquet"), eval_share=0.0), seed=0)
    assert row.turns("messages", "data.messages_field", roles=None) == talk
    with pytest.raises(DataError, match="message 0: timestamp must hold text"):
        row.turns("messages", "data.messages_field")


def test_the_split_is_the_seed_s_and_every_row_is_in_one_part(jsonl):
    data = ExamplesConfig(path=str(jsonl), eval_share=0.2)
    first, again, other = (read_raw_rows(data, seed=seed) for seed in (1, 1, 2))
    assert [fields(part) for part in first] == [fields(part) for part in again]
    assert fields(first[1]) != fields(other[1])
    assert (len(first[0]), len(first[1])) == (16, 4)
    assert sorted(row["prompt"] for part in first for row in fields(part)) == sorted(
        row["prompt"] for row in ROWS
    )


def test_a_held_out_file_leaves_all_rows_to_learn_from(jsonl, tmp_path):
    other = tmp_path / "other.jsonl"
    write_rows(other, ROWS[:1])
    train, held_out = read_raw_rows(ExamplesConfig(path=str(jsonl), eval_path=str(other)), seed=0)
    assert fields(train) == ROWS and fields(held_out) == ROWS[:1]
    assert read_raw_rows(ExamplesConfig(path=str(jsonl), eval_share=0.0), seed=0)[1] == []
    limited, _ = read_raw_rows(ExamplesConfig(path=str(jsonl), eval_share=0.0, limit=3), seed=0)
    assert fields(limited) == ROWS[:3]


@pytest.mark.parametrize(
    ("text", "settings", "said"),
    [
        ("", {}, "is empty"),
        ('{"a": 1}\n', {"eval_share": 0.5}, "too few to learn from some"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, text, settings, said):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=said):
        read_raw_rows(ExamplesConfig(path=str(path), **settings), seed=0)


def turn(role, content):
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        (PreferencesConfig, lambda i, p: {"prompt": f"p{p}", "chosen": f"c{i}", "rejected": f"r{i}"}),
        (PreferencesConfig, lambda i, p: {"chosen": f"p{p}: c{i}", "rejected": f"p{p}: r{i}"}),
        (
            PreferencesConfig,
            lambda i, p: {
                "chosen": [turn("user", f"p{p}"), turn("assistant", f"c{i}")],
                "rejected": [turn("user", f"p{p}"), turn("assistant", f"r{i}")],
            },
        ),
        (
            DemonstrationsConfig,
            lambda i, p: {"messages": [turn("user", f"p{p}"), turn("assistant", f"c{i}")]},
        ),
        (
            DemonstrationsConfig,
            lambda i, p: {
                "conversations": [{"from": "human", "value": f"p{p}"}, {"from": "gpt", "value": f"c{i}"}]
            },
        ),
    ],
    ids=["prompt", "implicit text", "implicit messages", "messages", "ShareGPT"],
)
def test_all_rows_of_a_prompt_are_on_one_side(tmp_path, kind, row):
    path = write_rows(tmp_path / "rows.jsonl", [row(i, i % 8) for i in range(40)])
    learned, held_out = read_raw_rows(kind(path=path, eval_share=0.2), seed=0)
    sides = [{int(one.origin.rpartition(":")[2]) % 8 for one in side} for side in (learned, held_out)]
    assert not sides[0] & sides[1] and len(learned) + len(held_out) == 40 and len(held_out) == 10


def test_rows_of_one_prompt_alone_are_still_held_out(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "p", "completion": f"c{i}"} for i in range(20)])
    assert [len(side) for side in read_raw_rows(ExamplesConfig(path=path), seed=0)] == [19, 1]


def test_a_folder_of_shards_and_a_pattern_are_read_as_one(tmp_path):
    odd = tmp_path / "we ird[1]"  # no pattern: there is such a folder
    for folder, path in ((odd, odd), (tmp_path, tmp_path / "*.jsonl")):
        for number in range(2):
            write_rows(folder / f"part-{number}.jsonl", [ROWS[number]])
        rows, _ = read_raw_rows(ExamplesConfig(path=str(path), eval_share=0.0), seed=0)
        assert fields(rows) == ROWS[:2]


def test_each_source_has_rows_of_its_own_form_and_is_named_in_the_examples(tmp_path):
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "me"}]
    talks = write_rows(tmp_path / "talks.jsonl", [{"messages": talk}])
    texts = write_rows(tmp_path / "texts.jsonl", [{"body": "who are you"}, {"body": "me"}])
    asked = write_rows(tmp_path / "held.jsonl", [{"prompt": "who", "completion": "me"}])
    sources = [
        {"path": str(talks), "loss_on": "all", "weight": 2},
        {"path": str(texts), "text_field": "body"},
    ]
    data = DemonstrationsConfig(sources=sources, eval_path=str(asked))
    # as a run folder keeps it
    data = DemonstrationsConfig.model_validate(data.model_dump(mode="json"))
    learned, held_out = read_raw_rows(data, seed=0)
    examples, _ = encode_demonstrations(learned, data, word_chat())
    assert [(one.source, one.num_learned, one.num_tokens) for one in examples] == [
        (0, 5, 6),
        (1, 3, 4),
        (1, 1, 2),
    ]
    (example,), _ = encode_demonstrations(held_out, data, word_chat())
    assert (example.num_tokens, example.num_learned) == (3, 2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"path": "a", "sources": [{"path": "b"}]}, "exactly one of data.path"),
        ({}, "exactly one of data.path"),
        ({"sources": [{"path": "b", "text_field": "t", "chat": True}]}, r"take data\.chat out"),
    ],
)
def test_sources_that_contradict_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        DemonstrationsConfig(**given)


def test_whole_texts_are_held_out_by_what_they_say_and_read_nothing_else(tmp_path):
    rows = [{"text": f"t{i // 2}", "prompt": f"p{i}"} for i in range(20)]
    path, notes = write_rows(tmp_path / "rows.jsonl", rows), {}
    data = DemonstrationsConfig(path=str(path), text_field="text", eval_share=0.2)
    learned, held_out = read_raw_rows(data, seed=1, note=notes.setdefault)
    assert {row.values["text"] for row in learned}.isdisjoint(row.values["text"] for row in held_out)
    assert len(held_out) == 4 and "prompt" in next(iter(notes)) and len(notes) == 1


def test_a_template_of_columns_alone_names_the_prompts(tmp_path):
    rows = [{"task": f"t{i // 2}", "input": "x", "completion": f"c{i}"} for i in range(20)]
    path = Path(write_rows(tmp_path / "rows.jsonl", rows))
    data = DemonstrationsConfig(path=str(path), prompt_template="{task} {input}", eval_share=0.2)
    learned, held_out = read_raw_rows(data, seed=1)
    assert {row.values["task"] for row in learned}.isdisjoint(row.values["task"] for row in held_out)
    with pytest.raises(DataError, match=r"names no column of completion, input, task; expected \{prompt\}"):
        read_raw_rows(DemonstrationsConfig(path=str(path), prompt_template="{tsk}"), seed=1)
    path.write_text(path.read_text() + '{"task": "t", "completion": "c"}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:21 has no field 'input' \(data\.prompt_template\)"):
        read_raw_rows(data, seed=1)
