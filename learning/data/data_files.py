"""Which files a path names: one file, a pattern, a folder of shards, or none but a `datasets` name."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from ...core.errors import DataError
from ...core.outside import cut, is_dir, is_file, is_lfs_pointer
from .text_records import COMPRESSIONS, form_of, looks_like_rows
from .verifiers_package import SCHEME

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
    if path.startswith(SCHEME):
        return None
    file = Path(path).expanduser()
    if is_file(file):
        _require_format(file)
        _require_whole(file, split, key)
        return [file]
    if _WILD.search(path) and not is_dir(file):
        what = f"the pattern {cut(path)}"
        found = _of_one_format(_glob(str(file), key), what, key)
        _require_one_split(found, what, key)
        _require_whole(found[0], split, key)
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


def _require_whole(file: Path, split: str, key: str) -> None:
    """Raise DataError where data.split asks for another part of a file, which is read whole, than it is named after."""
    named = {"train", *_splits_of(PurePath(file.name)), *_exact_names(PurePath(*file.parts[-2:]))}
    if key != "data.eval_path" and named.isdisjoint({split, _canonical(split)}):
        raise DataError(
            f"data.split is '{cut(split)}', and {file} is read whole; expected a file that is named after the split, a "
            "folder or a `datasets` name; take data.split out, and take rows by data.skip_rows and data.limit"
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
    if is_saved_by_datasets(folder):
        return None
    subsets = _subsets(folder)
    if subsets:
        chosen = subsets[_choose(folder, subset, subsets, key)]
        if not _UNDERSTOOD.issuperset(chosen):
            return None  # it says more than which files it has, which `datasets` alone heeds
        base = folder / (chosen.get("data_dir") or "")
        if chosen.get("data_files") is not None:
            files = _described(folder, base, chosen["data_files"], split, key)
            known = all(form_of(file) in _FORMS for file in files)
            return _of_one_format(files, f"the folder {folder}", key) if known else None
        if base != folder:
            return _in_folder(base, "", split, key)
    elif subset:
        inside = f", such as {folder / subset}" if (folder / subset).is_dir() else ""
        raise DataError(
            f"the folder {folder} has no subset '{subset}': its {CARD} names none; name the folder that holds the "
            f"files{inside}; check {key}"
        )
    try:
        below = sorted(file for file in folder.rglob("*") if not _is_hidden(file, folder) and is_file(file))
    except OSError as error:
        raise DataError(f"cannot read the folder {folder}: {error.strerror}; check {key}") from error
    shards = [file for file in below if form_of(file) in _FORMS and file.name not in _DESCRIPTIONS]
    if any(form_of(file) != ".json" for file in shards):
        # of .json files those may describe the files beside them
        shards = [
            file
            for file in shards
            if form_of(file) != ".json" or _splits_of(file.relative_to(folder)) or looks_like_rows(file)
        ]
    if not shards:
        if not below:
            raise DataError(f"the folder {folder} holds no file; expected {NAMED_FORMATS}; check {key}")
        return None  # perhaps `datasets` knows what it is
    return _of_one_format(_of_split(shards, folder, split, key), f"the folder {folder}", key)


def _is_hidden(file: Path, folder: Path) -> bool:
    parts = file.relative_to(folder).parts
    return any(part.startswith((".", "__")) or part in _NOT_DATA for part in parts)


CARD = "README.md"
_UNDERSTOOD = {"data_files", "data_dir", "default", "description", "version"}
"What a subset may say that needs no `datasets` to be read."


def _subsets(folder: Path) -> dict[str, dict[str, Any]]:
    card = folder / CARD
    if not is_file(card):
        return {}
    try:
        text = card.read_text(encoding="utf-8-sig")
        if not text.startswith("---") or "\nconfigs:" not in text:
            return {}
        from datasets.utils.metadata import MetadataConfigs  # some seconds to import
        from huggingface_hub import DatasetCard

        described: Any = DatasetCard(text, ignore_metadata_errors=True).data
        return dict(MetadataConfigs.from_dataset_card_data(described))
    except Exception as error:  # of a file system, of UTF-8, of YAML, of `datasets`
        raise DataError(f"cannot read the subsets in {card}: {error}; fix its configs") from error


def _choose(folder: Path, subset: str, subsets: dict[str, dict[str, Any]], key: str) -> str:
    names = cut(", ".join(subsets))
    if subset:
        if subset not in subsets:
            raise DataError(
                f"the folder {folder} has no subset '{subset}'; its {CARD} names {names}; check {key}"
            )
        return subset
    default = [
        name for name, one in subsets.items() if len(subsets) == 1 or name == "default" or one.get("default")
    ]
    if len(default) != 1:
        raise DataError(
            f"the folder {folder} holds several subsets ({names}); expected the name of one; set {key} to "
            f"{folder}:{next(iter(subsets))}"
        )
    return default[0]


def _described(folder: Path, base: Path, given: Any, split: str, key: str) -> list[Path]:
    """The files of a subset's split as the card names them."""
    from datasets.data_files import resolve_pattern, sanitize_patterns

    patterns = sanitize_patterns(given)
    if split not in patterns:
        raise DataError(
            f"the folder {folder} has no split '{split}' in the subset that {CARD} describes; it has "
            f"{', '.join(patterns)}; check data.split"
        )
    found: dict[Path, None] = {}
    for pattern in patterns[split]:
        try:
            names = resolve_pattern(str(pattern), str(base))
        except (OSError, ValueError) as error:
            raise DataError(
                f"{CARD} names '{pattern}' for split '{split}', which is not in {base}: {cut(str(error))}; get the "
                "files, or fix its configs"
            ) from error
        found |= dict.fromkeys(sorted(map(Path, names)))
    if not (isinstance(given, list) and any(isinstance(one, dict) for one in given)):  # it names no splits
        _require_one_split([*found], f"{folder / CARD}", key)
    return [*found]


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


def _splits_of(file: PurePath) -> frozenset[str]:
    """Return the splits that a relative path is named after: a partition `split=NAME`, folders, else the file."""
    for part in file.parts[:-1]:
        if partition := _PARTITION.fullmatch(part):
            return frozenset({_canonical(partition[1])})
    of_folders = _words("/".join(file.parts[:-1]))
    return of_folders or _words(file.name)


def _of_split(files: Sequence[Path], folder: Path, split: str, key: str) -> list[Path]:
    """Those of a folder's files that are of a split; where none is named after any, all are of train."""
    below = {file: file.relative_to(folder) for file in files}
    wanted = _canonical(split)
    named = {file: _splits_of(path) for file, path in below.items()}
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


def _require_one_split(files: Sequence[Path], what: str, key: str) -> None:
    """Raise DataError where a pattern's files are of several splits: nobody would see a test split among them."""
    common = os.path.commonpath([file.parent for file in files])
    of: Mapping[frozenset[str], Path] = {_splits_of(file.relative_to(common)): file for file in files}
    if len(of) > 1:
        shown = ", ".join(str(file) for file in sorted(of.values())[:5])
        raise DataError(
            f"{what} names files of several splits, such as {shown}; expected one split; narrow the pattern in {key}, "
            "or name the folder and data.split"
        )


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
