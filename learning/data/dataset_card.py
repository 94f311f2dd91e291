"""Subsets that a folder's README.md describes, as `datasets` reads them from its `configs`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core.errors import DataError
from core.outside import cut, is_file
from learning.data.split_names import require_one_split

CARD = "README.md"
_UNDERSTOOD = {"data_files", "data_dir", "default", "description", "version"}
"What a subset may say that needs no `datasets` to be read."


def subset_files(
    folder: Path, subset: str, split: str, *, key: str = "data.path"
) -> list[Path] | Path | None:
    """Return the files of a subset's split as the folder's card names them; None without a card that names any.

    A folder where the card names no more (`data_dir`): what split its files are of, their names say.

    Raises DataError: the card cannot be read; no such subset, or several and none chosen; no such split.
    """
    subsets = _subsets(folder)
    if not subsets:
        if subset:
            inside = f", such as {folder / subset}" if (folder / subset).is_dir() else ""
            raise DataError(
                f"the folder {folder} has no subset '{subset}': its {CARD} names none; name the folder that holds the "
                f"files{inside}; check {key}"
            )
        return None
    chosen = subsets[_choose(folder, subset, subsets, key)]
    return _files(folder, chosen, split, key)


def is_for_datasets(folder: Path, subset: str, *, key: str = "data.path") -> bool:
    """True where the card says more of the subset than which files it has, which `datasets` alone heeds."""
    subsets = _subsets(folder)
    return bool(subsets) and not _UNDERSTOOD.issuperset(subsets[_choose(folder, subset, subsets, key)])


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
        raise DataError(f"cannot read the subsets in {card}: {error}; mend its configs") from error


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


def _files(folder: Path, chosen: dict[str, Any], split: str, key: str) -> list[Path] | Path | None:
    base = folder / (chosen.get("data_dir") or "")
    given = chosen.get("data_files")
    if given is None:
        return None if base == folder else base
    from datasets.data_files import sanitize_patterns

    patterns = sanitize_patterns(given)
    if split not in patterns:
        raise DataError(
            f"the folder {folder} has no split '{split}' in the subset that {CARD} describes; it has "
            f"{', '.join(patterns)}; check data.split"
        )
    files = _listed([str(pattern) for pattern in patterns[split]], base, split)
    says_splits = isinstance(given, list) and any(isinstance(one, dict) for one in given)
    if not says_splits:
        require_one_split(files, f"{folder / CARD}", key=key)
    return files


def _listed(patterns: Sequence[str], base: Path, split: str) -> list[Path]:
    from datasets.data_files import resolve_pattern

    files: dict[Path, None] = {}
    for pattern in patterns:
        try:
            files |= dict.fromkeys(sorted(Path(name) for name in resolve_pattern(pattern, str(base))))
        except (OSError, ValueError) as error:
            raise DataError(
                f"{CARD} names '{pattern}' for split '{split}', which is not in {base}: {cut(str(error))}; get the "
                "files, or mend its configs"
            ) from error
    return list(files)
