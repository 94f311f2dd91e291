"""Reads folders of `torch.distributed.checkpoint` without running what is in them.

torch's own reader unpickles the table of contents, and its planner every number beside the tensors, by whatever code
the files name: a checkpoint from elsewhere could do anything. Here only the classes that a table is made of are made,
and numbers are read with `weights_only`.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from rlhfspec.core.errors import ConfigError

_METADATA = "torch.distributed.checkpoint.metadata"
_CLASSES = frozenset(
    {
        *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
        *(
            (_METADATA, name)
            for name in ("TensorProperties", "TensorStorageMetadata", "BytesStorageMetadata")
        ),
        (_METADATA, "ChunkStorageMetadata"),
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
