"""A checkpoint appears whole, with its manifest, and an earlier one stays until then."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rlhfspec.cluster.resume import checkpoints
from rlhfspec.cluster.resume.checkpoints import save_checkpoint
from rlhfspec.cluster.weights.publish import PublishedWeights
from rlhfspec.core import files
from rlhfspec.core.checkpoint_manifest import verify_checkpoint
from rlhfspec.core.errors import StorageError
from rlhfspec.engine.weights.chunks import model_checksum, pack_weights
from rlhfspec.engine.weights.loading import load_causal_lm, load_tokenizer
from rlhfspec.learning.data.chat.end_tokens import generation_end_tokens
from tests.conftest import TinyPair


@pytest.fixture
def save(tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Save the tiny target as a version; the chunks come from here instead of an object store."""
    model, tokenizer = load_causal_lm(str(tiny_pair.target), "float32"), load_tokenizer(str(tiny_pair.target))
    monkeypatch.setattr(checkpoints, "get", lambda refs, **_: refs)

    def call(folder: Path, version: int, **settings: Any) -> str:
        manifest, chunks = pack_weights(model, name="target", weight_version=version)
        weights = PublishedWeights(manifest=manifest, chunk_refs=tuple(chunks))
        save_checkpoint(weights, tokenizer, folder, dtype="float32", timeout_s=1.0, **settings)
        return manifest.checksum

    return call


def versions(folder: Path) -> dict[str, int]:
    """Every checkpoint below, verified; a partial one would not pass."""
    return {path.name: verify_checkpoint(path)["weight_version"] for path in folder.iterdir()}


def test_a_checkpoint_loads_and_is_what_its_manifest_says(tmp_path: Path, save):
    checksum = save(tmp_path / "target", 1)
    assert verify_checkpoint(tmp_path / "target")["parameter_checksum"] == checksum
    assert model_checksum(AutoModelForCausalLM.from_pretrained(tmp_path / "target")) == checksum
    assert AutoTokenizer.from_pretrained(tmp_path / "target").eos_token_id is not None
    save(tmp_path / "target", 2)
    assert versions(tmp_path) == {"target": 2}


def test_a_checkpoint_has_what_loaders_of_servers_read(tmp_path: Path, save, tiny_pair):
    """vLLM's and SGLang's: the class by config.json, weights by safetensors (and their index, where there is one)."""
    save(tmp_path / "target", 1)
    folder = tmp_path / "target"
    expected = load_causal_lm(str(tiny_pair.target), "float32").state_dict()
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text())["weight_map"] if index.exists() else {}
    found: dict[str, Any] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            named = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
            assert not listed or {listed[name] for name in named} == {file.name}
            assert not found.keys() & named.keys()
            found |= named
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not list(folder.glob("*.bin"))


def test_a_checkpoint_keeps_every_end_token_and_what_the_model_says_of_sampling(tmp_path: Path, save):
    # which transformers refuses to write anew: a temperature that greedy decoding does not read
    said = GenerationConfig(eos_token_id=[3, 5], temperature=0.6, do_sample=False)
    save(tmp_path / "target", 1, generation=said)
    verify_checkpoint(tmp_path / "target")
    assert generation_end_tokens(str(tmp_path / "target")) == [3, 5]
    assert GenerationConfig.from_pretrained(tmp_path / "target").temperature == 0.6


def test_wherever_the_disk_fills_up_the_earlier_checkpoint_stays(tmp_path: Path, save, monkeypatch):
    save(tmp_path / "target", 1)
    really, failed = os.fsync, 0
    for room in range(100):
        calls = 0

        def fsync(file: int, room: int = room) -> None:
            nonlocal calls
            calls += 1
            if calls > room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            really(file)

        with monkeypatch.context() as patch:
            patch.setattr(files.os, "fsync", fsync)
            try:
                save(tmp_path / "target", 2)
            except StorageError as error:
                failed += 1
                assert f"cannot write {tmp_path / 'target'}" in str(error)
                assert versions(tmp_path) == {"target": 1}
            else:
                break
    assert versions(tmp_path) == {"target": 2}
    # the manifest, the model, its config, the tokenizer's files: each of them failed once
    assert failed >= 4


def test_what_transformers_cannot_write_leaves_nothing(tmp_path: Path, save):
    """A limit on the size of files stands for the full disk: the library itself meets it."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(StorageError, match=r"target: expected room for it, got 'File too large'.*ulimit"):
            save(tmp_path / "target", 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
