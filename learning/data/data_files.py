"""Which files a path names: one file, a pattern, a folder of shards, or none but a `datasets` name."""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from pathlib import Path

from core.errors import DataError
from core.outside import cut, is_dir, is_file, is_lfs_pointer
from learning.data.dataset_card import is_for_datasets, subset_files
from learning.data.split_names import files_of_split, is_named_after_a_split, require_one_split
from learning.data.text_records import COMPRESSIONS, form_of, looks_like_rows

_FORMS = {
    ".jsonl": "JSON lines",
    ".ndjson": "JSON lines",
    ".json": "JSON",
    ".csv": "CSV",
    ".tsv": "TSV",
    ".parquet": "Parquet",
}
NAMED_FORMATS = "JSON lines (.jsonl, .json), a list of JSON objects, CSV (.csv, .tsv) or Parquet (.parquet)"
_DESCRIPTIONS = ("config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"What saves data sets leaves these beside them."
_NOT_DATA = ("_delta_log", "_temporary")
_WILD = re.compile(r"[*?\[]")


def find_files(path: str, split: str, *, key: str = "data.path") -> list[Path] | None:
    """Return the files in the order they are read; None where `path` is for `datasets` to read.

    Of a folder, or of a subset `FOLDER:SUBSET` that its README.md describes, those of `split`. What is hidden (`.`
    or `__` before its name) is passed over unless a pattern asks for it. `key` is the setting that named it.
    Raises DataError: no such file, none of these formats, no file in the folder or pattern, formats or splits mixed.
    """
    file = Path(path).expanduser()
    if is_file(file):
        _require_format(file)
        return [file]
    if _WILD.search(path) and not is_dir(file):
        what = f"the pattern {cut(path)}"
        found = _of_one_format(_glob(str(file), key), what, key)
        require_one_split(found, what, key=key)
        return found
    folder, subset = split_subset(path)
    if folder and is_dir(Path(folder)):
        return _in_folder(Path(folder), subset, split, key)
    if form_of(file) in _FORMS or path.startswith(("/", ".", "~")):
        raise DataError(f"data file {file} does not exist; check {key}")
    return None


def split_subset(path: str) -> tuple[str, str]:
    """Return what `PATH:SUBSET` or `NAME:SUBSET` names, the subset empty where there is none."""
    folder = Path(path).expanduser()
    if is_dir(folder):
        return str(folder), ""
    name, _, subset = path.rpartition(":")
    folder = Path(name).expanduser()
    if name and is_dir(folder):
        return str(folder), subset
    name, _, subset = path.partition(":")
    return name, subset


def is_saved_by_datasets(folder: Path) -> bool:
    """True for a folder that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote."""
    is_one = is_file(folder / "state.json") and is_file(folder / "dataset_info.json")
    return is_one or is_file(folder / "dataset_dict.json")


def _require_format(file: Path) -> None:
    if is_lfs_pointer(file):
        raise DataError(
            f"{file} is a pointer of Git LFS, not the file itself; fetch it (`git lfs pull` in its repository)"
        )
    form = form_of(file)
    if form not in _FORMS or (form == ".parquet" and file.suffix.lower() in COMPRESSIONS):
        raise DataError(
            f"cannot read {file}: expected a file of {NAMED_FORMATS}, text also as {', '.join(COMPRESSIONS)}, got "
            f"{file.suffix or 'no suffix'}; convert it, one object a row"
        )


def _glob(pattern: str, key: str) -> list[Path]:
    asked = sum(part.startswith("__") for part in Path(pattern).parts)
    try:
        found = [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]
    except (OSError, ValueError, re.error) as error:
        raise DataError(f"cannot look for {cut(pattern)}: {error}; check {key}") from error
    return [path for path in found if sum(part.startswith("__") for part in path.parts) == asked]


def _of_one_format(found: Sequence[Path], what: str, key: str) -> list[Path]:
    files = [file for file in found if is_file(file)]
    if not files:
        raise DataError(f"{what} names no file; expected {NAMED_FORMATS}; check {key}")
    for file in files:
        _require_format(file)
    kinds = sorted({_kind(file) for file in files})
    if len(kinds) > 1:
        raise DataError(
            f"{what} holds both {' and '.join(kinds)}; name one of them in {key} by a pattern such as "
            f"data/*{files[0].suffix} (prompts of `rlhfspec train` may come from both, as data.sources)"
        )
    return files


def _kind(file: Path) -> str:
    """The form and how it is packed: the same rows often lie beside each other in two."""
    packed = file.suffix.lower()
    return _FORMS[form_of(file)] + (f" ({packed})" if packed in COMPRESSIONS else "")


def _in_folder(folder: Path, subset: str, split: str, key: str) -> list[Path] | None:
    if is_saved_by_datasets(folder) or is_for_datasets(folder, subset, key=key):
        return None
    described = subset_files(folder, subset, split, key=key)
    if isinstance(described, Path):
        return _in_folder(described, "", split, key)
    if described is not None:
        known = all(form_of(file) in _FORMS for file in described)
        return _of_one_format(described, f"the folder {folder}", key) if known else None
    try:
        below = sorted(file for file in folder.rglob("*") if not _is_hidden(file, folder) and is_file(file))
    except OSError as error:
        raise DataError(f"cannot read the folder {folder}: {error.strerror}; check {key}") from error
    shards = [file for file in below if form_of(file) in _FORMS and file.name not in _DESCRIPTIONS]
    rows = [file for file in shards if form_of(file) != ".json" or _is_data(file, folder)]
    if any(form_of(file) != ".json" for file in shards):
        shards = rows
    if not shards:
        if not below:
            raise DataError(f"the folder {folder} holds no file; expected {NAMED_FORMATS}; check {key}")
        return None  # perhaps `datasets` knows what it is
    return _of_one_format(files_of_split(shards, folder, split, key=key), f"the folder {folder}", key)


def _is_hidden(file: Path, folder: Path) -> bool:
    parts = file.relative_to(folder).parts
    return any(part.startswith((".", "__")) or part in _NOT_DATA for part in parts)


def _is_data(file: Path, folder: Path) -> bool:
    """False for a .json file that describes the files beside it."""
    return is_named_after_a_split(file.relative_to(folder)) or looks_like_rows(file)
