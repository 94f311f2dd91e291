"""Files of models, each through what reads it for a run: config.json and its rope, GGUF."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gguf import GGUFWriter
from tiny_gguf import write_tiny_gguf

from rlhfspec.engine.weights.loading import load_hf_config
from rlhfspec.learning.models.gguf_folder import convert_gguf, read_head

CONFIG = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def config(name: str, value: Any, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {name: value}))
    load_hf_config(str(folder))


def rope(name: str, value: Any, folder: Path) -> None:
    config("rope_parameters", {"rope_type": "default", "rope_theta": 1e4, name: value}, folder)


def gguf_metadata(name: str, value: Any, folder: Path) -> None:
    writer = GGUFWriter(folder / "tiny.gguf", "llama")
    writer.add_float32(name.replace("ARCH", "llama"), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    read_head(folder / "tiny.gguf")


def gguf_tensors(name: str, _: Any, folder: Path) -> None:
    convert_gguf(write_tiny_gguf(folder / "tiny.gguf", tensors=(name,)).file, folder / "out")


FEEDS = {"config": config, "config.rope": rope, "gguf.metadata": gguf_metadata, "gguf.tensors": gguf_tensors}
