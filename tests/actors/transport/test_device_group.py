"""What may never come back out of NCCL is waited for on a thread of its own, for so long and no longer."""

import logging
import threading

import pytest
import torch

from rlhfspec.actors.transport import broadcast, device_group
from rlhfspec.actors.transport.device_group import abort, within

CPU = torch.device("cpu")


class SilentGroup:
    """A group whose peers are gone: no call returns."""

    def __init__(self) -> None:
        self.never = threading.Event()

    def abort(self) -> None:
        self.never.wait()

    def broadcast(self, tensors, options) -> None:
        self.never.wait()


def test_a_call_gives_what_it_gives_and_raises_what_it_raises() -> None:
    def fail() -> None:
        raise RuntimeError("NCCL error")

    assert within(lambda: 3, 60.0, CPU) == 3
    with pytest.raises(RuntimeError, match="NCCL error"):
        within(fail, 60.0, CPU)


def test_silent_peers_hold_nobody_up(monkeypatch, caplog) -> None:
    group = SilentGroup()
    monkeypatch.setattr(device_group, "_ABORT_S", 0.01)
    with pytest.raises(RuntimeError, match="nothing in time"):
        broadcast._meet(group, CPU, 0.01)
    with caplog.at_level(logging.WARNING):
        abort(group, CPU)
    assert "its memory comes back with this actor's end" in caplog.text
    group.never.set()


def test_communicators_block_as_torchs_own_do(monkeypatch) -> None:
    """Those that do not are known to hang at random (pytorch 153960, 154055)."""

    class Kind:
        class Options:
            def __init__(self, is_high_priority_stream) -> None:
                self.config = type("Config", (), {"blocking": 0})()

        def __init__(self, store, rank, size, options) -> None:
            self.options = options

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Kind, raising=False)
    monkeypatch.setattr(device_group, "require_nccl", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: device_group.nullcontext())
    opened = device_group.open_nccl(None, 0, 2, device=torch.device("cuda", 0), timeout_s=3.0)
    assert opened.options.config.blocking == 1 and opened.options._timeout.total_seconds() == 3.0
