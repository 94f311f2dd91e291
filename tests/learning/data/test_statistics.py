"""The report on a data set counts what a run would meet, and goes on after faults."""

import json

from pytest import fixture, mark

from rlhfspec.core.config import DataConfig
from rlhfspec.learning.data.statistics import DataReport
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
    report = DataReport(DataConfig(path=str(file), max_prompt_tokens=8), tokenizer, seed=0)
    assert (report.num_rows, report.num_prompts, report.num_faults) == (8, 4, 4)
    assert {kind: first.split(str(file))[1].split(" ")[0] for kind, (_, first) in report.faults.items()} == {
        "is not valid JSON": ":3",
        "has no field 'question' (data.prompt_field)": ":5",
        "the prompt is empty": ":7:",
        "the prompt has  tokens": ":8:",
    }
    assert sorted(report.lengths) == [0, 1, 2, 2, 3, 9]
    assert [sample[1:] for sample in report.samples] == [("1", 1), ("22", 2), ("333", 3)]


def test_faults_of_one_kind_are_counted_together(file, tokenizer):
    report = DataReport(DataConfig(path=str(file), max_prompt_tokens=2), tokenizer, seed=0)
    assert report.faults["the prompt has  tokens"][0] == 2
    assert ":4: the prompt has 3 tokens" in report.faults["the prompt has  tokens"][1]


def test_long_prompts_that_are_skipped_are_no_faults(file, tokenizer):
    data = DataConfig(path=str(file), max_prompt_tokens=8, on_long_prompt="skip")
    report = DataReport(data, tokenizer, seed=0)
    assert (report.num_faults, report.left_out.too_long) == (3, 1)


def test_without_a_tokenizer_lengths_are_characters(file):
    report = DataReport(DataConfig(path=str(file), max_prompt_tokens=2), None, seed=0)
    assert (report.unit, report.left_out.too_long, report.num_prompts) == ("characters", 0, 5)
    assert report.samples[1][2] == 2


@mark.parametrize("with_tokenizer", [True, False])
def test_conversations_are_shown_by_the_template_or_as_turns(tmp_path, tokenizer, with_tokenizer):
    path = tmp_path / "d.jsonl"
    turns = [
        {"role": role, "content": role[0]} for role in ("system", "user", "assistant", "user", "assistant")
    ]
    path.write_text(json.dumps({"messages": turns}) + "\n" + json.dumps({"messages": turns[1:3]}))
    report = DataReport(DataConfig(path=str(path)), tokenizer if with_tokenizer else None, seed=0)
    shown = (
        "<system>s<user>u<assistant>a<user>u"
        if with_tokenizer
        else "system: s\nuser: u\nassistant: a\nuser: u"
    )
    assert report.samples[0][1] == shown


def test_a_source_that_cannot_be_read_is_a_fault_and_the_others_are_counted(tmp_path, file, tokenizer):
    data = DataConfig(sources=({"path": str(tmp_path / "none.jsonl")}, {"path": str(file)}))
    report = DataReport(data, tokenizer, seed=0)
    assert "none.jsonl does not exist" in next(iter(report.faults.values()))[1]
    assert report.num_prompts == 5


def test_without_a_tokenizer_nothing_is_said_of_its_tokens(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    report = DataReport(DataConfig(path=str(path), messages_field="messages"), None, seed=0)
    assert report.num_prompts == 1 and report.remarks() == ()
