"""Rows in a file, the prompts that a run reads of them, and how these look to the model."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlhfspec.core.config import DataConfig
from rlhfspec.learning.data.prompts import PromptDataset, load_prompts


def write_rows(path: Path, rows: list[Any]) -> str:
    """Write a file in the form of its suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load_rows(folder: Path, tokenizer: Any, rows: list[Any], **settings: Any) -> PromptDataset:
    """The prompts of rows in d.jsonl."""
    path = write_rows(folder / "d.jsonl", rows)
    return load_prompts(DataConfig(path=path, **settings), tokenizer, seed=0)


def as_seen(dataset: PromptDataset, tokenizer: Any) -> list[str]:
    """Every prompt as text."""
    return [str(tokenizer.decode(prompt.token_ids.tolist())) for prompt in dataset.prompts]
