"""A draft head in a run's states and checkpoints: what comes back is what was published, to the bit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.resume import checkpoints
from rlhfspec.cluster.resume import save_state as taking_up
from rlhfspec.cluster.resume.run_state import EvaluationMarks, last_state
from rlhfspec.cluster.resume.save_state import Boundary, StateKeeper
from rlhfspec.cluster.weights import first_weights
from rlhfspec.cluster.weights.publish import PublishedWeights
from rlhfspec.core.checkpoint_manifest import verify_checkpoint
from rlhfspec.core.config import Config
from rlhfspec.core.config_io import config_from_dict
from rlhfspec.core.errors import StorageError
from rlhfspec.engine.drafters.head.head_weights import HeadWeights, load_head, save_head
from rlhfspec.engine.drafters.head.published_head import pack_head
from rlhfspec.engine.weights.chunks import pack_weights
from rlhfspec.engine.weights.loading import load_tokenizer
from rlhfspec.policies.staleness.in_turns import InTurns
from tests.conftest import TinyPair
from tests.helpers.random_heads import random_head
from tests.helpers.tiny_llama import tiny_llama


@pytest.fixture(autouse=True)
def _without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks come from here instead of an object store."""
    monkeypatch.setattr(checkpoints, "get", lambda refs, **_: refs)
    monkeypatch.setattr(first_weights.ray, "put", lambda chunk: chunk)


@pytest.fixture
def config(tiny_pair: TinyPair) -> Config:
    return config_from_dict(
        {
            "models": {"target": str(tiny_pair.target), "draft": "heads/first"},
            "data": {"task": "chain"},
            "speculation": {"drafter": "head", "policy": "fixed"},
            "run": {"iterations": 6, "state_every": 1},
        }
    )


def published(head: HeadWeights, version: int) -> PublishedWeights:
    manifest, chunks = pack_head(head, weight_version=version)
    return PublishedWeights(manifest=manifest, chunk_refs=tuple(chunks))


def system_of(config: Config, draft: PublishedWeights) -> Any:
    manifest, chunks = pack_weights(tiny_llama(), name="target", weight_version=4)
    target = PublishedWeights(manifest=manifest, chunk_refs=tuple(chunks))
    sent: list[PublishedWeights] = []

    def save_state(folder: Path) -> None:
        folder.mkdir()
        (folder / "shard").write_bytes(b"weights")

    return SimpleNamespace(
        config=config,
        target=target,
        draft=draft,
        tokenizer=load_tokenizer(config.models.target),
        cursor=SimpleNamespace(restore=lambda cursor: None),
        trainers=SimpleNamespace(
            blind_to=lambda folder: [],
            save_state=save_state,
            load_state=lambda folder: None,
            take=lambda checksums: target,
        ),
        generation=SimpleNamespace(publish=sent.append),
        sent=sent,
    )


@pytest.fixture
def run_dir(tmp_path: Path, config: Config) -> RunDir:
    return RunDir.create(config, tmp_path / "run")


def keep(run_dir: RunDir, system: Any) -> Any:
    boundary = Boundary(num_iterations=4, cursor={"epoch": 0}, evaluations=EvaluationMarks())
    StateKeeper(system, run_dir, pytest.fail).save(boundary)
    state = last_state(run_dir, pytest.fail)
    assert state is not None
    return state


def test_a_resumed_run_drafts_with_the_head_of_its_state(run_dir: RunDir, config: Config) -> None:
    learned = random_head(tiny_llama(), draft_vocab_size=7, seed=8)
    state = keep(run_dir, system_of(config, published(learned, 3)))
    again = system_of(config, published(random_head(tiny_llama(), draft_vocab_size=7, seed=1), 0))
    taking_up.take_up(again, state, InTurns(list))
    assert again.draft.manifest == published(learned, 3).manifest
    assert [one.manifest.model for one in again.sent] == ["target", "draft"]


def test_a_run_that_drafted_otherwise_before_begins_with_the_head_that_the_config_names(
    run_dir: RunDir, config: Config
) -> None:
    manifest, chunks = pack_weights(tiny_llama(), name="draft", weight_version=3)
    model = PublishedWeights(manifest=manifest, chunk_refs=tuple(chunks))
    state = keep(run_dir, system_of(config, model))
    again = system_of(config, published(random_head(tiny_llama(), seed=1), 0))
    taking_up.take_up(again, state, InTurns(list))
    assert again.draft.manifest.weight_version == 0 and [one.manifest.model for one in again.sent] == [
        "target"
    ]


def test_a_run_that_drafted_with_a_head_before_begins_with_the_model_that_the_config_names(
    run_dir: RunDir, config: Config
) -> None:
    state = keep(run_dir, system_of(config, published(random_head(tiny_llama(), seed=8), 3)))
    by_model = config.model_copy(
        update={"speculation": config.speculation.model_copy(update={"drafter": "model"})}
    )
    manifest, chunks = pack_weights(tiny_llama(), name="draft", weight_version=0)
    again = system_of(by_model, PublishedWeights(manifest=manifest, chunk_refs=tuple(chunks)))
    taking_up.take_up(again, state, InTurns(list))
    assert again.draft.manifest.weight_version == 0 and [one.manifest.model for one in again.sent] == [
        "target"
    ]


def test_a_state_whose_head_is_another_is_refused(run_dir: RunDir, config: Config) -> None:
    state = keep(run_dir, system_of(config, published(random_head(tiny_llama(), seed=8), 3)))
    save_head(state.head_folder, random_head(tiny_llama(), seed=9))
    with pytest.raises(StorageError, match="expected draft version 3 with checksum"):
        taking_up.take_up(system_of(config, published(random_head(tiny_llama()), 0)), state, InTurns(list))


def test_a_checkpoint_of_a_head_is_one_that_others_load(run_dir: RunDir, config: Config) -> None:
    learned = random_head(tiny_llama(), draft_vocab_size=7, seed=8)
    system = system_of(config, published(learned, 3))
    checkpoints._save(system, run_dir, system.draft, "draft", 3)
    folder = run_dir.checkpoint_dir("draft", 3)
    assert verify_checkpoint(folder)["weight_version"] == 3
    head = load_head(folder, num_target_layers=2)
    assert head.config == learned.config
    assert all(torch.equal(head.tensors[name], tensor) for name, tensor in learned.tensors.items())
