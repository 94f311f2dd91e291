"""The user's own code, by `package.module:name` or `path/to/file.py:name`: functions, classes, attributes of them."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import ConfigError, one_line

_MAX_CHARS = 200
_ROOT = Path(__file__).resolve().parents[1]
IMPORT_FOLDER = _ROOT if (_ROOT / "rlhfspec.py").is_file() else _ROOT.parent
"What has to be on the path for `rlhfspec` to be found: the checkout, or where the package is installed."
_LAYERS = frozenset(
    ("core", "profiles", "policies", "engine", "learning", "actors", "cluster", "integrations", "benchmarks")
)
_PRIVATE = "rlhfspec_user_code"
"The package whose modules are those of a user's folder, where their own names are taken."
_folders: list[str] = []


def named_code(path: str, *, key: str, kind: str, example: str) -> Any:
    """What the path names; its module is imported, from the user's folders too.

    A file of the user's whose name is taken, by the standard library, an installed package or one of ours, is imported
    all the same, under a name of its own.

    Args:
        path: `package.module:name`, or `package.module:name.attribute`; a file too, from the user's folders.
        key: the setting that says so, for messages.
        kind: what is expected, such as `function`.
        example: a path and what it means, for messages.

    Raises:
        ConfigError: no such path, module or name, or a module that cannot be imported.
    """
    module_name, _, name = path.partition(":")
    file = _named_file(module_name)
    parts = name.split(".") if file is not None else [*module_name.split("."), *name.split(".")]
    if not all(part.isidentifier() for part in parts):
        if module_name.endswith(".py") and file is None:
            example += f"; there is no file {module_name} in {' or '.join(user_folders())}"
        raise ConfigError(
            f"{key} '{path}' names no {kind}: expected package.module:{kind} or file.py:{kind}, such as {example}"
        )
    import_from_too(os.getcwd())  # the console script leaves it out
    module = None
    try:
        module = found = _imported(module_name) if file is None else _of_file(file)
        for part in name.split("."):
            found = getattr(found, part)
        return found
    except (ModuleNotFoundError, SyntaxError) as error:
        raise ConfigError(
            f"{key} {path}: cannot import {module_name}: {describe(error)}; {_advice(error)}"
        ) from error
    except (Exception, SystemExit) as error:  # the module runs whatever the user wrote
        if module is not None and isinstance(error, AttributeError):
            raise ConfigError(
                f"{key} {path}: {module_name} ({file_of(module)}) has no '{name}'; check the name"
            ) from None
        raise ConfigError(
            f"{key} {path}: importing {module_name} raised {type(error).__name__}: {describe(error)} "
            f"({place_of(error)}); fix the module"
        ) from error


def import_from_too(folder: str | None) -> None:
    """Let this process import the user's code from a folder; last, so that it shadows nothing of ours."""
    if folder is None:
        return
    if folder not in _folders:
        _folders.append(folder)
    if folder not in sys.path:
        sys.path.append(folder)


def user_folders() -> list[str]:
    """The folders that the user's code is imported from: those that were told, then the current one."""
    return list(dict.fromkeys([*_folders, os.getcwd()]))


def give_way(folders: Sequence[str]) -> None:
    """Let the user's folders go before a checkout, whose folders may be named as theirs, in their own process.

    An installed package has no such folders on the path, but all other packages beside it, which go first.
    """
    for folder in reversed(folders):
        import_from_too(folder)
        if Path(folder).resolve() == _ROOT:
            continue
        ours = next((i for i, entry in enumerate(sys.path) if entry and Path(entry).resolve() == _ROOT), None)
        if ours is not None and folder in sys.path[ours + 1 :]:
            del sys.path[ours + 1 + sys.path[ours + 1 :].index(folder)]
            sys.path.insert(ours, folder)
    importlib.invalidate_caches()


def describe(error: BaseException) -> str:
    """An error's message as one line, cut where it is long."""
    return one_line(str(error))[:_MAX_CHARS]


def place_of(error: BaseException) -> str:
    """File and line of the user's code that raised, as far as it is known."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{os.path.basename(frames[-1].filename)}, line {frames[-1].lineno}" if frames else "no line known"


def file_of(module: ModuleType) -> str:
    """Where a module was imported from."""
    return getattr(module, "__file__", None) or "built into Python"


def _imported(module_name: str) -> ModuleType:
    top = module_name.split(".")[0]
    ours = _ROOT if top in _LAYERS else None
    theirs = [
        folder
        for folder in user_folders()
        if Path(folder).resolve() != ours and _file_in(folder, module_name) is not None
    ]
    if hidden := [folder for folder in theirs if not _is_found_in(folder, top)]:
        return _privately(hidden[0], module_name)
    if top in _LAYERS and not theirs and _file_in(str(_ROOT), module_name) is not None:
        # named so before the package had a name of its own
        module_name = f"rlhfspec.{module_name}"
    return importlib.import_module(module_name)


def _named_file(module_name: str) -> Path | None:
    """The file that is named in the place of a module, from the first of the user's folders that has it."""
    if not module_name.endswith(".py") or any(_file_in(one, module_name) for one in user_folders()):
        return None
    files = (Path(folder, module_name).expanduser() for folder in user_folders())
    return next((file.resolve() for file in files if file.is_file()), None)


def _of_file(file: Path) -> ModuleType:
    """The module of a file, which imports what stands beside it."""
    import_from_too(str(file.parent))
    if file.stem.isidentifier() and _is_found_in(str(file.parent), file.stem):
        return importlib.import_module(file.stem)
    return _privately(str(file.parent), file.stem)


def _privately(folder: str, module_name: str) -> ModuleType:
    """The module by the folder it stands in, whatever else has its name; its relative imports stay inside."""
    root = _PRIVATE
    while root in sys.modules and list(sys.modules[root].__path__) != [folder]:
        root += "_"
    if root not in sys.modules:
        package = ModuleType(root)
        package.__path__ = [folder]
        sys.modules[root] = package
    return importlib.import_module(f"{root}.{module_name}")


def _file_in(folder: str, module_name: str) -> Path | None:
    """The file of a module in a folder; None: there is none, or only a folder without `__init__.py`."""
    place = Path(folder, *module_name.split("."))
    files = (place / "__init__.py", place.with_name(f"{place.name}.py"))
    return next((file for file in files if file.is_file()), None)


def _is_found_in(folder: str, top: str) -> bool:
    """Whether `import top` takes what is in this folder."""
    places = _places_of(top)
    return Path(folder).resolve() in [place.resolve().parent for place in places]


def _places_of(top: str) -> list[Path]:
    """The file of a top-level module, or the folders of a package; none where it is in no file."""
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # a module that was put together by hand
        return []
    if spec is None:
        return []
    if spec.submodule_search_locations is not None:
        return [Path(place) for place in spec.submodule_search_locations]
    return [Path(spec.origin)] if spec.has_location and spec.origin is not None else []


def _advice(error: ModuleNotFoundError | SyntaxError) -> str:
    """What helps: where a module of the user's is hidden by another one, to rename it."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    top = (missing or "").split(".")[0]
    for folder in user_folders():
        there = Path(folder, top)
        hidden = bool(top) and (there.is_dir() or _file_in(folder, top) is not None)
        if hidden and (places := _places_of(top)) and not _is_found_in(folder, top):
            return f"'{top}' is {places[0]} here, which goes before {there}; give yours another name"
    if isinstance(error, SyntaxError):
        return "fix the module"
    return "run from the folder that holds it, or put it on PYTHONPATH"
