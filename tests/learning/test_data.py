"""Prompts: sources, faults, and keys that are never reused."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
from pytest import fixture, mark, raises

from core.config import DataConfig, SamplingConfig
from core.errors import DataError
from core.records import SamplingParams
from learning.data import PromptCursor, load_prompts, sampling_params
from learning.tasks.chain import ALPHABET
from learning.tokenization import character_tokenizer, train_bpe


@fixture(scope="module")
def tokenizer():
    return character_tokenizer(ALPHABET)


@fixture
def jsonl(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(
        "".join(json.dumps({"question": f"{i}+{i}", "answer": str(2 * i)}) + "\n" for i in range(5))
    )
    return path


def test_the_character_tokenizer_round_trips_through_a_folder(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    ids = loaded.encode("03:c+5=", add_special_tokens=False)
    assert len(ids) == 7
    assert loaded.decode([*ids, loaded.eos_token_id], skip_special_tokens=True) == "03:c+5="
    assert loaded.get_vocab() == tokenizer.get_vocab()


def test_bpe_round_trips_any_text():
    bpe = train_bpe(["Tom has 12 apples.\n#### 12"] * 3, vocab_size=300)
    text = "Ana has 12 pears, ÿ\n#### 1234"
    assert bpe.decode(bpe.encode(text)) == text
    assert len(bpe.encode("1234")) == 4


def test_jsonl_and_parquet_give_equal_prompts(jsonl, tmp_path, tokenizer):
    rows = [json.loads(line) for line in jsonl.read_text().splitlines()]
    parquet = tmp_path / "data.parquet"
    pq.write_table(pa.Table.from_pylist(rows), parquet)
    one = load_prompts(DataConfig(path=str(jsonl)), tokenizer, seed=0)
    two = load_prompts(DataConfig(path=str(parquet)), tokenizer, seed=0)
    assert (
        [p.text for p in one.prompts] == [p.text for p in two.prompts] == ["0+0", "1+1", "2+2", "3+3", "4+4"]
    )
    assert [p.reference for p in one.prompts] == ["0", "2", "4", "6", "8"]
    assert one.prompts[1].token_ids.tolist() == tokenizer.encode("1+1")


def test_template_and_limit(jsonl, tokenizer):
    data = DataConfig(path=str(jsonl), prompt_template="{prompt}=", limit=2)
    dataset = load_prompts(data, tokenizer, seed=0)
    assert len(dataset) == 2
    assert tokenizer.decode(dataset.prompts[1].token_ids.tolist()) == "1+1="


def test_chat_uses_the_template(jsonl, tokenizer):
    chatty = character_tokenizer(ALPHABET)
    chatty.chat_template = "{% for m in messages %}:{{ m['content'] }};{% endfor %}#"
    dataset = load_prompts(DataConfig(path=str(jsonl), chat=True), chatty, seed=0)
    assert chatty.decode(dataset.prompts[1].token_ids.tolist()) == ":1+1;#"
    with raises(DataError, match="no chat template"):
        load_prompts(DataConfig(path=str(jsonl), chat=True), tokenizer, seed=0)


@mark.parametrize(
    ("text", "message"),
    [
        ('{"question": "a", "answer": "b"}\n{"question": \n', r"data\.jsonl:2 is not valid JSON"),
        ('{"question": "a", "answer": "b"}\n\n[1]\n', r"data\.jsonl:3 must be a JSON object"),
        ('{"question": "a"}\n', r"data\.jsonl:1 has no field 'answer'"),
        ('{"question": ["a"], "answer": "b"}\n', r"data\.jsonl:1: field 'question' must be text"),
        ("", "is empty"),
        ("\n\n", "is empty"),
        ('{"question": "1111111111", "answer": "b"}\n', r"data\.jsonl:1: the prompt has 10 tokens"),
    ],
)
def test_faults_name_file_and_line(tmp_path, tokenizer, text, message):
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    with raises(DataError, match=message):
        load_prompts(DataConfig(path=str(path), max_prompt_tokens=8), tokenizer, seed=0)


def test_a_missing_file_is_named(tmp_path, tokenizer):
    with raises(DataError, match="does not exist"):
        load_prompts(DataConfig(path=str(tmp_path / "none.jsonl")), tokenizer, seed=0)


def test_a_broken_parquet_file_is_named(tmp_path, tokenizer):
    (tmp_path / "x.parquet").write_text("not parquet")
    with raises(DataError, match="not a readable Parquet file"):
        load_prompts(DataConfig(path=str(tmp_path / "x.parquet")), tokenizer, seed=0)


def test_long_prompts_can_be_skipped(tmp_path, tokenizer):
    path = tmp_path / "d.jsonl"
    path.write_text('{"question": "1111", "answer": ""}\n{"question": "1", "answer": ""}\n')
    data = DataConfig(path=str(path), max_prompt_tokens=3, on_long_prompt="skip")
    dataset = load_prompts(data, tokenizer, seed=0)
    assert ([p.prompt_id for p in dataset.prompts], dataset.num_skipped) == ([1], 1)
    with raises(DataError, match="no prompt left"):
        load_prompts(data.model_copy(update={"limit": 1}), tokenizer, seed=0)


def test_the_chain_task_depends_on_the_seed_alone(tokenizer):
    data = DataConfig(task="chain", limit=50)
    one, again, other = (load_prompts(data, tokenizer, seed=s) for s in (1, 1, 2))
    assert [p.text for p in one.prompts] == [p.text for p in again.prompts] != [p.text for p in other.prompts]


def make_cursor(tokenizer, seed=3):
    return PromptCursor(
        load_prompts(DataConfig(task="chain", limit=5), tokenizer, seed=0), run_seed=seed, shuffle=True
    )


def test_group_members_share_prompt_and_group_but_no_index(tokenizer):
    requests = make_cursor(tokenizer).next_requests(2, 3, SamplingParams())
    assert [r.key.sample_index for r in requests] == [0, 1, 2, 3, 4, 5]
    assert [r.group_id for r in requests] == [0, 0, 0, 1, 1, 1]
    assert len({r.prompt.prompt_id for r in requests[:3]}) == 1


def test_an_epoch_gives_each_prompt_once_and_epochs_differ(tokenizer):
    cursor = make_cursor(tokenizer)
    epochs = [[r.prompt.prompt_id for r in cursor.next_requests(5, 1, SamplingParams())] for _ in range(4)]
    assert all(sorted(epoch) == [0, 1, 2, 3, 4] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_a_restored_cursor_goes_on_as_if_nothing_had_happened(tokenizer):
    cursor = make_cursor(tokenizer)
    cursor.next_requests(7, 2, SamplingParams())
    state = json.loads(json.dumps(cursor.state()))
    expected = [(r.key, r.prompt.prompt_id, r.group_id) for r in cursor.next_requests(6, 2, SamplingParams())]
    fresh = make_cursor(tokenizer)
    fresh.restore(state)
    got = [(r.key, r.prompt.prompt_id, r.group_id) for r in fresh.next_requests(6, 2, SamplingParams())]
    assert got == expected
    with raises(DataError, match="run_seed"):
        make_cursor(tokenizer, seed=4).restore(state)


def test_the_end_token_is_always_a_stop_token(tokenizer):
    params = sampling_params(SamplingConfig(stop_token_ids=(7,)), tokenizer)
    assert params.stop_token_ids == (7, tokenizer.eos_token_id)
