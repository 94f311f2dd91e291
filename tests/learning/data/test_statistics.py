"""The report on a data set counts what a run would meet, and goes on after faults."""

import json

from pytest import fixture, mark

from rlhfspec.core.config import DataConfig
from rlhfspec.learning.data.prompts import load_prompts
from rlhfspec.learning.data.statistics import data_report
from rlhfspec.learning.models.tokenization import train_bpe


@fixture(scope="module")
def tokenizer():
    bpe = train_bpe(["Tom has 12 apples."], vocab_size=300)
    bpe.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    return bpe


LINES = [
    '{"question": "1", "answer": "a"}',
    '{"question": "22", "answer": "b", "level": 3}',
    '{"question": ',
    '{"question": "333", "answer": 4}',
    '{"answer": "c"}',
    '{"question": "22", "answer": "d"}',
    '{"question": "", "answer": "e"}',
    '{"question": "999999999", "answer": "f"}',
]


@fixture
def file(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(LINES))
    return path


def test_counts_and_first_faults(file, tokenizer):
    report = data_report(DataConfig(path=str(file), max_prompt_tokens=8), tokenizer, seed=0)
    assert (report.num_rows, report.num_prompts, report.num_faults) == (8, 4, 4)
    assert (report.duplicates, report.empty, report.too_long) == (1, 1, 1)
    assert report.fields == {"answer": 7, "question": 6, "level": 1}
    assert [fault.split(str(file))[1].split(" ")[0] for fault in sorted(report.faults)] == [
        ":3",
        ":5",
        ":7:",
        ":8:",
    ]
    assert report.lengths is not None
    assert (report.lengths.max, sum(report.lengths.counts)) == (9, 6)
    assert [(sample.text, sample.num_tokens) for sample in report.samples] == [
        ("1", 1),
        ("22", 2),
        ("333", 3),
    ]
    assert json.loads(json.dumps(report.to_dict()))["num_rows"] == 8


def test_long_prompts_that_are_skipped_are_no_faults(file, tokenizer):
    data = DataConfig(path=str(file), max_prompt_tokens=8, on_long_prompt="skip")
    report = data_report(data, tokenizer, seed=0)
    assert (report.num_faults, report.too_long) == (3, 1)


def test_without_a_tokenizer_lengths_are_characters(file):
    report = data_report(DataConfig(path=str(file), max_prompt_tokens=2), None, seed=0)
    assert (report.unit, report.too_long, report.num_prompts) == ("characters", 0, 5)
    assert report.samples[0].num_tokens is None


@mark.parametrize("with_tokenizer", [True, False])
def test_roles_of_conversations(tmp_path, tokenizer, with_tokenizer):
    path = tmp_path / "d.jsonl"
    turns = [
        {"role": role, "content": role[0]} for role in ("system", "user", "assistant", "user", "assistant")
    ]
    path.write_text(json.dumps({"messages": turns}) + "\n" + json.dumps({"messages": turns[1:3]}))
    report = data_report(DataConfig(path=str(path)), tokenizer if with_tokenizer else None, seed=0)
    assert report.roles == {"user": 3, "system": 1, "assistant": 1}
    assert report.conversations == 2
    shown = (
        "<system>s<user>u<assistant>a<user>u"
        if with_tokenizer
        else "system: s\nuser: u\nassistant: a\nuser: u"
    )
    assert report.samples[0].text == shown


@mark.parametrize(
    "settings", [{}, {"deduplicate": "exact"}, {"min_prompt_tokens": 2}, {"skip_rows": 1, "limit": 1}]
)
def test_it_counts_the_prompts_that_a_run_gets(tmp_path, tokenizer, settings):
    path = tmp_path / "d.jsonl"
    good = [line for line in LINES if "question" in line and '""' not in line and line.endswith("}")]
    path.write_text("\n".join(good))
    data = DataConfig(sources=({"path": str(path)}, {"task": "chain", "limit": 3}), **settings)
    report = data_report(data, tokenizer, seed=0)
    assert report.num_faults == 0
    assert report.num_prompts == len(load_prompts(data, tokenizer, seed=0))


def test_a_source_that_cannot_be_read_is_a_fault_and_the_others_are_counted(tmp_path, file, tokenizer):
    data = DataConfig(sources=({"path": str(tmp_path / "none.jsonl")}, {"path": str(file)}))
    report = data_report(data, tokenizer, seed=0)
    assert "none.jsonl does not exist" in report.faults[0]
    assert report.num_prompts == 5
