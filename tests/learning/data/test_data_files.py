"""Which files a path names; shards are read in order, one after the other."""

import pyarrow as pa
import pyarrow.parquet as pq
from data_rows import write_rows as write
from pytest import fixture, mark, raises

from rlhfspec.core.config import DataConfig
from rlhfspec.core.errors import ConfigError, DataError
from rlhfspec.learning.data.prompts import load_prompts
from rlhfspec.learning.models.tokenization import train_bpe


@fixture(scope="module")
def tokenizer():
    return train_bpe(["Tom has 12 apples."], vocab_size=300)


def rows(first, count=3):
    return [{"question": f"{n}?", "answer": str(n), "more": {"a": n}} for n in range(first, first + count)]


def texts(path, tokenizer, **settings):
    return [p.text for p in load_prompts(DataConfig(path=str(path), **settings), tokenizer, seed=0).prompts]


@mark.parametrize("suffix", ["parquet", "jsonl"])
def test_shards_of_a_folder_or_pattern_are_read_in_order(tmp_path, tokenizer, suffix):
    for number, name in enumerate(("00000-of-00002", "00001-of-00002")):
        write(tmp_path / "shards" / f"{name}.{suffix}", rows(3 * number))
    expected = [f"{n}?" for n in range(6)]
    assert texts(tmp_path / "shards", tokenizer) == expected
    assert texts(tmp_path / "shards" / f"*.{suffix}", tokenizer) == expected
    assert texts(tmp_path / "**" / f"0*.{suffix}", tokenizer) == expected
    assert texts(tmp_path / "shards", tokenizer, skip_rows=2, limit=3) == expected[2:5]


def test_held_out_rows_and_the_rest_are_the_whole(tmp_path, tokenizer):
    write(tmp_path / "d.jsonl", rows(0, 6))
    held_out = texts(tmp_path / "d.jsonl", tokenizer, limit=2)
    assert [*held_out, *texts(tmp_path / "d.jsonl", tokenizer, skip_rows=2)] == [f"{n}?" for n in range(6)]
    with raises(DataError, match=r"more than data\.skip_rows \(6\), got 6"):
        texts(tmp_path / "d.jsonl", tokenizer, skip_rows=6)


def test_of_a_folder_the_split_is_read(tmp_path, tokenizer):
    write(tmp_path / "main" / "train-00000-of-00001.parquet", rows(0))
    write(tmp_path / "main" / "test-00000-of-00001.parquet", rows(9))
    assert texts(tmp_path, tokenizer) == ["0?", "1?", "2?"]
    assert texts(tmp_path, tokenizer, split="test") == ["9?", "10?", "11?"]
    with raises(DataError, match=r"no file of split 'validation'; it holds main/test"):
        texts(tmp_path, tokenizer, split="validation")


def test_a_fault_in_a_shard_names_the_shard(tmp_path, tokenizer):
    write(tmp_path / "s" / "a.jsonl", rows(0))
    write(tmp_path / "s" / "b.jsonl", [*rows(3), {"question": ["x"], "answer": ""}])
    with raises(DataError, match=r"s/b\.jsonl:4: field 'question' must be text"):
        texts(tmp_path / "s", tokenizer)
    write(tmp_path / "p" / "a.parquet", rows(0))
    write(tmp_path / "p" / "b.parquet", [{"other": "x", "answer": "y"}])
    with raises(DataError, match=r"p/b\.parquet has no field 'question'"):
        texts(tmp_path / "p", tokenizer)


def test_folders_and_patterns_that_name_nothing(tmp_path, tokenizer):
    (tmp_path / "empty").mkdir()
    with raises(DataError, match="empty holds no file"):
        texts(tmp_path / "empty", tokenizer)
    with raises(DataError, match=r"the pattern .*names no file"):
        texts(tmp_path / "*.parquet", tokenizer)
    write(tmp_path / "both" / "a.jsonl", rows(0))
    write(tmp_path / "both" / "a.parquet", rows(0))
    with raises(DataError, match="holds both JSON lines and Parquet"):
        texts(tmp_path / "both", tokenizer)
    with raises(DataError, match=r"expected a file of JSON lines"):
        (tmp_path / "c.txt").write_text("a,b")
        texts(tmp_path / "*.txt", tokenizer)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.xyz").write_text("x")
    with raises(DataError, match="cannot load the data set"):
        texts(tmp_path / "other", tokenizer)


def test_parquet_of_no_rows_and_of_two_columns_of_one_name(tmp_path, tokenizer):
    schema = pa.schema([("question", pa.string()), ("answer", pa.string())])
    pq.write_table(pa.Table.from_pylist([], schema=schema), tmp_path / "none.parquet")
    with raises(DataError, match="is empty: expected at least one record"):
        texts(tmp_path / "none.parquet", tokenizer)
    column = pa.array(["a"])
    twice = pa.Table.from_arrays([column] * 3, names=["question", "question", "answer"])
    pq.write_table(twice, tmp_path / "twice.parquet")
    with raises(DataError, match="has two columns 'question'; rename or drop one"):
        texts(tmp_path / "twice.parquet", tokenizer)


FILTER = """
def keep(row):
    return row["more"]["a"] % 2 == 0

def broken(row):
    return 1 / 0

def vague(row):
    return "yes"

number = 3
"""


@mark.parametrize("suffix", ["parquet", "jsonl"])
def test_a_filter_sees_all_columns_and_is_counted(tmp_path, tokenizer, suffix, monkeypatch):
    (tmp_path / f"row_filters_{suffix}.py").write_text(FILTER)
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / f"d.{suffix}"
    write(path, rows(0, 5))
    data = DataConfig(path=str(path), filter=f"row_filters_{suffix}:keep")
    dataset = load_prompts(data, tokenizer, seed=0)
    assert [(p.prompt_id, p.text) for p in dataset.prompts] == [(0, "0?"), (2, "2?"), (4, "4?")]
    assert dataset.notes() == ["prompts left out: 2 by data.filter"]
    for name, kind, message in (
        ("broken", DataError, r"(:1|row 0): data\.filter .*:broken raised ZeroDivisionError"),
        ("vague", DataError, "returned str; expected true or false"),
        ("none", ConfigError, "has no 'none'"),
        ("number", ConfigError, "'number' is int, not a function"),
    ):
        with raises(kind, match=message):
            texts(path, tokenizer, filter=f"row_filters_{suffix}:{name}")
    with raises(ConfigError, match="cannot import no_such_module"):
        texts(path, tokenizer, filter="no_such_module:keep")
    with raises(ConfigError, match="names no function"):
        texts(path, tokenizer, filter="row_filters")


@mark.parametrize(("how", "left"), [("none", 5), ("exact", 4), ("normalized", 2)])
def test_duplicates_are_left_out_as_asked(tmp_path, tokenizer, how, left):
    prompts = ["Tom has", "Tom has", "tom  HAS\n", "\uff34om has", "Ana has"]
    write(tmp_path / "d.jsonl", [{"question": text, "answer": str(n)} for n, text in enumerate(prompts)])
    dataset = load_prompts(DataConfig(path=str(tmp_path / "d.jsonl"), deduplicate=how), tokenizer, seed=0)
    assert len(dataset) == left and dataset.prompts[0].reference == "0"
    assert dataset.left_out is not None and dataset.left_out.duplicates == 5 - left


def test_short_prompts_are_left_out(tmp_path, tokenizer):
    write(tmp_path / "d.jsonl", [{"question": "1" * n, "answer": ""} for n in (1, 2, 3, 4)])
    assert texts(tmp_path / "d.jsonl", tokenizer, min_prompt_tokens=3) == ["111", "1111"]


def test_a_million_characters_are_measured_but_not_tokenised(tmp_path, tokenizer):
    write(tmp_path / "d.jsonl", [{"question": "x" * n, "answer": ""} for n in (10**5, 10**6, 3)])
    dataset = load_prompts(
        DataConfig(path=str(tmp_path / "d.jsonl"), on_long_prompt="skip"), tokenizer, seed=0
    )
    assert (len(dataset), dataset.left_out.too_long) == (1, 2)


@mark.parametrize("name", ["d.parquet", "d.jsonl", "d.csv", "d.json"])
def test_a_file_that_git_lfs_has_not_fetched_is_named(tmp_path, tokenizer, name):
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12\n")
    for path in (tmp_path / name, tmp_path):
        with raises(DataError, match=f"{name} is a pointer of Git LFS"):
            load_prompts(DataConfig(path=str(path)), tokenizer, seed=0)
