"""Which split a file is of, by the names of its folders and its own; what is not clear is refused, never taken."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath

from core.errors import DataError

_SPLITS = {
    "train": ("train", "training"),
    "test": ("test", "testing", "eval", "evaluation"),
    "validation": ("validation", "valid", "val", "dev"),
    "holdout": ("holdout", "heldout"),
}
"Words in names, as `datasets` reads them, and what is held out."
_CANONICAL = {word: split for split, words in _SPLITS.items() for word in words}
_BETWEEN_WORDS = re.compile(r"[-_./\\ =0-9]+")
"What `datasets` takes to end a word, and the sign of a hive partition."
_HELD_OUT = re.compile(r"(?<![a-z])(held|hold)[-_ ]?out(?![a-z])")
_PARTITION = re.compile(r"split=(.+)", re.IGNORECASE)
_SHARD = re.compile(r"(.+?)-\d{5}-of-\d{5}")


def splits_of(file: PurePath) -> frozenset[str]:
    """Return the splits that a relative path is named after: a partition `split=NAME`, folders, else the file."""
    for part in file.parts[:-1]:
        if partition := _PARTITION.fullmatch(part):
            return frozenset({_canonical(partition[1])})
    of_folders = _words("/".join(file.parts[:-1]))
    return of_folders or _words(file.name)


def files_of_split(files: Sequence[Path], folder: Path, split: str, *, key: str = "data.path") -> list[Path]:
    """Return those of a folder's files that are of a split; where none is named after any, all are of train.

    Raises DataError: none is; a file is named after several splits; files of several, such as train_a and train_b.
    """
    below = {file: file.relative_to(folder) for file in files}
    wanted = _canonical(split)
    named = {file: splits_of(path) for file, path in below.items()}
    if split not in _CANONICAL:
        exact = [file for file, path in below.items() if split in _exact_names(path)]
        if exact:
            return exact
    if not any(named.values()) and wanted in {"train", *_words(folder.name)}:
        return list(files)
    chosen = [file for file in files if wanted in named[file]]
    if not chosen:
        shown = ", ".join(str(below[file]) for file in files[:5])
        unnamed = "" if any(named.values()) else " (what no name says otherwise is of split 'train')"
        raise DataError(
            f"the folder {folder} has no file of split '{split}'; it holds {shown}{unnamed}; check data.split"
        )
    for file in chosen:
        if len(named[file]) > 1:
            raise DataError(
                f"{file} is named after several splits ({', '.join(sorted(named[file]))}); expected one; rename it, "
                f"or name the files that are meant in {key}"
            )
    shards = sorted({name for file in chosen if (name := _shard_name(below[file]))})
    if len(shards) > 1:
        raise DataError(
            f"the folder {folder} has several splits that are named after '{split}': {', '.join(shards)}; name one of "
            "them in data.split"
        )
    return chosen


def require_one_split(files: Sequence[Path], what: str, *, key: str = "data.path") -> None:
    """Raises DataError where a pattern's files are of several splits: nobody would see a test split among them."""
    common = os.path.commonpath([file.parent for file in files])
    of: Mapping[frozenset[str], Path] = {splits_of(file.relative_to(common)): file for file in files}
    if len(of) > 1:
        shown = ", ".join(str(file) for file in sorted(of.values())[:5])
        raise DataError(
            f"{what} names files of several splits, such as {shown}; expected one split; narrow the pattern in {key}, "
            "or name the folder and data.split"
        )


def is_named_after_a_split(file: PurePath) -> bool:
    """True where the name of a file or of its folders says its split."""
    return bool(splits_of(file))


def _canonical(split: str) -> str:
    return _CANONICAL.get(split.lower(), split)


def _words(text: str) -> frozenset[str]:
    words = _BETWEEN_WORDS.split(_HELD_OUT.sub(" holdout ", text.lower()))
    return frozenset(_CANONICAL[word] for word in words if word in _CANONICAL)


def _shard_name(file: PurePath) -> str | None:
    match = _SHARD.match(file.name)
    return match[1] if match and _words(match[1]) else None


def _exact_names(file: PurePath) -> set[str]:
    return {*file.parts[:-1], file.name.split(".")[0], _shard_name(file) or file.name}
