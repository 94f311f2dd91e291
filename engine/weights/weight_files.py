"""Checks a model's weight files against its config without reading a weight: headers, lengths, names, shapes.

Which name belongs to which parameter is left to transformers: its own loading code is run on tensors that
have a shape and no memory, so renamed, merged and tied weights are understood as they are when loaded.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from ...core.errors import ModelError
from ...core.outside import is_lfs_pointer
from .left_over import require_float_weights, require_taken

_SINGLE = ("model.safetensors", "pytorch_model.bin")
"In the order in which transformers looks for them, each before its index."
ADAPTER_FILE = "adapter_config.json"
"Of peft, which transformers would put into the model unasked."
_END_BYTES = 1 << 20
"Of each end of a file; training changes the last layers and norms, which stand there."
_MEND = "save the model again with save_pretrained, or copy or download it again"


def check_weight_files(name: str, model: Any) -> None:
    """Require whole weight files with every weight of the model in its shape.

    A hub name is checked where its files are in the local cache; else the download will tell.

    Args:
        name: path or hub name.
        model: the model of its config, best on the meta device; only its class and config are used.

    Raises:
        ModelError: no weights, a file that is missing or cut, a weight that is missing, has another shape or type, or
            is of the model and has no place in it.
    """
    folder = local_folder(name)
    if folder is None:
        return
    require_no_adapter(name)
    found = tensors_in(weight_files(folder))
    shapes = {key: one.shape for key, one in found.items()}
    if getattr(model.config, "quantization_config", None) is None:  # packed weights have other shapes
        _require_fit(name, model, shapes)
        own = model.state_dict()
        require_float_weights(
            name, {key: one.dtype for key, one in found.items() if key in own or key.endswith(".weight")}
        )
        for tied in names_of_each_tensor(model):
            held = [key for key in tied if key in found]
            values = [_read(found[key].file, key) for key in held] if len(held) > 1 else []
            if any(not torch.equal(values[0], other) for other in values[1:]):
                raise unequal_ties(name, held[0], held[1])


def require_no_adapter(name: str) -> None:
    """Raise ModelError where an adapter lies beside the model: transformers puts it in unasked."""
    if (folder := local_folder(name)) and (folder / ADAPTER_FILE).exists():
        raise ModelError(
            f"the model folder {folder} holds an adapter too ({ADAPTER_FILE}), and weights are published without one: "
            "merge it into the model (peft's merge_and_unload, then save_pretrained), or move its files out"
        )


def names_of_each_tensor(model: torch.nn.Module) -> list[list[str]]:
    """All names of every tensor, in name order of its first."""
    names: dict[int, list[str]] = {}
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        names.setdefault(id(tensor), []).append(name)
    return list(names.values())


def unequal_ties(name: str, first: str, second: str) -> ModelError:
    """Return the error for a checkpoint with two values for what its config says is one weight."""
    return ModelError(
        f"config.json of '{name}' says that {first} and {second} are one weight (tie_word_embeddings: true), but its "
        "weight files hold two, which differ; set tie_word_embeddings to false there if the model has an output of its "
        f"own, or take {first} out of the files"
    )


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers would load. Raises ModelError when there is none, or one is missing."""
    for single in _SINGLE:
        if (folder / single).is_file():
            return [_whole(folder / single)]
        index = folder / f"{single}.index.json"
        if index.is_file():
            return [_whole(shard) for shard in _shards(_whole(index))]
        for link in (folder / single, index):
            if link.is_symlink():
                raise ModelError(f"{link} is a link to {link.readlink()}, which is not there; {_MEND}")
    raise ModelError(
        f"the model folder {folder} holds no weights: expected {_SINGLE[0]}, {_SINGLE[0]}.index.json or "
        f"{_SINGLE[1]}, got {', '.join(sorted(p.name for p in folder.iterdir())[:8]) or 'nothing'}; {_MEND}"
    )


def indexed_too(folder: Path) -> list[str]:
    """Weight files of a folder that are read whole while an index beside them names others, which are not."""
    read = next((one for one in _SINGLE if (folder / one).is_file()), None)
    return [read] if read is not None and (folder / f"{read}.index.json").is_file() else []


def weights_digest(name: str) -> str | None:
    """Tell weights apart by lengths and both ends of their files, read in no time; None where none are here.

    Args:
        name: path or hub name.

    Raises:
        ModelError: as `weight_files`.
    """
    folder = local_folder(name)
    if folder is None:
        return None
    whole = hashlib.sha256()
    for file in weight_files(folder):
        size = file.stat().st_size
        with file.open("rb") as opened:
            whole.update(size.to_bytes(8, "little") + opened.read(_END_BYTES))
            opened.seek(max(size - _END_BYTES, 0))
            whole.update(opened.read(_END_BYTES))
    return whole.hexdigest()


def _whole(file: Path) -> Path:
    if is_lfs_pointer(file):
        raise ModelError(
            f"{file} is a pointer of Git LFS, not the file itself; fetch it (`git lfs pull` in its repository)"
        )
    return file


def require_all_weights(name: str, missing: Collection[str], found: Collection[str] = ()) -> None:
    """Raise ModelError when a checkpoint lacks weights, which transformers would fill with random numbers.

    `found` are the names in its files: where they are those that lack behind a prefix, that is said.
    """
    if missing:
        prefix = _prefix_of(missing, found)
        if prefix:
            raise ModelError(
                f"the weight files of '{name}' name their weights '{prefix}...', expected '{sorted(missing)[-1]}' and "
                f"so on, without '{prefix}': {_made_by(prefix)}"
            )
        first = ", ".join(f"'{key}'" for key in sorted(missing)[:3])
        raise ModelError(
            f"the weight files of '{name}' lack weights of the model its config.json describes: {len(missing)}, "
            f"first {first}; take a checkpoint of this very model, or {_MEND}"
        )


def _prefix_of(missing: Collection[str], found: Collection[str]) -> str:
    """What stands before the names of most weights that lack; nothing where they are not there."""
    lacking = sorted(missing)
    before = {key.removesuffix(last) for last in lacking[-1:] for key in found if key.endswith(f".{last}")}
    fitting = [one for one in before if 2 * sum(one + name in found for name in lacking) > len(lacking)]
    return min(fitting, key=len, default="")


def _made_by(prefix: str) -> str:
    if "base_model." in prefix:
        return "peft has saved its wrapper; merge the adapter (merge_and_unload), then save_pretrained"
    what = {"_orig_mod.": "torch.compile", "module.": "DataParallel"}.get(
        prefix, "what wrapped the model when saved"
    )
    attribute = prefix.rstrip(".").rpartition(".")[2]
    return f"that is of {what}; save the module within (model.{attribute}.save_pretrained), or take the prefix away"


def _read(file: Path, key: str) -> Tensor:
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as opened:
            return opened.get_tensor(key)
    return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file) or None)[key]


def first_line(error: Exception) -> str:
    """The line of a library's error that says something, cut to what fits into ours."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = lines[1] if lines[0].startswith("Validation error") and len(lines) > 1 else lines[0]
    if text.endswith(":") and lines[-1] != text:
        # what follows the colon is the reason
        text = " ".join([text, *lines[lines.index(text) + 1 :]])
    name = type(error).__name__
    # a bare key or index says nothing without the type of the error
    spoken = len(text.split()) > 2
    return (text if spoken else f"{name} {text}".strip())[:240].rstrip(".,")


def local_folder(name: str) -> Path | None:
    """Return the folder of a model by path or hub name; None where its weights are not on this machine."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    from transformers.utils.hub import cached_file

    try:
        cached = cached_file(name, "config.json", local_files_only=True)
    except (OSError, ValueError):
        return None
    folder = Path(cached).parent if cached else None
    has_weights = folder is not None and any(folder.glob("*model*"))
    return folder if has_weights else None


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        shards = [index.parent / name for name in names]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"cannot read the index of the weights {index}: expected JSON with a 'weight_map' of weights to "
            f"files, got {type(error).__name__}: {error}; {_MEND}"
        ) from error
    for shard in shards:
        if not shard.is_file():
            raise ModelError(f"{index} names {shard.name}, which is not in the folder; {_MEND}")
    return shards


class StoredTensor(NamedTuple):
    """Where a tensor is, and what its file's header says of it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    "in the words of the file's format"


def tensors_in(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """Every tensor of some files by name. Raises ModelError: one is cut, which reading its header finds."""
    stats = ((file, file.stat()) for file in files)
    headers = (_header(file, stat.st_ino, stat.st_size, stat.st_mtime_ns) for file, stat in stats)
    return {key: tensor for header in headers for key, tensor in header.items()}


@lru_cache(maxsize=1024)
def _header(file: Path, *same_file: int) -> Mapping[str, StoredTensor]:
    """Of a file while it is the same: whoever looks at a model asks for it several times."""
    found = {}
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118, it is no mapping
                    header = opened.get_slice(key)
                    found[key] = StoredTensor(file, tuple(header.get_shape()), header.get_dtype())
            return found
        # pickle, but of plain tensors only
        mapped = zipfile.is_zipfile(file) or None
        for key, value in torch.load(file, map_location="meta", weights_only=True, mmap=mapped).items():
            if isinstance(value, Tensor):
                found[key] = StoredTensor(file, tuple(value.shape), str(value.dtype))
        return found
    except Exception as error:  # unpickling raises whatever the damage happens to spell
        pickled = "expected tensors by name as torch.save writes them, and nothing that is code"
        why = first_line(error) if file.suffix == ".safetensors" else pickled
        raise ModelError(
            f"the weight file {file} ({file.stat().st_size} bytes) is cut or damaged: {why}; {_MEND}"
        ) from error


def _require_fit(name: str, model: Any, shapes: dict[str, tuple[int, ...]]) -> None:
    """Let transformers match names and shapes, on tensors that repeat one number and so take no memory."""
    one = torch.zeros(())
    try:
        loaded: Any = type(model).from_pretrained(
            None,
            config=model.config,
            state_dict={key: one.expand(shape) for key, shape in shapes.items()},
            dtype=one.dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except Exception as error:  # whatever transformers says about files it does not understand
        raise ModelError(
            f"the weight files of '{name}' do not fit its config.json: {first_line(error)}; {_MEND}"
        ) from error
    info = loaded[1]
    for key, got, expected in sorted(info["mismatched_keys"]):
        raise ModelError(
            f"the weight files of '{name}' do not fit its config.json: weight {key}: expected shape "
            f"{tuple(expected)}, got {tuple(got)} ({len(info['mismatched_keys'])} differ); take config.json "
            f"and weights of one model, or {_MEND}"
        )
    require_all_weights(name, info["missing_keys"], shapes)
    require_taken(name, model, info["unexpected_keys"])
