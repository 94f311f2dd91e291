"""An actor's device is what Ray assigned to it. The GPUs here are on paper: Ray is told of them."""

from functools import partial

import pytest
import torch

from rlhfspec.actors.remote.assigned_device import (
    assigned_gpus,
    give_back_cached,
    require_gpu_room,
    resolve_device,
)
from rlhfspec.core.errors import ConfigError, PlacementError
from tests.helpers.ray_script import answer_of

NAMES = {"key": "trainer.device", "pool": "cluster.trainer"}
SCRIPT = """
import json, ray
from rlhfspec.actors.remote.assigned_device import assigned_gpus
ray.init(address="local", num_cpus=2, num_gpus=4, include_dashboard=False, log_to_driver=False)
ask = ray.remote(assigned_gpus)
with_one = ray.get([ask.options(num_gpus=1).remote() for _ in range(2)], timeout=60)
print(json.dumps([ray.get(ask.options(num_gpus=0).remote(), timeout=60), *with_one]))
"""


def test_without_a_gpu_of_its_own_it_is_a_cpu():
    assert resolve_device("auto", assigned=(), **NAMES) == torch.device("cpu")
    assert resolve_device("cpu", assigned=("0",), **NAMES) == torch.device("cpu")
    assert assigned_gpus() == ()


def test_cuda_without_an_assigned_gpu_is_refused():
    with pytest.raises(ConfigError, match=r"trainer\.device is cuda but Ray assigned no GPU"):
        resolve_device("cuda", assigned=(), **NAMES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a torch without a CUDA device")
def test_a_gpu_that_torch_cannot_use_is_refused():
    with pytest.raises(ConfigError, match=r"Ray assigned GPU 2, but torch .* sees no CUDA device"):
        resolve_device("auto", assigned=("2",), **NAMES)


@pytest.mark.ray
@pytest.mark.slow
def test_ray_says_which_gpus_an_actor_has():
    none, *one = answer_of(SCRIPT, timeout_s=200)
    assert none == []
    assert all(len(ids) == 1 and ids[0] in "0123" for ids in one)


@pytest.mark.parametrize(
    ("needed_gib", "share", "free_gib", "fits"),
    [
        (30, 1.0, 79, True),
        (30, 0.5, 79, True),
        (50, 0.5, 79, False),
        (50, 2.0, 79, True),
        (50, 1.0, 49, False),
    ],
)
def test_an_actor_takes_no_more_of_its_gpu_than_is_free_and_its_share(
    monkeypatch, needed_gib: int, share: float, free_gib: int, fits: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_gib << 30, 80 << 30))
    check = partial(
        require_gpu_room, "gen-1", needed_bytes=needed_gib << 30, share=share, advice="lower engine.a"
    )
    check(torch.device("cpu"))
    if fits:
        check(torch.device("cuda", 0))
        return
    expected = (
        rf"^gen-1 plans to take {needed_gib}\.00 GiB of .* {free_gib}\.00 GiB of 80\.00 GiB free; .*; lower"
    )
    with pytest.raises(PlacementError, match=expected):
        check(torch.device("cuda", 0))


@pytest.mark.parametrize(("device", "share", "gives"), [("cuda", 0.5, 1), ("cuda", 1.0, 0), ("cpu", 0.5, 0)])
def test_freed_blocks_are_given_back_where_others_share_the_gpu(
    monkeypatch, device: str, share: float, gives: int
) -> None:
    given: list[None] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given.append(None))
    give_back_cached(torch.device(device), share=share)
    assert len(given) == gives
