"""Manifests as `rlhfspec kube render` writes them, and what is in them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from transformers import LlamaConfig

from rlhfspec.cluster.cli import main

ROOT = Path(__file__).resolve().parents[2]
CLUSTER_SPEC = {"RayJob": "rayClusterSpec", "RayService": "rayClusterConfig"}


def smollm2_config(folder: Path) -> Path:
    """A folder with the sizes of SmolLM2-135M as a config.json, without weights."""
    LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ).save_pretrained(folder)
    return folder


def rendered(out: Path, config: str | Path, *options: str) -> list[dict[str, Any]]:
    """The documents of one rendering, written to `out` too."""
    assert main(["kube", "render", "--config", str(ROOT / config), "--out", str(out), *options]) == 0
    return list(yaml.safe_load_all(out.read_text()))


def of_kind(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = [each for each in documents if each["kind"] == kind]
    return found


def cluster_spec(document: dict[str, Any]) -> dict[str, Any]:
    """The cluster of a RayJob, RayCluster or RayService."""
    key = CLUSTER_SPEC.get(document["kind"])
    return document["spec"][key] if key else document["spec"]


def groups(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The head group, then each worker group."""
    spec = cluster_spec(document)
    yield spec["headGroupSpec"]
    yield from spec["workerGroupSpecs"]
