"""A version that comes bucket by bucket is confirmed whole, or nothing decodes until one is."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers.modeling_utils import PreTrainedModel

from rlhfspec.actors.actor_messages import GenerationSpec
from rlhfspec.actors.generation.engine_host import ManifestHost
from rlhfspec.actors.transport.broadcast import BroadcastForm, BroadcastGroup, BroadcastHost, join_broadcast
from rlhfspec.core.config import EngineConfig, SpeculationConfig
from rlhfspec.core.errors import WaitTimeout, WeightsError
from rlhfspec.core.weight_records import WORDS, DigestKind, WeightManifest, kind_of
from rlhfspec.engine.weights.chunks import WeightPacker, model_checksum, pack_weights, unique_tensors
from tests.helpers import tiny_pool
from tests.helpers.windows import without_a_gpu

CHUNK_BYTES = 20_000
FORMS: list[BroadcastForm] = ["gloo", "gloo_on_device", "shared"]
"The second goes about it as NCCL's does, the third as members of one GPU do."


@pytest.fixture(autouse=True)
def _windows(monkeypatch: pytest.MonkeyPatch) -> None:
    without_a_gpu(monkeypatch)


@pytest.fixture
def host() -> ManifestHost:
    torch.set_num_threads(1)
    host = ManifestHost(
        GenerationSpec(
            instance="gen-0",
            engine=EngineConfig(max_running_samples=2, probe=False),
            speculation=SpeculationConfig(drafter="none", policy="off"),
            dtype="float32",
            max_total_tokens=40,
            vocab_size=tiny_pool.VOCAB_SIZE,
            report_interval_s=1.0,
        )
    )
    host.load_weights(*published(1))
    return host


def published(version: int) -> tuple[WeightManifest, list[np.ndarray]]:
    return pack_weights(model_of(version), name="target", weight_version=version, chunk_bytes=CHUNK_BYTES)


def model_of(version: int) -> PreTrainedModel:
    model = copy.deepcopy(tiny_pool.target())
    for parameter in model.parameters():
        parameter.data.mul_(1.0 + version / 64)
    return model


def pair(form: BroadcastForm) -> tuple[BroadcastGroup, BroadcastGroup]:
    cpu = torch.device("cpu")
    host = BroadcastHost(
        host="127.0.0.1", members=("gen-0",), form=form, device=cpu, room_bytes=2 * CHUNK_BYTES
    )
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(
            join_broadcast, host.ticket, rank=1, me="gen-0", host="127.0.0.1", timeout_s=2.0, device=cpu
        )
        return host.join(2.0), joined.result(timeout=60)


def send(
    group: BroadcastGroup,
    version: int,
    *,
    damaged: int = -1,
    until: int = 99,
    chunk_bytes: int = CHUNK_BYTES,
    cuts: bool = False,
) -> WeightManifest:
    """As the trainer does, two buffers in turn."""
    packer = WeightPacker(
        name="target",
        weight_version=version,
        hf_config_json="{}",
        chunk_bytes=chunk_bytes,
        cuts=cuts,
        rooms=group.rooms,
        device=group.device,
        kind=kind_of_form(group.device),
    )
    for index, bucket in enumerate(packer.buckets(unique_tensors(model_of(version)))):
        if index == damaged:
            bucket[5] ^= 1
        if index == until:
            break
        group.send(bucket, packer.last_digest, f"chunk {index}")
    group.settle()
    return packer.manifest()


def kind_of_form(device: torch.device | None) -> DigestKind:
    """Between devices words are summed."""
    return "xxh3" if device is None else "words"


@pytest.mark.parametrize("form", FORMS)
def test_what_is_broadcast_is_what_decodes_and_is_confirmed(host: ManifestHost, form: BroadcastForm) -> None:
    root, member = pair(form)
    layout, _ = published(1)
    assert len(layout.chunk_num_bytes) > 2
    with ThreadPoolExecutor(1) as pool:
        for version in (2, 3):
            sent = pool.submit(send, root, version)
            kind = kind_of_form(member.device)
            told = replace(layout, weight_version=version, checksum=WORDS if kind == "words" else "")
            answer = host.receive_weights(told, member)
            manifest = sent.result(timeout=60)
            assert (answer.weight_version, answer.checksum) == (version, manifest.checksum)
            assert kind_of(answer.checksum) == kind
            assert answer.checksum == model_checksum(model_of(version), like=answer.checksum)
            assert host.engine is not None and host.engine.weight_version == version


@pytest.mark.parametrize("form", FORMS)
def test_large_tensors_come_in_rows_and_no_bucket_is_larger_than_it_may_be(
    host: ManifestHost, form: BroadcastForm
) -> None:
    root, member = pair(form)
    layout = published(1)[0].in_chunks_of(2048)
    assert max(layout.chunk_num_bytes) <= 2048 < max(spec.num_bytes for spec in layout.tensors)
    told = replace(layout, weight_version=2, checksum="" if member.device is None else WORDS)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send, root, 2, until=999, chunk_bytes=2048, cuts=True)
        answer = host.receive_weights(told, member)
        manifest = sent.result(timeout=60)
    assert answer.checksum == manifest.checksum == model_checksum(model_of(2), like=answer.checksum)
    assert manifest.chunk_num_bytes == layout.chunk_num_bytes


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("failure", ["damaged", "silent"])
def test_a_broken_broadcast_leaves_nothing_that_decodes_until_a_version_is_whole(
    host: ManifestHost, failure: str, form: BroadcastForm
) -> None:
    root, member = pair(form)
    layout = replace(published(1)[0], weight_version=2)
    with ThreadPoolExecutor(1) as pool:
        how = {"damaged": 1} if failure == "damaged" else {"until": 1}
        sent = pool.submit(send, root, 2, **how)
        expected = {"damaged": WeightsError, "silent": WaitTimeout}[failure]
        with pytest.raises(expected, match=r"gen-0.* chunk 1 of \d+ of target version 2"):
            host.receive_weights(layout, member)
        member.close()
        assert host.engine is None, "weights of two versions"
        root.close()
        # whether the rest still got out is up to the moment
        sent.exception(timeout=60)
    manifest, chunks = published(2)
    assert host.load_weights(manifest, chunks).checksum == manifest.checksum
    assert host.engine is not None and host.engine.weight_version == 2
