"""Text files as people have them: JSON lines, lists, CSV, packed; every value as it stands, or one clear fault."""

import bz2
import csv
import gzip
import json
from pathlib import Path

import pyarrow as pa
from pytest import mark, raises

from rlhfspec.core.errors import DataError
from rlhfspec.learning.data.raw_records import ReadProgress, iter_records

ROWS = [{"question": f"What is {n}?", "answer": f"{n:03}"} for n in range(5)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def read(path: Path) -> list[dict]:
    records = list(iter_records(str(path), "train"))
    for record in records:
        if record.fault is not None:
            raise record.fault
    return [record.values for record in records]


def zstd(data: bytes) -> bytes:
    out = pa.BufferOutputStream()
    with pa.CompressedOutputStream(out, "zstd") as stream:
        stream.write(data)
    return out.getvalue().to_pybytes()


@mark.parametrize("name", ["d.json", "d.jsonl", "d.ndjson"])
@mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@mark.parametrize(
    "text",
    [
        LINES,
        LINES.replace("\n", "\r\n"),
        json.dumps(ROWS),
        json.dumps(ROWS, indent=2),
        "\n [\r\n" + ",\r\n".join(json.dumps(row) for row in ROWS) + "\r\n]\r\n",
    ],
)
def test_lines_and_lists_are_the_same_rows(tmp_path, name, bom, text):
    (tmp_path / name).write_bytes(bom + text.encode())
    assert read(tmp_path / name) == ROWS


@mark.parametrize(
    ("suffix", "pack"), [(".gz", gzip.compress), (".bz2", bz2.compress), (".zst", zstd), ("", bytes)]
)
@mark.parametrize("form", [".jsonl", ".json", ".csv"])
def test_packed_files_are_what_they_hold(tmp_path, suffix, pack, form):
    table = "question,answer\n" + "".join(f"{row['question']},{row['answer']}\n" for row in ROWS)
    text = {".jsonl": LINES, ".json": json.dumps(ROWS), ".csv": table}[form]
    (tmp_path / f"d{form}{suffix}").write_bytes(pack(text.encode()))
    progress = ReadProgress()
    records = list(iter_records(str(tmp_path / f"d{form}{suffix}"), "train", progress=progress))
    assert [record.values for record in records] == ROWS
    assert progress.done <= progress.total


def test_a_packed_file_of_several_parts_is_whole_and_a_cut_one_is_refused(tmp_path):
    half = len(LINES) // 2
    packed = gzip.compress(LINES[:half].encode()) + gzip.compress(LINES[half:].encode())
    (tmp_path / "d.jsonl.gz").write_bytes(packed)
    assert read(tmp_path / "d.jsonl.gz") == ROWS
    (tmp_path / "d.jsonl.gz").write_bytes(packed[:-9])
    with raises(DataError, match=r"cannot read .*d\.jsonl\.gz: Truncated"):
        read(tmp_path / "d.jsonl.gz")


@mark.parametrize("delimiter", [",", "\t"])
def test_a_table_is_text_as_it_stands(tmp_path, delimiter):
    values = [
        "007",
        "NA",
        "",
        "1e5",
        'a "quote"',
        "two\r\nlines",
        f"a{delimiter}b",
        "2020-01-01",
        "é",
        "x" * 200_000,
    ]
    path = tmp_path / ("d.csv" if delimiter == "," else "d.tsv")
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerows([["question", "answer"], *([value, value] for value in values)])
    assert read(path) == [{"question": value, "answer": value} for value in values]


@mark.parametrize(
    ("name", "data", "message"),
    [
        (
            "d.json",
            b'{\n "data": [\n  {"question": "a"}\n ]\n}',
            r"d\.json begins with JSON of several lines.*the list",
        ),
        ("d.json", b'{"question":\n"a"}\n{"question":\n"b"}', r"d\.json:1 is not valid JSON"),
        ("d.json", b'[{"question": "a"},\n {"question" "b"}]', r"d\.json:2 is not valid JSON: Expecting ':'"),
        ("d.json", b'[{"question": "a"},\n 3]', r"d\.json:2 \(item 2\) must be a JSON object, got int"),
        ("d.json", b'[{"question": "a"}', r"d\.json:1 is not valid JSON: expected ',' or the list's '\]'"),
        ("d.json", b'[{"question": "a"}]\n{}', r"d\.json:2 is not valid JSON: more follows"),
        ("d.json", b'[{"question": "a"},]', r"d\.json:1 is not valid JSON: Expecting value"),
        ("d.json", b'[{"question": "a"} {}]', r"d\.json:1 is not valid JSON: expected ','"),
        ("d.jsonl", b'{"a": 1, "a": 2}', r"d\.jsonl:1: an object has the key 'a' twice"),
        ("d.json", b'[{"a": 1,\n "a": 2}]', r"d\.json:1: an object has the key 'a' twice"),
        (
            "d.json",
            b"[" + b"9" * 5000 + b"]",
            r"d\.json:1 cannot be read: an integer has more than 4300 digits",
        ),
        ("d.json", b'[{"question": "\xff"}]', r"d\.json is not UTF-8 text"),
        ("d.json", b"[" * 200_000, r"d\.json:1 cannot be read: its brackets are nested too deep"),
        ("d.jsonl", '{"question": "a"}'.encode("utf-16"), r"d\.jsonl:1 is not UTF-8 text.*save it as UTF-8"),
        ("d.csv", "question,answer\na,b\n".encode("utf-16"), r"d\.csv:1 is not UTF-8 text"),
        ("d.csv", b"question,answer\na,b\nc\xe9,d\n", r"d\.csv:3 is not UTF-8 text"),
        ("d.csv", b"question,answer\na,b\nc,d,e\n", r"d\.csv:3 has 3 columns, the first line names 2"),
        ("d.csv", b'question,answer\na,b\n"c,d\ne,f\n', r"d\.csv:3 is not valid CSV: unexpected end"),
        ("d.csv", b"question,question\na,b\n", r"d\.csv has two columns 'question'"),
        ("d.jsonl.gz", b"not packed", r"cannot read .*d\.jsonl\.gz: "),
    ],
)
def test_what_is_broken_is_named_with_its_place(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with raises(DataError, match=message):
        read(tmp_path / name)


def test_lines_after_a_broken_first_one_are_read_on(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"question": "cut off",\n' + LINES)
    records = list(iter_records(str(tmp_path / "d.jsonl"), "train"))
    assert [record.values for record in records[1:]] == ROWS
    assert records[0].fault is not None
