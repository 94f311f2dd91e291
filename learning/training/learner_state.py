"""Everything an interrupted run needs to go on, in one folder that all trainers write and any number of them reads.

By `torch.distributed.checkpoint`: each trainer writes the shards that it holds, and reading puts them together for
whoever reads. `.metadata` is written last; a folder without it is not a checkpoint.

torch's own reader unpickles the table of contents, and its planner every number beside the tensors, by whatever code
the files name: a checkpoint from elsewhere could do anything. Here only the classes that a table is made of are made,
and numbers are read with `weights_only`.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ...core.errors import ConfigError, StorageError
from .objectives.policy import Coefficients
from .parallel import OneTrainer

_COUNTERS = ("weight_version", "num_optimizer_steps", "seed")


@dataclass(slots=True, kw_only=True)
class LearnerState:
    """What a learner is made of; `reference` and `critic` where its algorithm has them."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    reference: nn.Module | None
    critic: tuple[nn.Module, torch.optim.Optimizer] | None
    weight_version: int
    num_optimizer_steps: int
    seed: int
    coefficients: Coefficients = field(default_factory=lambda: Coefficients(kl=0.0, entropy=0.0))
    "that are steered, where any are"
    trainers: OneTrainer = field(default_factory=OneTrainer)

    def save(self, folder: Path) -> None:
        """Write all of it into a new folder. Collective.

        Raises StorageError where the disk does not take it, ConfigError when the folder holds a checkpoint: one that
        is written over and breaks off would be half of each. PeerLost when another trainer is gone.
        """
        if (folder / ".metadata").exists():
            raise ConfigError(f"{folder} holds a checkpoint of a trainer already; save into a new folder")
        with _naming_failures(folder), self.trainers.naming("write a checkpoint"), _one_process_is_fine():
            # asking for the state of an optimizer that never stepped would make it step
            stepped = {name: pair for name, pair in self._optimizers().items() if pair[1].state}
            parts = self._parts() | _states_of(stepped)
            save(parts, checkpoint_id=folder, no_dist=self.trainers.size == 1)

    def load(self, folder: Path) -> None:
        """Take over what `save` wrote, by however many trainers. Collective.

        Raises ConfigError when there is no checkpoint, or its algorithm, adapters or sizes are not these.
        """
        with _refusing(folder), self.trainers.naming("read a checkpoint"), _one_process_is_fine():
            reader = PlainReader(folder)
            saved = {name.split(".")[0] for name in reader.read_metadata().state_dict_metadata}
            for name, part in (("reference", self.reference), ("critic", self.critic)):
                if (part is None) != (name not in saved):
                    raise ConfigError(
                        f"the checkpoint {folder} {'has a' if part is None else 'has no'} {name}, this run's algorithm "
                        "section says otherwise; resume with the same algorithm"
                    )
            alone = self.trainers.size == 1
            numbers: dict[str, Any] = {
                "counters": {name: torch.zeros((), dtype=torch.int64) for name in _COUNTERS},
                "coefficients": torch.zeros(3, dtype=torch.float64),
            }
            load(numbers, storage_reader=reader, planner=PlainPlanner(), no_dist=alone)
            for name, value in numbers["counters"].items():
                setattr(self, name, int(value))
            kl, entropy, last_entropy = numbers["coefficients"].tolist()
            self.coefficients = Coefficients(kl, entropy, None if last_entropy < 0.0 else last_entropy)
            parts = self._parts()
            # a parameter that never had a gradient has no state to be found
            steps = _states_of({name: pair for name, pair in self._optimizers().items() if name in saved})
            load(parts, storage_reader=reader, planner=PlainPlanner(), no_dist=alone)
            if steps:
                planner = PlainPlanner(allow_partial_load=True)
                load(steps, storage_reader=reader, planner=planner, no_dist=alone)
            self._take(parts | steps)

    def _parts(self) -> dict[str, Any]:
        """The state under names that do not depend on the number of trainers; tensors are those that are in use."""
        counters = {name: torch.tensor(getattr(self, name), dtype=torch.int64) for name in _COUNTERS}
        steered = self.coefficients
        last = -1.0 if steered.last_entropy is None else steered.last_entropy
        parts: dict[str, Any] = {
            "counters": counters,
            "coefficients": torch.tensor([steered.kl, steered.entropy, last], dtype=torch.float64),
            "model": get_model_state_dict(self.model),
        }
        if self.reference is not None:
            parts["reference"] = get_model_state_dict(self.reference)
        if self.critic is not None:
            parts["critic"] = self.critic[0].state_dict()
        return parts

    def _optimizers(self) -> dict[str, tuple[nn.Module, torch.optim.Optimizer]]:
        """Each with its module. A critic's steps where the target's minibatches have no gradient, too."""
        critic = {} if self.critic is None else {"critic_optimizer": self.critic}
        return {"optimizer": (self.model, self.optimizer), **critic}

    def _take(self, parts: dict[str, Any]) -> None:
        set_model_state_dict(self.model, parts["model"])
        if self.reference is not None:
            set_model_state_dict(self.reference, parts["reference"])
        if self.critic is not None:
            self.critic[0].load_state_dict(parts["critic"])
        for name, (module, optimizer) in self._optimizers().items():
            if name not in parts:
                optimizer.state.clear()
                continue
            # moments are the checkpoint's, rates and decay are this run's
            settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            set_optimizer_state_dict(module, optimizer, parts[name])
            for group, own in zip(optimizer.param_groups, settings, strict=True):
                group.update(own)


def _states_of(pairs: Mapping[str, tuple[nn.Module, torch.optim.Optimizer]]) -> dict[str, Any]:
    return {name: get_optimizer_state_dict(*pair) for name, pair in pairs.items()}


@contextmanager
def _one_process_is_fine() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


@contextmanager
def _naming_failures(folder: Path) -> Iterator[None]:
    try:
        yield
    except (CheckpointException, OSError) as error:
        raise StorageError(
            f"cannot write the checkpoint {folder}: {_why(error)}; free space there, or choose another folder"
        ) from error


def _why(error: BaseException) -> str:
    """The first failure itself, without the traceback that torch puts around it."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    return " ".join(str(error).split())[:300]


@contextmanager
def _refusing(folder: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        missing = Path(error.filename or ".metadata").name
        raise ConfigError(
            f"{folder} is no checkpoint of a trainer: {missing} is missing (a save that was interrupted leaves such a "
            "folder); give one that was written to its end"
        ) from error
    except (CheckpointException, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"the checkpoint {folder} does not fit this trainer: {_why(error)}; resume with the same model, "
            "trainer.lora and algorithm"
        ) from error


_METADATA = "torch.distributed.checkpoint.metadata"
_METADATA_CLASSES = (
    "Metadata MetadataIndex StorageMeta _MEM_FORMAT_ENCODING TensorProperties TensorStorageMetadata "
    "BytesStorageMetadata ChunkStorageMetadata"
)
_CLASSES = frozenset(
    {
        *((_METADATA, name) for name in _METADATA_CLASSES.split()),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("pathlib", "PosixPath"),
        ("pathlib", "WindowsPath"),
    }
)


class PlainReader(FileSystemReader):
    """As torch's reader of a folder, for tables that hold nothing but names, sizes and places."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the table of contents. Raises ConfigError for one that is damaged or names code, OSError."""
        path = Path(self._get_metadata_path(kwargs.get("rank")))
        with path.open("rb") as file:
            try:
                metadata = _TableUnpickler(file).load()
                if not isinstance(metadata, Metadata):
                    raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}")
            except OSError:
                raise
            except Exception as error:  # unpickling raises whatever the damage happens to spell
                raise ConfigError(
                    f"the checkpoint {path.parent} is damaged: {path.name} is no table of a checkpoint "
                    f"({' '.join(str(error).split())[:200]}); take an earlier one"
                ) from error
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class PlainPlanner(DefaultLoadPlanner):
    """As torch's planner, for values that are plain: numbers, texts, lists and tuples of them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take one value over. Raises pickle.UnpicklingError for any other."""
        loaded = torch.load(value, weights_only=True)
        again = io.BytesIO()
        # torch's own reads it once more, which is safe then, and knows where it belongs
        torch.save(loaded, again)
        again.seek(0)
        super().load_bytes(read_item, again)


class _TableUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        """Return one of the classes of a table, or a dtype; nothing else is looked up."""
        if (module, name) in _CLASSES:
            return super().find_class(module, name)
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}")
