"""Counts what a device would be told to do, on tensors of the `meta` device: they have shapes and no numbers.

One call of an operator that computes or moves something is one launch; operators that torch takes apart are counted by
their parts, attention as one. Views and new memory are none. Whoever looks at a number is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlhfspec.engine.decoding.noise import Noise, NoiseSource
from rlhfspec.engine.model.cuda_graphs import Run

META = torch.device("meta")
LOOKS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "masked_select"}
MADE = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
WHOLE = {"scaled_dot_product_attention"}


class DeviceCalls(TorchDispatchMode):
    """`counts`: launches, those replayed inside recordings, copies up and down, those of them that wait."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.by_name: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        devices = {x.device.type for x in given}
        if name in LOOKS and "meta" in devices:
            raise AssertionError(f"{name} looks at numbers of the device, where a step may not wait")
        target = kwargs.get("device", next((x for x in args if isinstance(x, torch.device)), None))
        if name in ("_to_copy", "to") and target is not None and devices and target.type not in devices:
            self._crosses("downs" if target.type == "cpu" else "ups", kwargs.get("non_blocking"))
            if target.type == "cpu":
                return torch.zeros(given[0].shape, dtype=kwargs.get("dtype") or given[0].dtype)
            return func(*args, **kwargs)
        if name == "copy_" and devices == {"cpu", "meta"}:
            down = given[0].device.type == "cpu"
            self._crosses(
                "downs" if down else "ups", kwargs.get("non_blocking") or any(x is True for x in args)
            )
            return given[0] if down else func(*args, **kwargs)
        if name not in WHOLE:
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        found = func(*args, **kwargs)
        if self._computes(func, name, given, found):
            self.note(name)
        return found

    def note(self, name: str, launches: int = 1) -> None:
        """Count what is no operator of torch."""
        self.counts["launches"] += launches
        self.by_name[name] += launches

    def _computes(self, func: Any, name: str, given: list[Tensor], found: Any) -> bool:
        made = [x for x in tree_leaves(found) if isinstance(x, Tensor) and x.device.type == "meta"]
        if name in MADE or not made:
            return False
        known = {x.untyped_storage()._cdata for x in given}
        return func._schema.is_mutable or any(x.untyped_storage()._cdata not in known for x in made)

    def _crosses(self, way: str, non_blocking: object) -> None:
        self.counts[way] += 1
        self.note(way)
        if not non_blocking:
            self.counts["waits"] += 1


class CountingRecorder:
    """Counts what a recording holds when it is made, and one launch a replay."""

    held_bytes = 0

    def __init__(self, calls: DeviceCalls) -> None:
        self._calls = calls

    def record(self, run: Run) -> Run:
        """See `engine.model.cuda_graphs.Recorder`."""
        before = self._calls.counts["launches"]
        result = run()
        inside = self._calls.counts["launches"] - before

        def replay() -> Tensor:
            self._calls.note("replay")
            self._calls.counts["replayed"] += inside
            return result

        return replay

    def forget(self) -> None:
        """See `engine.model.cuda_graphs.Recorder`."""


class CountedNoise(Noise):
    """As `engine.decoding.noise_cuda` makes it: a choice is a kernel and two calls, all values are one kernel."""

    def __init__(self, shape: tuple[int, int, int], note: Callable[[str, int], None]) -> None:
        super().__init__(torch.empty(shape, device=META))
        self._note = note

    @property
    def values(self) -> Tensor:
        """See `Noise`."""
        self._note("gumbel", 1)
        return self._values

    def choose(self, logits: Tensor, levels: Tensor, divisors: Tensor, factors: Tensor) -> Tensor:
        """See `Noise.choose`."""
        self._note("choice", 3)
        return torch.empty(levels.shape, dtype=torch.int64, device=META)


class CountedNoiseSource(NoiseSource):
    """Hands it out."""

    ahead = False

    def __init__(self, calls: DeviceCalls) -> None:
        super().__init__(META)
        self._calls = calls

    def of_words(self, words: Tensor, vocab_size: int) -> Noise:
        """See `NoiseSource`."""
        return CountedNoise((*words.shape[1:], vocab_size), self._calls.note)  # pyright: ignore[reportArgumentType]
