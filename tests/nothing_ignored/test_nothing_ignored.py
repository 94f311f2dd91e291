"""An unknown name in any input is refused or noted by the reader that a user's input goes through: none is silent.

Each `*_inputs.py` beside this file has `FEEDS`: by the name of a surface, a function that gives a name and a value to
the real reader of such an input, and returns what it said (the notes, or nothing) or lets its error pass.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhfspec.core.errors import RlhfSpecError
from rlhfspec.core.surfaces.surface import Surface, note_once, surfaces

Feed = Callable[[str, Any, Path], None]
HERE = Path(__file__).parent


def feeds() -> dict[str, Feed]:
    found: dict[str, Feed] = {}
    for file in sorted(HERE.glob("*_inputs.py")):
        spec = importlib.util.spec_from_file_location(f"nothing_ignored_{file.stem}", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert not set(found) & set(module.FEEDS)
        found |= module.FEEDS
    return found


FEEDS = feeds()
UNKNOWN = ("zzz_new_ability", "Weight2", "x-vendor", "mask_of_loss", "drop")


def mutants(one: Surface) -> Iterator[tuple[str, Any]]:
    """Names that no reader knows, misspelt ones, refused ones, and values that ask for something."""
    # of a surface with free names, such as numbers to log, many are used
    yield from ((name, 0.25) for name in UNKNOWN if one.fault(name, 0.25))
    for name in list(one.used)[:3]:
        if "*" not in name and one.fault(f"{name}x", 1):
            yield f"{name}x", 1
    yield from ((name.replace("*", "zz"), 0.37) for name in one.refused)
    yield from ((name.replace("*", "zz"), 0.37) for name in one.only)


MUTANTS = [(one.name, name, value) for one in surfaces().values() for name, value in mutants(one)]


def test_every_surface_is_fed() -> None:
    assert sorted(FEEDS) == sorted(surfaces())


@pytest.mark.parametrize(("surface", "name", "value"), MUTANTS)
def test_no_unknown_name_is_silent(
    surface: str, name: str, value: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    note_once.cache_clear()
    try:
        FEEDS[surface](name, value, tmp_path)
    except Exception as error:
        # the server's refusals are ApiErrors
        assert isinstance(error, RlhfSpecError) or type(error).__name__ == "ApiError", repr(error)
        said = str(error)
    else:
        said = "\n".join(record.getMessage() for record in caplog.records)
    assert name in said, f"{surface}: '{name}' was ignored in silence"
