"""An instance confirms what decodes: a copy laid out otherwise than it was loaded is refused, of either model."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.modeling_utils import PreTrainedModel

from rlhfspec.actors.actor_messages import GenerationSpec
from rlhfspec.actors.generation.engine_host import ManifestHost
from rlhfspec.core.config import EngineConfig, SpeculationConfig
from rlhfspec.core.errors import ConfigError, ModelError, PlacementError, WeightsError
from rlhfspec.core.weight_records import WeightManifest
from rlhfspec.engine.cpu.streamed_linear import StreamedLinear
from rlhfspec.engine.drafters.drafter import part_of
from rlhfspec.engine.drafters.head.published_head import pack_head
from rlhfspec.engine.drafters.model_drafter import ModelDrafter
from rlhfspec.engine.drafters.suffix_drafter import SuffixDrafter
from rlhfspec.engine.model.llama_model import LlamaModel
from rlhfspec.engine.weights.chunks import pack_weights
from tests.helpers import tiny_pool
from tests.helpers.random_heads import random_head
from tests.helpers.tiny_llama import tiny_llama

TREE = SpeculationConfig(policy="fixed", num_nodes=4, depth=2, branching=2)
MODELS: dict[str, Callable[[], PreTrainedModel]] = {"target": tiny_pool.target, "draft": tiny_pool.draft}


def published(name: str, version: int = 1) -> tuple[WeightManifest, list[np.ndarray]]:
    return pack_weights(MODELS[name](), name=name, weight_version=version)  # type: ignore[arg-type]


def new_host(
    forward: str,
    device: str = "cpu",
    cache_dir: str | None = None,
    speculation: SpeculationConfig = TREE,
) -> ManifestHost:
    torch.set_num_threads(1)
    return ManifestHost(
        GenerationSpec(
            instance="gen-0",
            engine=EngineConfig(device=device, max_running_samples=2, probe=False, forward=forward),  # type: ignore[arg-type]
            speculation=speculation,
            dtype="float32",
            max_total_tokens=64,
            vocab_size=tiny_pool.VOCAB_SIZE,
            report_interval_s=1.0,
            cache_dir=cache_dir,
        )
    )


def test_an_engine_works_on_the_device_that_was_assigned_to_its_actor() -> None:
    host = new_host("auto", device="cuda")
    with pytest.raises(
        ConfigError, match=r"engine\.device is cuda but Ray assigned no GPU; set cluster\.generation"
    ):
        for name in MODELS:
            host.load_weights(*published(name))


def test_what_others_have_finished_is_looked_up_where_the_drafter_does() -> None:
    host = new_host("auto", speculation=SpeculationConfig(policy="fixed", drafter="suffix"))
    text = (np.array([1, 2, 3]), np.array([4, 5, 6, 7]))
    # before there are weights there is nobody to remember
    host.remember([text])
    host.load_weights(*published("target"))
    assert host.engine is not None and isinstance(drafter := host.engine.drafter, SuffixDrafter)
    host.remember([text])
    assert drafter.num_states == 1 + 7
    new_host("auto").remember([text])


def test_an_engine_is_not_built_where_its_gpu_has_no_room(monkeypatch) -> None:
    host = new_host("auto")
    host._spec = replace(host._spec, gpu_bytes=30 << 30, gpu_share=0.25)
    monkeypatch.setattr(ManifestHost, "device", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (79 << 30, 80 << 30))
    with pytest.raises(
        PlacementError, match=r"gen-0 plans to take 30\.00 GiB .* its share is 20\.00 GiB; set engine"
    ):
        host.load_weights(*published("target"))


@pytest.mark.parametrize("forward", ["auto", "stock"])
def test_loaded_weights_are_confirmed_with_the_published_checksum(forward: str) -> None:
    host = new_host(forward)
    for version in (1, 2):
        for name in MODELS:
            manifest, chunks = published(name, version)
            answer = host.load_weights(manifest, chunks)
            assert (answer.weight_version, answer.checksum) == (version, manifest.checksum)
    assert host.engine is not None and isinstance(host.engine.drafter, ModelDrafter)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("forward", ["auto", "stock"])
@pytest.mark.parametrize("name", MODELS)
def test_a_damaged_copy_is_not_confirmed(monkeypatch, name: str, forward: str, version: int) -> None:
    """A head's memory is damaged when it has been written: its lowest bit."""
    host = new_host(forward)
    for each in MODELS:
        if version > 1 or each != name:
            host.load_weights(*published(each))

    def damaged(write: Callable[..., None]) -> Callable[..., None]:
        def written(self: StreamedLinear, *what: Any) -> None:
            write(self, *what)
            if self.columns == tiny_pool.VOCAB_SIZE:
                self._panels.untyped_storage()[0] ^= 1

        return written

    manifest, chunks = published(name, version)
    for step in ("__init__", "take"):
        monkeypatch.setattr(StreamedLinear, step, damaged(getattr(StreamedLinear, step)))
    # a module's products are laid out with the engine, the target's first
    first = "target" if (forward, version) == ("stock", 1) else name
    with pytest.raises(
        WeightsError, match=rf"^{first} weights of gen-0: the copy of lm_head .* not confirmed"
    ):
        host.load_weights(manifest, chunks)
    monkeypatch.undo()
    if version > 1:
        assert host.engine is None, "weights that are not confirmed"
        host.load_weights(*published("draft" if name == "target" else "target", version))
        assert host.engine is None, "another model's version fixes nothing"
        assert host.load_weights(manifest, chunks).checksum == manifest.checksum
        assert host.engine is not None


def completions(host: ManifestHost) -> list[tuple]:
    assert host.engine is not None
    return [tiny_pool.bits(one) for one in host.engine.generate(tiny_pool.requests(3, new_tokens=20))]


def test_every_start_holds_our_own_model_where_the_family_is_ours() -> None:
    """And decodes what transformers' module decodes, through our products."""
    hosts = {forward: new_host(forward) for forward in ("auto", "stock")}
    for host in hosts.values():
        for name in MODELS:
            host.load_weights(*published(name))
    tokens = {forward: [one[0] for one in completions(host)] for forward, host in hosts.items()}
    assert tokens["auto"] == tokens["stock"]
    for forward, kind in (("auto", LlamaModel), ("stock", PreTrainedModel)):
        engine = hosts[forward].engine
        assert engine is not None and isinstance(part_of(engine.drafter, ModelDrafter), ModelDrafter)
        assert isinstance(engine.runner.model, kind)


def test_instances_of_a_machine_hold_each_version_once_and_decode_as_one_alone(tmp_path) -> None:
    alone, *both = new_host("auto"), *(new_host("auto", cache_dir=str(tmp_path)) for _ in range(2))
    for version in (1, 2):
        for name in MODELS:
            for host in (alone, *both):
                host.load_weights(*published(name, version))
        assert len([*(tmp_path / "shared_weights" / socket.gethostname()).iterdir()]) == len(MODELS)
        assert completions(both[0]) == completions(both[1]) == completions(alone)
    for name in MODELS:
        assert len({os.fstat(host._shared[name]._file).st_ino for host in both}) == 1


def test_a_head_is_kept_as_it_was_published_and_given_to_the_engine(monkeypatch) -> None:
    built = []

    def build(target, draft, **settings):
        built.append((draft, settings["drafter_version"]))
        return tiny_pool.engine("off", slots=2)

    monkeypatch.setattr("rlhfspec.actors.generation.engine_host.build_engine", build)
    host = new_host("auto", speculation=SpeculationConfig(policy="fixed", drafter="head"))
    head = random_head(tiny_pool.target(), draft_vocab_size=9)
    manifest, chunks = pack_head(head, weight_version=5)
    answer = host.load_weights(manifest, chunks)
    assert (answer.weight_version, answer.checksum) == (5, manifest.checksum) and not built
    host.load_weights(*published("target"))
    ((draft, version),) = built
    assert version == 5 and draft.config == head.config
    assert all(torch.equal(draft.tensors[name], tensor) for name, tensor in head.tensors.items())


def test_the_answer_to_a_head_is_the_checksum_of_what_drafts(monkeypatch) -> None:
    host = new_host("auto", speculation=SpeculationConfig(policy="fixed", drafter="head"))
    host.load_weights(*published("target"))
    for version in range(2):
        manifest, chunks = pack_head(random_head(tiny_pool.target(), seed=version), weight_version=version)
        assert host.load_weights(manifest, chunks).checksum == manifest.checksum
    monkeypatch.setattr(
        "rlhfspec.engine.drafters.head.head_drafter.HeadDrafter.load", lambda self, tensors: None
    )
    manifest, chunks = pack_head(random_head(tiny_pool.target(), seed=2), weight_version=2)
    assert host.load_weights(manifest, chunks).checksum != manifest.checksum


def test_a_head_of_another_target_is_refused_where_it_is_to_draft() -> None:
    host = new_host("auto", speculation=SpeculationConfig(policy="fixed", drafter="head"))
    host.load_weights(*pack_head(random_head(tiny_llama()), weight_version=0))
    with pytest.raises(ModelError, match="does not fit the target: expected vocabulary 64, got 19"):
        host.load_weights(*published("target"))
