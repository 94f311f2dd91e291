"""An actor's device is what Ray assigned to it. The GPUs here are on paper: Ray is told of them."""

from functools import partial
from pathlib import Path

import pytest
import torch

import rlhfspec.actors
from rlhfspec.actors.remote.assigned_device import (
    assigned_gpus,
    resolve_device,
    take_gpu_share,
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
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda fraction, device: None)
    check = partial(
        take_gpu_share, "gen-1", needed_bytes=needed_gib << 30, share=share, advice="lower engine.a"
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


@pytest.mark.parametrize(("share", "mapped_gib", "held"), [(0.5, 0, 39.4), (0.5, 10, 29.4), (1.0, 0, None)])
def test_an_actor_is_held_to_its_share_so_that_nobody_need_give_back_between_turns(
    monkeypatch, share: float, mapped_gib: int, held: float | None
) -> None:
    fractions: list[float] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (79 << 30, 80 << 30))
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda fraction, device: fractions.append(fraction)
    )
    device, settings = torch.device("cuda", 0), {"needed_bytes": 20 << 30, "advice": ""}
    left = take_gpu_share("gen-0", device, share=share, mapped_bytes=mapped_gib << 30, **settings)
    assert round(left / (1 << 30), 1) == (19.4 if share < 1.0 else 59.0)
    # without the CUDA context, 600 MiB, which torch's allocator does not count
    assert [round(80 * fraction, 1) for fraction in fractions] == ([] if held is None else [held])


def test_no_turn_ends_by_giving_memory_back() -> None:
    """Only a recording does, which counts what it takes: `engine.model.cuda_graphs`."""
    sources = Path(rlhfspec.actors.__path__[0]).rglob("*.py")
    assert not [path for path in sources if "empty_cache" in path.read_text()]
