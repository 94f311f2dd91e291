"""A window between the ends of a group in one process, where there is no GPU whose memory they could share."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlhfspec.actors.transport import device_window


def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tensors of the CPU be offered and reached."""
    offered: list[Tensor] = []

    def offer(memory: Tensor) -> device_window.Offered:
        offered.append(memory)
        return (len(offered) - 1,)

    def reach(ticket: device_window.Offered, device: torch.device | None) -> Tensor:
        return offered[ticket[0]]

    monkeypatch.setattr(device_window, "offer", offer)
    monkeypatch.setattr(device_window, "reach", reach)
