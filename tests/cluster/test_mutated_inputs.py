"""Whatever goes in, the outcome is success or one InputError of one line, and nothing half-made is left.

2,000 examples in CI, the same in every run. `RLHFSPEC_MUTATIONS=20000 pytest tests/cluster/test_mutated_inputs.py`
draws so many, others each time; what fails is shrunk and printed.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from mutations import (
    LIKELY,
    PATHS,
    changed_bytes,
    changed_safetensors,
    changed_trees,
    examples,
    overrides,
)

from rlhfspec.cluster.cli import main
from rlhfspec.cluster.folder.layout import choose_run_path
from rlhfspec.core.config import Config, DataConfig
from rlhfspec.core.config_io import config_from_dict, dump_config, load_config
from rlhfspec.core.errors import InputError
from rlhfspec.engine.weights.loading import load_causal_lm
from rlhfspec.learning.data.prompts import load_prompts
from rlhfspec.learning.data.statistics import DataReport
from rlhfspec.learning.models.tokenization import character_tokenizer
from rlhfspec.learning.tasks.chain_task import ALPHABET
from tests.conftest import TinyPair

NOON = datetime(2026, 1, 2, 12, 0, 0)
TREE = {
    "run": {"name": "r", "iterations": 3},
    "models": {"target": "a/target", "draft": "a/draft"},
    "data": {"path": "a.jsonl"},
    "sampling": {"temperature": 0.7, "stop_token_ids": [1, 2]},
    "speculation": {"policy": "fixed", "num_nodes": 4, "depth": 4},
    "cluster": {"generation": {"num_actors": 2}},
}
YAML = yaml.safe_dump(TREE).encode() + b"engine: &e {probe: false}\nreward: {kind: 'chain'} # a rule\n"
JSONL = b'{"question": "01:a+1=", "answer": "b"}\n{"question": "02:b+1=", "answer": 3}\n\n'
CHAT = (
    b'{"messages": [{"role": "user", "content": "01:a+1="}, {"role": "assistant", "content": "b"}], "answer": "b"}\n'
    b'{"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "02:b+1="}]}\n'
)
TOKENIZER = character_tokenizer(ALPHABET)
CHATTY = character_tokenizer(ALPHABET)
CHATTY.chat_template = "{% for m in messages %}{{ m['content'] }};{% endfor %}#"


def files_below(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def passes_or_refuses(action: Callable[[], Any], *, below: Path) -> Any:
    """Run; an InputError must be one printable line. Nothing may be left below the folder."""
    before = files_below(below)
    result = None
    try:
        result = action()
    except InputError as error:
        message = str(error)
        assert message.strip() and message.isprintable() and message.encode()
    assert files_below(below) == before
    return result


def check_config(config: Config, folder: Path) -> None:
    """What a config that is taken must keep: its run stays in its place, and it can be written and read."""
    path = passes_or_refuses(lambda: choose_run_path(config.run, caller_dir=folder, now=NOON), below=folder)
    if path is not None:
        place = (folder / Path(config.run.output_dir).expanduser()).resolve()
        assert path.is_absolute() and path.resolve().parent == place
    written = folder / "written.yaml"
    dump_config(config, written)
    assert load_config(written) == config
    written.unlink()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mutated")


@examples(0.25)
@given(tree=changed_trees(TREE))
def test_any_values_make_a_config_or_are_refused(tree: dict[Any, Any], folder: Path) -> None:
    config = passes_or_refuses(lambda: config_from_dict(tree), below=folder)
    if config is not None:
        check_config(config, folder)


@examples(0.2)
@given(raw=changed_bytes(YAML))
def test_any_bytes_of_yaml_make_a_config_or_are_refused(raw: bytes, folder: Path) -> None:
    file = folder / "c.yaml"
    file.write_bytes(raw)
    config = passes_or_refuses(lambda: load_config(file), below=folder)
    if config is not None:
        check_config(config, folder)


@examples(0.15)
@given(changes=st.lists(overrides(), min_size=1, max_size=3))
def test_any_overrides_make_a_config_or_are_refused(changes: list[str], folder: Path) -> None:
    file = folder / "c.yaml"
    file.write_bytes(YAML)
    config = passes_or_refuses(lambda: load_config(file, changes), below=folder)
    if config is not None:
        check_config(config, folder)


@examples(0.1)
@given(
    raw=changed_bytes(JSONL),
    on_long=st.sampled_from(["fail", "skip"]),
    suffix=st.sampled_from(["jsonl", "json"]),
)
def test_any_bytes_of_jsonl_make_prompts_or_are_refused(
    raw: bytes, on_long: Any, suffix: str, folder: Path
) -> None:
    file = folder / f"d.{suffix}"
    file.write_bytes(raw)
    data = DataConfig(path=str(file), max_prompt_tokens=64, on_long_prompt=on_long)
    dataset = passes_or_refuses(lambda: load_prompts(data, TOKENIZER, seed=0), below=folder)
    assert dataset is None or len(dataset) > 0


@examples(0.1)
@given(raw=changed_bytes(CHAT))
def test_any_bytes_of_conversations_make_prompts_or_are_refused_and_are_counted_alike(
    raw: bytes, folder: Path
) -> None:
    file = folder / "d.jsonl"
    file.write_bytes(raw)
    data = DataConfig(path=str(file), max_prompt_tokens=64)
    dataset = passes_or_refuses(lambda: load_prompts(data, CHATTY, seed=0), below=folder)
    report = passes_or_refuses(lambda: DataReport(data, CHATTY, seed=0), below=folder)
    assert report.num_prompts >= (len(dataset) if dataset is not None else 0)
    assert (dataset is None) == (report.num_faults > 0 or report.num_prompts == 0)


def parquet_bytes(compression: str, use_dictionary: bool) -> bytes:
    table = pa.table(
        {
            "question": [f"0{i % 9}:a+1=" for i in range(40)],
            "answer": ["b"] * 39 + [None],
            "extra": [[i, i] for i in range(40)],
        }
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table.slice(0, 39), sink, compression=compression, use_dictionary=use_dictionary)
    return sink.getvalue().to_pybytes()


PARQUETS = [parquet_bytes(c, d) for c in ("none", "snappy", "zstd") for d in (True, False)]


@examples(0.1)
@given(raw=st.sampled_from(PARQUETS).flatmap(lambda raw: changed_bytes(raw, fragments=False)))
def test_any_bytes_of_parquet_make_prompts_or_are_refused(raw: bytes, folder: Path) -> None:
    file = folder / "d.parquet"
    file.write_bytes(raw)
    dataset = passes_or_refuses(
        lambda: load_prompts(DataConfig(path=str(file)), TOKENIZER, seed=0), below=folder
    )
    assert dataset is None or len(dataset) > 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_pair: TinyPair) -> Path:
    return Path(shutil.copytree(tiny_pair.draft, tmp_path_factory.mktemp("models") / "draft"))


@examples(0.05)
@given(data=st.data())
def test_any_bytes_of_safetensors_make_a_model_or_are_refused(
    data: st.DataObject, model: Path, tiny_pair: TinyPair
) -> None:
    good = (tiny_pair.draft / "model.safetensors").read_bytes()
    changed = st.one_of(changed_safetensors(good), changed_bytes(good, fragments=False))
    (model / "model.safetensors").write_bytes(data.draw(changed))
    passes_or_refuses(lambda: load_causal_lm(str(model), "float32"), below=model)


@pytest.fixture(scope="module")
def good_config(tmp_path_factory: pytest.TempPathFactory, tiny_pair: TinyPair) -> Path:
    folder = tmp_path_factory.mktemp("checked")
    (folder / "p.jsonl").write_bytes(b'{"question": "01:a+1=", "answer": "b"}\n')
    tree = copy.deepcopy(TREE) | {
        "run": {"output_dir": str(folder / "runs"), "cache_dir": str(folder / "cache")},
        "models": {"target": str(tiny_pair.target), "draft": str(tiny_pair.draft)},
        "data": {"path": str(folder / "p.jsonl")},
        "sampling": {"max_new_tokens": 32},
    }
    (folder / "c.yaml").write_text(yaml.safe_dump(tree))
    return folder / "c.yaml"


@examples(0.05)
@given(changes=st.lists(overrides(keys=PATHS, values=LIKELY), min_size=1, max_size=3))
def test_check_passes_or_says_in_one_line_what_is_wrong(
    changes: list[str], good_config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files_below(good_config.parent)
    argv = ["check", "--config", str(good_config)]
    code = main([*argv, *(word for change in changes for word in ("--set", change))])
    err = capsys.readouterr().err
    assert code in (0, 2)
    if code == 2:
        assert err.startswith("error: ") and err.count("\n") == 1
    assert files_below(good_config.parent) == before
