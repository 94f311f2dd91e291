"""Folders as people have them: never a test split for training, nothing hidden, subsets as the card says."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from data_rows import write_rows as write
from pytest import mark, raises

from rlhfspec.core.errors import DataError
from rlhfspec.learning.data.data_files import find_files
from rlhfspec.learning.data.raw_records import iter_records

TRAIN, TEST = [{"question": "t", "answer": "1"}], [{"question": "held out", "answer": "2"}]


def read(path: Path | str, split: str = "train") -> list[dict]:
    return [record.values for record in iter_records(str(path), split)]


def make(folder: Path, *names: str) -> Path:
    for name in names:
        write(folder / name, [{"question": name, "answer": ""}])
    return folder


def found(folder: Path, split: str = "train") -> list[str]:
    files = find_files(str(folder), split)
    assert files is not None
    return [str(file.relative_to(folder)) for file in files]


@mark.parametrize(
    ("train", "test"),
    [
        ("train.jsonl", "test.jsonl"),
        ("TRAIN.jsonl", "Test.jsonl"),
        ("train0.jsonl", "test0.jsonl"),
        ("gsm8k_train_v2.jsonl", "gsm8k_eval_v2.jsonl"),
        ("train/a.jsonl", "test/a.jsonl"),
        ("train/a.jsonl", "test/train-questions.jsonl"),
        ("data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"),
        ("split=train/part-0.parquet", "split=test/part-0.parquet"),
        ("year=2024/split=train/p.parquet", "year=2024/split=test/p.parquet"),
        ("partition=train/p.parquet", "partition=test/p.parquet"),
        ("training/x.jsonl", "evaluation/x.jsonl"),
        ("train.jsonl", "heldout.jsonl"),
        ("train.jsonl", "math_held_out.jsonl"),
        ("train.json", "test.json"),
    ],
)
def test_a_test_split_is_never_taken_for_training(tmp_path, train, test):
    make(tmp_path, train, test)
    assert found(tmp_path) == [train]
    other = "holdout" if "held" in test else "test"
    assert found(tmp_path, other) == [test]
    with raises(DataError, match="no file of split 'validation'"):
        found(tmp_path, "validation")


@mark.parametrize(
    ("names", "split", "message"),
    [
        (("a.jsonl", "b.jsonl"), "test", "no file of split 'test'.*of split 'train'"),
        (("test.jsonl",), "train", "no file of split 'train'; it holds test.jsonl"),
        (("a.jsonl", "heldout.jsonl"), "train", "no file of split 'train'"),
        (("train_test.jsonl", "train.jsonl"), "train", r"train_test\.jsonl is named after several splits"),
        (
            ("data/train_sft-00000-of-00001.parquet", "data/train_gen-00000-of-00001.parquet"),
            "train",
            "several splits that are named after 'train': train_gen, train_sft; name one",
        ),
        (("train.jsonl", "train.jsonl.gz"), "train", "holds both JSON lines and JSON lines"),
        (("train.jsonl", "train.parquet"), "train", "holds both JSON lines and Parquet"),
        (("train.jsonl", "train.json"), "train", "holds both JSON and JSON lines"),
        (("train.csv", "train.jsonl"), "train", "holds both CSV and JSON lines"),
    ],
)
def test_what_is_not_clear_is_refused(tmp_path, names, split, message):
    folder = make(tmp_path / "shards", *names)
    with raises(DataError, match=message):
        found(folder, split)


def test_splits_of_other_names_are_read_by_their_names(tmp_path):
    names = (
        "data/test_sft-00000-of-00001.parquet",
        "data/train_sft-00000-of-00001.parquet",
        "split=extra/a.parquet",
    )
    make(tmp_path, *names)
    assert [found(tmp_path, split) for split in ("test_sft", "train_sft", "extra")] == [
        [name] for name in names
    ]
    assert found(tmp_path, "train") == [names[1]]


def test_a_pattern_never_mixes_splits(tmp_path):
    make(tmp_path, "train-1.jsonl", "train-2.jsonl", "test-1.jsonl", "more/math-test-prep/a.jsonl")
    for pattern in ("*.jsonl", "**/*.jsonl", "t*-1.jsonl"):
        with raises(DataError, match=r"names files of several splits.*narrow the pattern"):
            find_files(str(tmp_path / pattern), "train")
    for pattern, number in (("train*", 2), ("test*", 1), ("more/*/a.jsonl", 1)):
        assert len(find_files(str(tmp_path / pattern), "train") or ()) == number


def test_a_folder_that_is_named_itself_is_meant(tmp_path):
    make(tmp_path / "test", "a.jsonl")
    assert found(tmp_path / "test") == found(tmp_path / "test", "test") == ["a.jsonl"]


def test_what_is_hidden_is_no_data(tmp_path):
    hidden = (
        "._part.jsonl",
        ".part.jsonl.crc",
        ".ipynb_checkpoints/part-checkpoint.jsonl",
        "__MACOSX/part.jsonl",
        "sub/.cache/x.parquet",
        "__pycache__/a.jsonl",
        "_delta_log/00.checkpoint.parquet",
        "_temporary/a.jsonl",
    )
    make(tmp_path, "part.jsonl", "sub/part.jsonl", *hidden)
    assert found(tmp_path) == ["part.jsonl", "sub/part.jsonl"]
    assert len(find_files(str(tmp_path / "**" / "*.jsonl"), "train") or ()) == 3  # _temporary was asked for
    asked = find_files(str(tmp_path / "__MACOSX" / "*.jsonl"), "train")
    assert asked == [tmp_path / "__MACOSX" / "part.jsonl"]
    below_hidden = tmp_path / ".cache" / "__x__"
    make(below_hidden, "a.jsonl")
    assert found(below_hidden) == ["a.jsonl"]


def test_descriptions_beside_data_are_no_rows(tmp_path):
    make(tmp_path, "part.jsonl")
    (tmp_path / "stats.json").write_text('{\n "rows": 1\n}')
    (tmp_path / "dataset_infos.json").write_text("{}")
    (tmp_path / "one.json").write_text('{"license": "MIT"}')
    assert found(tmp_path) == ["part.jsonl"]
    (tmp_path / "more.json").write_text(json.dumps(TRAIN))
    with raises(DataError, match="holds both JSON and JSON lines"):
        found(tmp_path)


CARD = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: [main/test-*]
- config_name: socratic
  data_dir: socratic
  data_files:
  - split: train
    path: "*.parquet"
---
# Card
"""


def card_folder(folder: Path, card: str = CARD) -> Path:
    write(folder / "main" / "train-00000-of-00001.parquet", TRAIN)
    write(folder / "main" / "test-00000-of-00001.parquet", TEST)
    write(folder / "socratic" / "s.parquet", [{"question": "s", "answer": "3"}])
    (folder / "README.md").write_text(card)
    return folder


def test_subsets_are_those_of_the_card(tmp_path, monkeypatch):
    folder = card_folder(tmp_path / "gsm")
    assert read(f"{folder}:main") == TRAIN
    assert read(f"{folder}:main", "test") == TEST
    assert read(f"{folder}:socratic") == [{"question": "s", "answer": "3"}]
    monkeypatch.chdir(tmp_path)
    assert read("gsm:main") == TRAIN
    for path, split, message in (
        (folder, "train", r"holds several subsets \(main, socratic\).*set data\.path to .*gsm:main"),
        (f"{folder}:other", "train", "no subset 'other'; its README.md names main, socratic"),
        (f"{folder}:socratic", "test", "no split 'test' in the subset .*it has train"),
    ):
        with raises(DataError, match=message):
            read(path, split)


def test_a_subset_that_is_a_folder_has_the_splits_that_its_files_are_named_after(tmp_path):
    card = "---\na: 1\nconfigs:\n- config_name: easy\n  data_dir: main\n- config_name: gone\n  data_dir: x\n---\n"
    folder = card_folder(tmp_path, card)
    assert read(f"{folder}:easy") == TRAIN
    assert read(f"{folder}:easy", "test") == TEST
    with raises(DataError, match="has no file of split 'dev'"):
        read(f"{folder}:easy", "dev")
    with raises(DataError, match="holds no file"):
        read(f"{folder}:gone")


def test_a_default_subset_is_taken_without_its_name(tmp_path):
    card = CARD.replace("config_name: socratic", "config_name: socratic\n  default: true")
    assert read(card_folder(tmp_path, card)) == [{"question": "s", "answer": "3"}]


@mark.parametrize(
    ("card", "path", "message"),
    [
        ("---\na: 1\nconfigs:\n- [\n---\n", "", "cannot read the subsets in .*README.md"),
        (
            "---\na: 1\nconfigs: {}\n---\n",
            ":main",
            "no subset 'main': its README.md names none.*such as .*/main",
        ),
        ("# none", ":main", "has no subset 'main'"),
        (
            CARD.replace("main/train-*", "main/gone-*"),
            ":main",
            "README.md names 'main/gone-.*' for split 'train'",
        ),
        (
            "---\na: 1\nconfigs:\n- config_name: default\n  data_files: '**/t*.parquet'\n---\n",
            "",
            "names files of several splits",
        ),
    ],
)
def test_a_card_that_does_not_fit_is_one_error(tmp_path, card, path, message):
    folder = card_folder(tmp_path, card)
    with raises(DataError, match=message):
        read(f"{folder}{path}")


def test_a_card_that_says_how_to_read_is_left_to_datasets(tmp_path, monkeypatch):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.csv").write_text("question;answer\nq;a\n")
    (tmp_path / "d" / "README.md").write_text(
        "---\nx: 1\nconfigs:\n- config_name: s\n  sep: ;\n  data_files: a.csv\n---\n"
    )
    assert read(f"{tmp_path / 'd'}:s") == [{"question": "q", "answer": "a"}]


def test_what_save_to_disk_wrote_is_read(tmp_path):
    from datasets import Dataset, DatasetDict, NamedSplit

    both = DatasetDict({"train": Dataset.from_list(TRAIN), "test": Dataset.from_list(TEST)})
    both.save_to_disk(tmp_path / "both")
    Dataset.from_list(TRAIN).save_to_disk(tmp_path / "one")
    Dataset.from_list(TEST, split=NamedSplit("test")).save_to_disk(tmp_path / "held")
    assert read(tmp_path / "both") == read(tmp_path / "one") == read(tmp_path / "both" / "train") == TRAIN
    assert read(tmp_path / "both", "test") == read(tmp_path / "held", "test") == TEST
    with raises(DataError, match="has no split 'dev'; it has train, test"):
        read(tmp_path / "both", "dev")
    with raises(DataError, match=r"was saved from split 'test', expected 'train'; set data\.split to test"):
        read(tmp_path / "held")


@mark.parametrize(
    "names",
    [
        ("train.jsonl", "test.jsonl", "dev.jsonl"),
        ("data/train-00000-of-00001.parquet", "data/validation-00000-of-00001.parquet"),
        ("training/a.jsonl", "eval/a.jsonl"),
        ("my-train.jsonl", "my_val_2.jsonl"),
        ("my.train.jsonl", "my.test.jsonl", "v1.val.jsonl"),
        ("test/train.jsonl", "train/a.jsonl"),
        ("a.jsonl", ".hidden.jsonl", "__x__/b.jsonl", "sub/c.jsonl"),
        ("train1.jsonl", "train2.jsonl", "test1.jsonl"),
    ],
)
def test_splits_are_those_that_datasets_finds(tmp_path, names):
    from datasets.data_files import DataFilesDict, get_data_patterns

    make(tmp_path, *names)
    theirs = DataFilesDict.from_patterns(get_data_patterns(str(tmp_path)), base_path=str(tmp_path))
    for split, files in theirs.items():
        assert found(tmp_path, str(split)) == sorted(str(Path(file).relative_to(tmp_path)) for file in files)


def test_columns_of_every_kind_of_text_are_text(tmp_path):
    texts = pa.array(["a", "b", "a"])
    kinds = {
        "question": texts.cast(pa.large_string()),
        "answer": texts.dictionary_encode(),
        "view": texts.cast(pa.string_view()),
    }
    pq.write_table(pa.table(kinds), tmp_path / "x.parquet")
    assert read(tmp_path / "x.parquet") == [dict.fromkeys(kinds, value) for value in ("a", "b", "a")]


def test_an_empty_shard_among_others_is_nothing(tmp_path):
    make(tmp_path, "a.jsonl")
    (tmp_path / "b.jsonl").touch()
    assert len(read(tmp_path)) == 1
