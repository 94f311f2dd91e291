"""What comes from outside: quoted in short, and never a reason to fail otherwise than expected."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhfspec.core.outside import cut, is_dir, is_file, quote, try_folder


@pytest.mark.parametrize(
    "value",
    [10**9000, "x" * 10**6, [[[[]]]] * 10**5, {str(i): {"a": [i]} for i in range(10**4)}, b"\0" * 10**5],
    ids=["integer", "word", "list", "mapping", "bytes"],
)
def test_a_quotation_is_short_whatever_is_quoted(value: object) -> None:
    assert 0 < len(quote(value)) < 400


def test_short_values_are_quoted_whole() -> None:
    assert quote({"a": [1, 2.5, "b"]}) == "{'a': [1, 2.5, 'b']}"
    assert cut("--set run.name=x") == "--set run.name=x"
    assert cut("a" * 100 + "b" * 100) == "a" * 40 + "..." + "b" * 40


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "/dev/null/x"])
def test_a_name_that_the_system_refuses_is_no_file(name: str) -> None:
    assert not is_file(Path(name))
    assert not is_dir(Path(name))


def test_a_folder_is_tried_and_nothing_is_left(tmp_path: Path) -> None:
    try_folder(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "b", Path("/proc/x"), Path("/" + "x" * 5000)):
        with pytest.raises(OSError):
            try_folder(place)
