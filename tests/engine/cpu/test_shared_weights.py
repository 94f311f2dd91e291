"""Instances of a machine hold a version's weights once, and each decodes what it would decode of its own."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from rlhfspec.core.config import EngineConfig, SpeculationConfig
from rlhfspec.core.errors import WeightsError
from rlhfspec.core.records import Prompt, SampleKey, SampleRequest, SamplingParams, Stream
from rlhfspec.engine.build import build_engine, published_model
from rlhfspec.engine.engine import Engine
from rlhfspec.engine.model.llama_model import LlamaModel
from rlhfspec.engine.weights import shared_weights
from rlhfspec.engine.weights.chunks import pack_weights, weight_views
from rlhfspec.engine.weights.shared_weights import SharedWeights
from tests.helpers.backends import own_backend, torch_backend
from tests.helpers.tiny_llama import tiny_llama


@pytest.fixture(autouse=True)
def _nobody_is_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_weights, "LEAVE_S", 0.2)


class Instance:
    """A model as an instance holds it, and an engine of it."""

    def __init__(self, folder: Path, version: int = 0, *, scope: str = "run", backend=own_backend) -> None:
        torch.set_num_threads(1)
        self.memory = SharedWeights(folder, scope)
        manifest, chunks = weights(version)
        self.memory.coming = manifest.checksum
        model = published_model(
            manifest,
            [weight_views(manifest, chunks)],
            "float32",
            backend=backend(),
            who="the target",
            shared=self.memory,
        )
        assert isinstance(model, LlamaModel)
        self.model = model
        self.engine: Engine | None = None

    def load(self, version: int, *, is_known: bool = True) -> None:
        manifest, chunks = weights(version)
        self.memory.coming = manifest.checksum if is_known else ""
        self.made.load_parts(manifest, [weight_views(manifest, chunks)])

    @property
    def made(self) -> Engine:
        self.engine = self.engine or build_engine(
            self.model,
            None,
            engine=EngineConfig(device="cpu", max_running_samples=2, probe=False),
            speculation=SpeculationConfig(policy="off"),
            max_total_tokens=40,
        )
        return self.engine

    def decoded(self) -> list[tuple[bytes, bytes]]:
        requests = [
            SampleRequest(
                key=SampleKey(run_seed=1, stream=Stream.BENCH, sample_index=index),
                prompt=Prompt(prompt_id=str(index), token_ids=np.arange(1, 9 + index), text=""),
                sampling=SamplingParams(temperature=1.0, max_new_tokens=12, stop_token_ids=()),
            )
            for index in range(2)
        ]
        made = self.made.generate(requests)
        return [(one.token_ids.tobytes(), one.policy_logprobs.tobytes()) for one in made]

    @property
    def places(self) -> set[int]:
        """Files that its weights lie in, by number."""
        begins = {one.data_ptr() for one in self.memory._tensors}
        found = set()
        for line in Path("/proc/self/maps").read_text().splitlines():
            begin, end = (int(each, 16) for each in line.split()[0].split("-"))
            if any(begin <= one < end for one in begins):
                found.add(int(line.split()[4]))
        return found


def weights(version: int):
    return pack_weights(tiny_llama(seed=version), name="target", weight_version=version)


def test_a_version_is_held_once_and_decodes_as_one_of_its_own(tmp_path: Path) -> None:
    folder, others = tmp_path / "folder", tmp_path / "others"
    alone = Instance(others)
    expected = alone.decoded()
    first, second = Instance(folder), Instance(folder)
    assert first.decoded() == second.decoded() == expected
    assert first.places == second.places != alone.places and 0 not in first.places
    assert Instance(folder, scope="another run").places != first.places

    # one goes on while the other decodes from the version before
    first.load(1)
    assert second.decoded() == expected and first.places != second.places
    second.load(1)
    assert first.places == second.places
    assert first.decoded() == second.decoded() == Instance(others, 1).decoded() != expected


def test_memory_is_written_over_once_where_all_have_left_the_version_in_it(tmp_path: Path) -> None:
    memories, rows = [SharedWeights(tmp_path, "") for _ in range(3)], [torch.zeros(3, 5) for _ in range(3)]
    for memory, row in zip(memories, rows, strict=True):
        memory.hold([row])

    def load(which: int, version: int) -> bool:
        memories[which].coming = f"version {version}"
        if is_there := memories[which].begin():
            return is_there
        rows[which].fill_(version)
        memories[which].end()
        return is_there

    assert [load(which, 1) for which in range(3)] == [False, True, True]
    places = [row.data_ptr() for row in rows]
    with ThreadPoolExecutor() as pool:
        for version in range(2, 5):
            assert sorted(pool.map(load, range(3), [version] * 3)) == [False, True, True]
            assert all(bool((row == version).all()) for row in rows)
    assert [row.data_ptr() for row in rows] == places

    # one that is written is waited for, and written by another where that fails
    memories[0].coming = memories[1].coming = "version 5"
    with ThreadPoolExecutor() as pool:
        load(2, 5)
        memories[2].coming = "version 6"
        begun = pool.submit(memories[2].begin)
        assert not begun.result()
        later = pool.submit(load, 0, 6)
        assert not later.done()
        os.close(memories[2]._file)
        memories[2]._file = -1
        assert not later.result() and bool((rows[0] == 6).all())


def test_what_is_damaged_in_common_memory_is_not_decoded_from(tmp_path: Path) -> None:
    first = Instance(tmp_path)
    first.model.embedding[3, 5] += 1.0
    with pytest.raises(WeightsError, match=r"the copy of embed_tokens .* not confirmed"):
        Instance(tmp_path)
    # who loads it again has another memory, while somebody still has that one
    again = Instance(tmp_path)
    assert (
        again.places.isdisjoint(first.places) and again.decoded() == Instance(tmp_path / "others").decoded()
    )


def test_a_version_that_is_not_known_before_it_comes_is_an_instance_s_own(tmp_path: Path) -> None:
    first, second = Instance(tmp_path), Instance(tmp_path)
    before = second.decoded()
    first.load(1, is_known=False)
    assert second.decoded() == before != first.decoded()
    second.load(1, is_known=False)
    assert first.places.isdisjoint(second.places)
    assert first.decoded() == second.decoded()


def test_links_to_what_has_ended_are_swept_and_versions_of_the_dead_made_anew(tmp_path: Path) -> None:
    gone = Instance(tmp_path)
    (link,) = tmp_path.iterdir()
    os.close(gone.memory._file)
    gone.memory._file = -1
    (tmp_path / "rlhfspec-of-a-dead-run").symlink_to("/proc/self/fd/9999")
    again = Instance(tmp_path)
    assert [*tmp_path.iterdir()] == [link] and again.places != gone.places
    assert again.decoded() == gone.decoded()


def test_where_there_is_no_folder_each_has_its_own(tmp_path: Path, caplog) -> None:
    (tmp_path / "file").touch()
    first, second = Instance(tmp_path / "file"), Instance(tmp_path / "file")
    assert "weights are not shared" in caplog.text
    assert first.decoded() == second.decoded()


def test_library_products_share_nothing(tmp_path: Path) -> None:
    one = Instance(tmp_path, backend=torch_backend)
    assert not one.memory._tensors and not [*tmp_path.iterdir()]
