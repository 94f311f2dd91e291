"""Which files a path names: one file, a pattern, a folder of shards, or none but a `datasets` name."""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from pathlib import Path

from core.errors import DataError
from core.outside import cut, is_dir, is_file

FORMATS = (".jsonl", ".json", ".parquet")
_SPLITS = {
    "train": ("train", "training"),
    "test": ("test", "testing", "eval", "evaluation"),
    "validation": ("validation", "valid", "val", "dev"),
}
"Words in file names, as `datasets` reads them."
_WILD = re.compile(r"[*?\[]")


def find_files(path: str, split: str, *, key: str = "data.path") -> list[Path] | None:
    """Return the files in the order they are read; None where `path` can only be a name that `datasets` knows.

    Of a folder whose files are named after splits, only those of `split`. `key` is the setting that named it.
    Raises DataError: no such file, none of these formats, no file in the folder or pattern, formats mixed.
    """
    file = Path(path).expanduser()
    if is_file(file):
        _require_format(file)
        return [file]
    if _WILD.search(path) and not is_dir(file):
        found = [Path(name) for name in _glob(str(file), key)]
        return _of_one_format(found, f"the pattern {cut(path)}", key)
    if is_dir(file):
        return _in_folder(file, split, key)
    if file.suffix.lower() in FORMATS or path.startswith(("/", ".", "~")):
        raise DataError(f"data file {file} does not exist; check {key}")
    return None


def _require_format(file: Path) -> None:
    if file.suffix.lower() not in FORMATS:
        raise DataError(
            f"cannot read {file}: expected a file of JSON lines (.jsonl, .json) or Parquet (.parquet), got "
            f"{file.suffix or 'no suffix'}; convert it, one object a row"
        )


def _glob(pattern: str, key: str) -> list[str]:
    try:
        return sorted(glob.glob(pattern, recursive=True))
    except (OSError, ValueError, re.error) as error:
        raise DataError(f"cannot look for {cut(pattern)}: {error}; check {key}") from error


def _of_one_format(found: Sequence[Path], what: str, key: str) -> list[Path]:
    files = [file for file in found if is_file(file)]
    if not files:
        raise DataError(f"{what} names no file; expected .jsonl or .parquet files; check {key}")
    for file in files:
        _require_format(file)
    kinds = sorted({"Parquet" if file.suffix.lower() == ".parquet" else "JSON lines" for file in files})
    if len(kinds) > 1:
        raise DataError(
            f"{what} holds both {' and '.join(kinds)}; name one of them in {key} by a pattern such as data/*.parquet "
            "(prompts of `rlhfspec train` may come from both, as data.sources)"
        )
    return files


def _in_folder(folder: Path, split: str, key: str) -> list[Path] | None:
    try:
        below = sorted(file for file in folder.rglob("*") if is_file(file))
    except OSError as error:
        raise DataError(f"cannot read the folder {folder}: {error.strerror}; check {key}") from error
    # what saves data sets leaves descriptions beside them
    shards = [file for file in below if file.suffix.lower() in (".jsonl", ".parquet")]
    if not shards:
        if not below:
            raise DataError(
                f"the folder {folder} holds no file; expected .jsonl or .parquet files; check {key}"
            )
        return None  # perhaps `datasets` knows what it is
    return _of_one_format(_of_split(shards, folder, split), f"the folder {folder}", key)


def _of_split(files: list[Path], folder: Path, split: str) -> list[Path]:
    words = {
        file: set(re.split(r"[-_./\\ ]+", str(file.relative_to(folder).with_suffix("")).lower()))
        for file in files
    }
    named = {name for known in _SPLITS.values() for name in known}
    if not any(words[file] & named for file in files):
        return files
    wanted = set(_SPLITS.get(split, (split.lower(),)))
    chosen = [file for file in files if words[file] & wanted]
    if not chosen:
        shown = ", ".join(str(file.relative_to(folder)) for file in files[:5])
        raise DataError(
            f"the folder {folder} has no file of split '{split}'; it holds {shown}; check data.split"
        )
    return chosen
