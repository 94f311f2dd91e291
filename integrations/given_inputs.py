"""What Python hands over as objects, as files: a run's config names files alone, so that it resumes and verifies.

They lie in `.inputs` beside the run folders, named after what is in them: the next kernel's config is the same.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import pickletools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from keyword import iskeyword
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError, DataError
from ..core.files import storage_errors, write_whole
from ..core.outside import cut, quote
from ..core.settings.reward import RESERVED_NAMES, RewardConfig
from ..core.surfaces.surface import surface

_CODE = """# Functions that Python handed over, by value.
import sys

if sys.version_info[:2] != {version}:
    raise ImportError("they are code of Python {version}, and this is %s; go on with that one" % sys.version)
sys.path += [folder for folder in {folders} if folder not in sys.path]
from ray import cloudpickle

for name, one in cloudpickle.loads({pickled}).items():
    if getattr(one, "__module__", "") == "__main__":
        one.__module__ = __name__
    globals()[name] = one
"""
Function = Callable[..., Any]
FunctionOrName = Function | str
_PROMPTS = ("prompt", "question", "messages", "conversation", "conversations")
"Columns of prompts that nobody needs to name."


def write_rows(rows: Any, folder: Path, one_of: Sequence[str] = ()) -> tuple[str, dict[str, Any]]:
    """The path of rows, and the columns that all have with what the first has there; none of what is a path already.

    Raises DataError: no rows, or no JSON, or a row that has a column of `one_of` names; StorageError.
    """
    if isinstance(rows, str | os.PathLike):
        return os.fspath(rows), {}
    is_dataset = hasattr(rows, "to_parquet")
    rows = rows if is_dataset or not hasattr(rows, "__iter__") else [*rows]
    first = next(iter(rows), None) if hasattr(rows, "__iter__") else None
    if not isinstance(first, Mapping):
        raise DataError(
            f"expected a datasets.Dataset (of one split), a list of dicts or a path as dataset, got {quote(rows)}"
        )
    for number, row in enumerate([first] if is_dataset else rows):
        if one_of and isinstance(row, Mapping) and not row.keys() & {*one_of}:
            raise DataError(
                f"row {number} of train_dataset or eval_dataset has no column {' or '.join(one_of)}; its columns are "
                f"{cut(', '.join(map(str, row)))}; rename the column of prompts, or name it by data.prompt_field"
            )
    if is_dataset:
        file = BytesIO()
        rows.to_parquet(file)
        return _kept(folder, "rows_{}.parquet", file.getvalue()), dict(first)
    try:
        lines = "\n".join(json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"a dataset's row is no JSON: {error}; expected text, finite numbers, lists, dicts"
        ) from None
    if odd := [number for number, row in enumerate(rows) if not isinstance(row, Mapping)]:
        raise DataError(f"row {odd[0]} of a dataset is {quote(rows[odd[0]])}, expected a dict; take it out")
    shared = {name: value for name, value in first.items() if all(name in row for row in rows)}
    return _kept(folder, "rows_{}.jsonl", lines.encode()), shared


def source_keys(rows: Any, said: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The keys of a `data` section for rows of prompts, beside those `said`; other origins give way.

    TRL's column `prompt` is read, text without `answer` has no reference, reward functions get what is left by name.
    """
    is_usual = not {"prompt_field", "prompt_template", "messages_field"} & said.keys()
    path, columns = write_rows(rows, folder, _PROMPTS if is_usual else ())
    keys: dict[str, Any] = {"path": path} | {
        key: empty for key, empty in (("task", None), ("sources", [])) if said.get(key)
    }
    if "prompt" in columns and "question" not in columns and not said.get("messages_field"):
        keys["prompt_field"] = "prompt"
    named = {"prompt_field": "question", "reference_field": "answer"} | keys | dict(said)
    if "answer" not in columns and isinstance(columns.get(named["prompt_field"]), str):
        keys["reference_field"] = None
    read = {*map(str, named.values()), *_PROMPTS[2:], *(said.get("ignored_fields") or ())}
    faults = {name: surface("row.prompt").fault(name, True) for name in columns if name not in read}
    if columns:
        keys["reward_fields"] = [name for name, fault in faults.items() if fault is None or fault.is_note]
    return {
        key: value for key, value in keys.items() if key in ("path", "task", "sources") or key not in said
    }


def reward_keys(
    given: FunctionOrName | Sequence[FunctionOrName], weights: Sequence[float] | None, folder: Path
) -> dict[str, Any]:
    """`reward.kind` and `reward.parts` for functions, by value, and for texts, which are kinds.

    Raises ConfigError: other weights than functions, or a function that cannot be pickled; StorageError.
    """
    functions = [given] if isinstance(given, str) or callable(given) else [*given]
    if not functions or len(functions) != len(weights := weights or [1.0] * len(functions)):
        raise ConfigError(
            f"expected reward_funcs, and reward_weights as many, got {len(functions)}, {quote(weights)}"
        )
    kinds, names, own = list[str](), list[str](), {}
    for number, one in enumerate(functions):
        name = one.rpartition(":")[2] if isinstance(one, str) else getattr(one, "__name__", "").strip("<>")
        free = name.isidentifier() and not iskeyword(name) and name not in (*names, *RESERVED_NAMES)
        names.append(name if free else f"{name if name.isidentifier() else 'reward'}_{number}")
        if not isinstance(one, str):
            own[names[-1]] = one
    file = _write_functions(own, folder) if own else ""
    kinds = [
        one if isinstance(one, str) else f"{file}:{name}" for name, one in zip(names, functions, strict=True)
    ]
    if len(functions) == 1 and weights == [1.0]:
        return {"reward.kind": kinds[0], "reward.parts": []}
    parts = [
        # None of TRL's form says that a row is none of the function's
        {"name": name, "kind": kind, "weight": weight, "optional": name in own and _is_trls(own[name])}
        for name, kind, weight in zip(names, kinds, weights, strict=True)
    ]
    return {"reward.kind": RewardConfig().kind, "reward.parts": parts}


def tool_keys(given: FunctionOrName | Sequence[FunctionOrName], folder: Path) -> dict[str, Any]:
    """`environment.kind` and `environment.tools` for functions, by value, and for texts, which are files or modules.

    Raises ConfigError: a function without a name of its own, or that cannot be pickled; StorageError.
    """
    functions = [given] if isinstance(given, str) or callable(given) else [*given]
    own = {getattr(one, "__name__", ""): one for one in functions if not isinstance(one, str)}
    texts = [one for one in functions if isinstance(one, str)]
    if (
        len(own) + len(texts) != len(functions)
        or not functions
        or not all(name.isidentifier() for name in own)
    ):
        raise ConfigError(f"tools: expected functions by names of their own, got {quote(functions)}; use def")
    file = [f"{_write_functions(own, folder, 'tools')}:{','.join(own)}"] if own else []
    return {"environment.kind": "tools", "environment.tools": [*file, *texts]}


def _is_trls(function: Callable[..., Any]) -> bool:
    return "completions" in inspect.signature(function).parameters


def _write_functions(functions: Mapping[str, Function], folder: Path, what: str = "reward_funcs") -> str:
    from ray.cloudpickle import cloudpickle  # which brings Ray

    try:
        pickled = cloudpickle.dumps(functions)
    except Exception as error:  # whatever a value that a function holds says to it
        raise ConfigError(
            f"{what} {', '.join(functions)}: cannot be sent to other processes by value: {error}; load what "
            "cannot be pickled inside the function, or name one in a file: 'path/to/file.py:function'"
        ) from error
    folders = list(dict.fromkeys(map(os.path.abspath, sys.path)))
    code = _CODE.format(version=tuple(sys.version_info[:2]), folders=folders, pickled=pickled)
    # folders of modules may be others in the next kernel, whose number stands in names of cells
    same = [f"{op.name} {arg}" for op, arg, _ in pickletools.genops(pickled) if op.name != "FRAME"]
    named_after = re.sub(r"ipykernel_\d+", "", "\n".join(same)).encode()
    stem = what.replace("funcs", "functions")
    return _kept(folder, f"{stem}_{{}}.py", code.encode(), named_after)


def _kept(folder: Path, name: str, data: bytes, named_after: bytes | None = None) -> str:
    path = folder / name.format(hashlib.sha256(named_after or data).hexdigest()[:16])
    with storage_errors(path):
        folder.mkdir(parents=True, exist_ok=True)
    write_whole(path, data)
    return str(path)
