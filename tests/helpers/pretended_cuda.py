"""Tensors that say they lie on a GPU, without one: shapes, types and devices, no numbers. Needs a CUDA build of torch.

torch's FakeTensorMode refuses operations between devices; what crosses between host and device is counted here, with
the function of this project that asked for it. Tensors of the host stay real.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA = torch.device("cuda", 0)
ROOT = Path(__file__).resolve().parents[2]
OURS = ("core", "engine", "learning", "actors")
"Folders whose functions are named."
SCALARS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "allclose"}
"Wait for the device and give the host a number."
NEEDS_BUILD = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="needs a CUDA build of torch: `make check-cuda-fake`"
)


class PretendedCuda(TorchDispatchMode):
    """Counts, by the asking function: copies `up` and `down`, those of them that `waits`, kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.up: Counter[str] = Counter()
        self.down: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.num_kernels = 0
        self.pinned: set[int] = set()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __enter__(self) -> PretendedCuda:
        self._fake.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._fake.__exit__(*exc)

    def forget(self) -> None:
        """Begin to count anew."""
        self.up, self.down, self.waits, self.num_kernels = Counter(), Counter(), Counter(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        on_device = [x for x in tensors if isinstance(x, FakeTensor)]
        target = _target(args, kwargs)
        if name in ("_to_copy", "to") and target is not None and target.type != tensors[0].device.type:
            return self._moved(tensors[0], target, kwargs, args)
        if name == "copy_" and len({isinstance(x, FakeTensor) for x in tensors[:2]}) == 2:
            return self._copied(*tensors[:2], _non_blocking(args, kwargs))
        if name in SCALARS and on_device:
            self._note(self.down, waits=True)
            return _scalar(on_device[0].dtype) if name in ("_local_scalar_dense", "item") else True
        if not on_device and (target is None or target.type == "cpu"):
            return self._on_host(func, args, kwargs)
        if strangers := [x for x in tensors if not isinstance(x, FakeTensor) and x.dim()]:
            raise AssertionError(
                f"{func} takes tensors of GPU and host: {[list(x.shape) for x in strangers]}"
            )
        self.num_kernels += 1
        return func(*args, **kwargs)

    def _moved(self, tensor: torch.Tensor, target: torch.device, kwargs: dict, args: tuple) -> torch.Tensor:
        dtype = kwargs.get("dtype") or next((x for x in args if isinstance(x, torch.dtype)), tensor.dtype)
        waits = not _non_blocking(args, kwargs)
        if target.type == "cpu":
            self._note(self.down, waits=waits)
            with unset_fake_temporarily():
                return torch.ones(tensor.shape, dtype=dtype)
        self._note(self.up, waits=waits or not self._is_pinned(tensor))
        return torch.empty(tensor.shape, dtype=dtype, device=CUDA)

    def _copied(self, into: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        host = source if isinstance(into, FakeTensor) else into
        down = host is into
        self._note(self.down if down else self.up, waits=not (non_blocking and self._is_pinned(host)))
        if down:
            with unset_fake_temporarily():
                into.fill_(1)
        return into

    def _on_host(self, func: Any, args: tuple, kwargs: dict) -> Any:
        is_pinned = kwargs.pop("pin_memory", None)
        with unset_fake_temporarily():
            out = func(*args, **kwargs)
        if is_pinned:
            self.pinned.add(out.untyped_storage()._cdata)
            self._kept = (*getattr(self, "_kept", ()), out)
        return out

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.pinned

    def _note(self, counts: Counter[str], *, waits: bool) -> None:
        place = _place()
        counts[place] += 1
        if waits:
            self.waits[place] += 1


def without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for what asks the driver, and nothing else."""
    # all zero, they would make every tensor tied to the first
    monkeypatch.setattr(
        FakeTensor,
        "data_ptr",
        lambda self: self.untyped_storage()._cdata + self.storage_offset() * self.element_size(),
        raising=False,
    )
    # one copy, as on a GPU, and not one for each number
    monkeypatch.setattr(FakeTensor, "tolist", lambda self: self.cpu().tolist())
    monkeypatch.setattr(torch.Tensor, "backward", backward)
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    monkeypatch.setattr(nn.Linear, "to", _linear_to)


@torch.no_grad()
def backward(loss: torch.Tensor) -> None:
    """Run the nodes of a backward pass in order: torch's own engine asks the driver for streams and contexts."""
    nodes: list[Any] = [loss.grad_fn]
    waiting_for: Counter[Any] = Counter()
    for node in nodes:
        for following, _ in node.next_functions:
            if following is not None:
                if following not in waiting_for:
                    nodes.append(following)
                waiting_for[following] += 1
    gradients: dict[Any, dict[int, torch.Tensor]] = {node: {} for node in nodes}
    gradients[loss.grad_fn][0] = torch.ones_like(loss)
    ready = [loss.grad_fn]
    while ready:
        node = ready.pop()
        given = gradients.pop(node)
        results = (
            _run(node, [given.get(place) for place in range(len(node._input_metadata))]) if given else ()
        )
        for index, (following, place) in enumerate(node.next_functions):
            if following is None:
                continue
            gradient = results[index] if index < len(results) else None
            if gradient is not None:
                expected = following._input_metadata[place]
                gradient = gradient.sum_to_size(expected.shape).to(expected.dtype)
                has = gradients[following].get(place)
                gradients[following][place] = gradient if has is None else has + gradient
            waiting_for[following] -= 1
            if not waiting_for[following]:
                ready.append(following)


def _run(node: Any, gradients: list[torch.Tensor | None]) -> tuple[Any, ...]:
    # a node of Python's is called by `apply`, one of C++ by itself
    results = node.apply(*gradients) if isinstance(node, BackwardCFunction) else node(*gradients)
    return results if isinstance(results, tuple) else (results,)


def _linear_to(self: nn.Linear, dtype: torch.dtype) -> nn.Linear:
    """Parameters anew: torch does not exchange pretended ones that something holds weakly."""
    for name, parameter in list(self.named_parameters()):
        setattr(self, name, nn.Parameter(parameter.detach().to(dtype), requires_grad=False))
    return self


def _target(args: Iterable[Any], kwargs: dict) -> torch.device | None:
    found = kwargs.get("device") or next((x for x in args if isinstance(x, torch.device)), None)
    return torch.device(found) if found is not None else None


def _non_blocking(args: tuple, kwargs: dict) -> bool:
    # of `to` and `copy_` the first flag in order
    return bool(kwargs.get("non_blocking", next((x for x in args if isinstance(x, bool)), False)))


def _scalar(dtype: torch.dtype) -> bool | float | int:
    return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1


def _place() -> str:
    """The innermost function of ours on the stack, as `folder/module:function`, its comprehensions included."""
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in OURS:
            function = frame.f_code.co_qualname.partition(".<locals>")[0]
            return f"{path.relative_to(ROOT).with_suffix('')}:{function}"
        frame = frame.f_back
    return "outside"
