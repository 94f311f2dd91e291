"""The README and the benchmark pages say what the result files hold; the README is read to its end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import pages

MOST_WORDS = 700


def words_of(text: str) -> list[str]:
    """Words as a reader counts them: no code blocks, no markup, no link targets."""
    text = re.sub(r"```.*?```|<!--.*?-->", " ", text, flags=re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return re.findall(r"[^\s|*#`\[\]!-][^\s|*`\]]*", text)


@pytest.mark.parametrize("name", list(pages.ABOUT))
def test_a_page_is_written_from_its_result_files(name: str) -> None:
    assert pages.load_results(name), "no result file"
    written = (pages.PAGES / f"{name}.md").read_text()
    assert written == pages.page(name), "run: python -m benchmarks.pages"


def test_the_readme_has_the_figures_of_the_result_files() -> None:
    readme = pages.README.read_text()
    assert readme == pages.with_figures(readme), "run: python -m benchmarks.pages"
    assert pages.readme_rows().count("\n| ") == 1 + 5


def test_a_changed_figure_changes_page_and_readme(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = {name: pages.load_results(name) for name in pages.ABOUT}
    loaded["exactness"][pages.HEADLINE_MACHINE]["figures"]["mismatches"] = 3.0
    monkeypatch.setattr(pages, "load_results", lambda name: loaded[name])
    readme = pages.README.read_text()
    assert "3 of 945" in pages.with_figures(readme) != readme
    assert "| `mismatches` | 3 |" in pages.page("exactness")


def test_equal_figures_give_an_equal_picture(tmp_path: Path) -> None:
    for name in ("first.svg", "second.svg"):
        pages.draw_speedup(tmp_path / name)
    assert (tmp_path / "first.svg").read_bytes() == (tmp_path / "second.svg").read_bytes()


def test_the_readme_is_short() -> None:
    assert len(words_of(pages.README.read_text())) <= MOST_WORDS
    assert words_of("# A `b c`\n```\nno\n```\n| x | [y](z) |") == ["A", "b", "c", "x", "y"]
