"""Weights read one by one from a folder are, bit by bit, those of the loaded model; what is not plain is left to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhfspec.core.errors import ModelError
from rlhfspec.engine.weights import weight_files
from rlhfspec.engine.weights.chunks import WeightPacker, pack_weights
from rlhfspec.engine.weights.loading import load_causal_lm, load_hf_config, require_finite
from rlhfspec.engine.weights.stored_weights import StoredWeights, stored_weights
from rlhfspec.engine.weights.weight_files import check_weight_files
from tests.engine.model.test_llama_model import CONFIGS, stock_model


def saved(folder: Path, name: str, **settings: Any) -> Path:
    stock_model(CONFIGS[name], settings.pop("dtype", torch.float32)).save_pretrained(folder, **settings)
    return folder


def stored_in(folder: Path, dtype: str = "float32") -> StoredWeights | None:
    return stored_weights(str(folder), load_hf_config(str(folder)), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "llama, tied", "llama 3", "mistral, window", "qwen2", "qwen3"])
def test_the_packed_bytes_are_those_of_the_loaded_model(tmp_path: Path, name: str, dtype: str) -> None:
    # small shards: the order is of names and not of files
    folder = saved(tmp_path, name, max_shard_size="20KB")
    stored = stored_in(folder, dtype)
    assert stored is not None
    packer = WeightPacker(
        name="target",
        weight_version=0,
        hf_config_json=stored.config.to_json_string(use_diff=False),
        rooms=1,
    )
    chunks = [chunk.copy() for chunk in packer.chunks(stored.tensors())]
    manifest, expected = pack_weights(load_causal_lm(str(folder), dtype), name="target", weight_version=0)
    assert packer.manifest() == manifest
    assert [chunk.tobytes() for chunk in chunks] == [chunk.tobytes() for chunk in expected]


def test_a_header_is_read_once_while_its_file_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, opened, really = saved(tmp_path, "llama"), list[Path](), weight_files.safe_open

    def counted(file: Path, **how: Any) -> Any:
        opened.append(file)
        return really(file, **how)

    monkeypatch.setattr(weight_files, "safe_open", counted)
    for _ in range(3):
        assert stored_in(folder) is not None
    file = folder / "model.safetensors"
    assert opened == [file]
    tensors = load_file(file)
    save_file({name: tensor for name, tensor in tensors.items() if "norm" not in name}, file)
    assert stored_in(folder) is None and opened == [file, file], "another file of that name"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ModelError, match="is cut or damaged"):
        stored_in(folder)


def test_a_file_with_both_of_two_tied_weights_is_left_to_transformers(tmp_path: Path) -> None:
    file = saved(tmp_path, "llama, tied") / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = torch.zeros_like(tensors["model.embed_tokens.weight"])
    save_file(tensors, file, metadata={"format": "pt"})
    # two values: it does not tie them, whatever the config says
    assert stored_in(tmp_path) is None


def test_what_is_not_plain_is_left_to_transformers(tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama")
    assert stored_in(folder) is not None
    assert stored_weights("somebody/some-model", load_hf_config(str(folder)), "float32") is None
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["OtherForCausalLM"]}))
    assert stored_in(folder) is None
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("mlp.", "ffn."): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    assert stored_in(folder) is None
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    assert stored_in(folder) is None


@pytest.mark.parametrize(
    "said",
    [
        {"pad_token_id": 10_000},
        {"auto_map": {"AutoModelForCausalLM": "its_own.Model"}},
        {"dtype": "int8"},
        {"_attn_implementation": "flash_attention_2"},
    ],
)
def test_a_config_that_asks_for_more_is_left_to_transformers(tmp_path: Path, said: dict[str, Any]) -> None:
    folder = saved(tmp_path, "llama")
    config = load_hf_config(str(folder))
    assert stored_weights(str(folder), config, "float32") is not None
    for name, value in said.items():
        setattr(config, name, value)
    assert stored_weights(str(folder), config, "float32") is None


def test_a_cut_file_is_named(tmp_path: Path) -> None:
    file = saved(tmp_path, "llama") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors .* is cut or damaged"):
        stored_in(tmp_path)


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    file = saved(tmp_path, "llama") / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = float("inf")
    save_file(tensors, file, metadata={"format": "pt"})
    stored = stored_in(tmp_path)
    assert stored is not None
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj.* NaN or infinity"):
        require_finite(str(tmp_path), stored.tensors())


def test_an_adapter_beside_the_weights_is_refused_by_the_check_and_by_who_loads(tmp_path: Path) -> None:
    """transformers would put it into the model unasked; what is published would not have it."""
    folder = saved(tmp_path, "llama")
    (folder / "adapter_config.json").write_text("{}")
    assert stored_in(folder) is None
    with pytest.raises(ModelError, match=r"holds an adapter too .* merge it into the model"):
        check_weight_files(str(folder), stock_model(CONFIGS["llama"]))
    with pytest.raises(ModelError, match=r"holds an adapter too .* merge it into the model"):
        load_causal_lm(str(folder), "float32")


@pytest.mark.parametrize("change", ["gone", "damaged", "another shape"])
def test_a_file_that_changes_after_it_was_looked_at_is_named(tmp_path: Path, change: str) -> None:
    file = saved(tmp_path, "llama") / "model.safetensors"
    stored = stored_in(tmp_path)
    assert stored is not None
    if change == "gone":
        file.unlink()
    elif change == "damaged":
        file.write_bytes(b"no weights")
    else:
        save_file(load_file(file) | {"model.norm.weight": torch.ones(8)}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.safetensors .* let nothing write to"):
        list(stored.tensors())
