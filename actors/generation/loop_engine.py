"""What the decode loop needs of an engine and of what holds it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from rlhfspec.actors.actor_messages import LoadedWeights
from rlhfspec.core.decode_records import InstanceLoad, StepRecord
from rlhfspec.core.progress import Progress
from rlhfspec.core.records import Completion, SampleKey, SampleRequest
from rlhfspec.core.weight_records import WeightManifest

if TYPE_CHECKING:
    # whoever imports this has not always use for torch
    import torch
    from torch import Tensor


class LoopEngine(Protocol):
    """What the loop needs of `engine.engine.Engine`."""

    step_log: list[StepRecord] | None
    "records of decode steps, where they are logged"

    @property
    def has_work(self) -> bool:
        """True while a sample is waiting or running."""
        ...

    @property
    def num_running(self) -> int:
        """Samples in slots."""
        ...

    @property
    def num_emitted_tokens(self) -> int:
        """Of all decode steps so far."""
        ...

    @property
    def num_context_tokens(self) -> int:
        """Committed tokens of the samples in slots."""
        ...

    def submit(self, request: SampleRequest) -> None:
        """Queue a sample."""
        ...

    def step(self) -> list[Completion]:
        """Do one decode step and return what finished."""
        ...

    def cut(self, keys: Collection[SampleKey]) -> list[Completion]:
        """End these samples where they are and return what there is of each."""
        ...

    def load(self) -> InstanceLoad:
        """Return the workload."""
        ...

    def progress(self) -> Progress:
        """Return the number of response tokens so far of every running sample."""
        ...


class BucketSource(Protocol):
    """What the loop needs of `actors.transport.broadcast.BroadcastGroup`."""

    @property
    def device(self) -> torch.device | None:
        """Where buckets are to lie; None: on the host."""
        ...

    def receive(self, into: Tensor, what: str) -> str:
        """Fill `into`, uint8 [n], and return its digest as told."""
        ...


class Spare(Protocol):
    """What the loop needs of `actors.generation.spot_trainer.SpotTrainer`."""

    @property
    def is_active(self) -> bool:
        """Whether it is allowed and has something to do."""
        ...

    def allow(self) -> None:
        """The loop has no samples."""
        ...

    def stop_soon(self) -> None:
        """It is about to have some; returns at once."""
        ...

    def gather(self) -> None:
        """Samples have finished."""
        ...


class EngineHost(Protocol):
    """Holds the engine, which exists once all its weights have arrived."""

    @property
    def engine(self) -> LoopEngine | None:
        """The engine, if it exists."""
        ...

    @property
    def spare(self) -> Spare | None:
        """What computes while there are no samples."""
        ...

    def load_weights(self, manifest: WeightManifest, chunks: Sequence[np.ndarray]) -> LoadedWeights:
        """Load one version of one model and read it back."""
        ...

    def remember(self, responses: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Let a drafter that looks tokens up know these responses: token ids of prompt and response."""
        ...

    def receive_weights(self, layout: WeightManifest, group: BucketSource) -> LoadedWeights:
        """Load the next version of a model from a broadcast group and read it back."""
        ...
