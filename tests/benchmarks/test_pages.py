"""The README and the benchmark pages say what the result files hold; the README is read to its end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlhfspec.benchmarks.pages import readme, tables
from rlhfspec.benchmarks.pages.pictures import draw_speedup
from rlhfspec.benchmarks.support.result import machine_name

PAGES = tables.PAGES
README = tables.ROOT / "README.md"
MOST_WORDS = 600
"Beside the table of figures."
WRITE = "run: python -m rlhfspec.benchmarks.pages"


def picture_texts(path: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]+)</text>", path.read_text())


@pytest.mark.parametrize("name", tables.names())
def test_a_page_is_written_from_its_result_files(name: str) -> None:
    assert tables.page(name) == tables.path_of(name).read_text(), WRITE
    assert f"rlhfspec bench {name.removesuffix('_real').replace('_', '-')}" in tables.page(name).replace(
        "_", "-"
    )


def test_a_page_has_results_and_results_have_a_page() -> None:
    results = {path.stem for path in tables.RESULTS.glob("*/*.json")}
    unmeasured = {name for name in tables.names() if tables.NOT_MEASURED in tables.page(name)}
    assert results | unmeasured == {*tables.names()} and not results & unmeasured


@pytest.mark.parametrize("name", tables.names())
def test_results_lie_in_the_folder_of_their_machine(name: str) -> None:
    for folder, result in tables.load_results(name).items():
        assert folder == machine_name(result["provenance"])


def test_a_machine_is_named_by_processor_and_cores() -> None:
    assert machine_name({"cpu_model": "Intel(R) Xeon(R) Processor", "num_cores": 2}) == "intel-xeon-2c"
    assert machine_name({"cpu_model": "AMD EPYC 9B14 @ 2.6GHz", "num_cores": 8}) == "amd-epyc-9b14-8c"
    assert (
        machine_name({"device": "NVIDIA H100 80GB HBM3", "cpu_model": "AMD EPYC", "num_cores": 8}) == "h100"
    )


def test_the_readme_has_the_figures_of_the_result_files() -> None:
    assert README.read_text() == readme.with_figures(README.read_text()), WRITE


def test_a_changed_figure_changes_page_and_readme(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = {name: tables.load_results(name) for name in tables.names()}
    loaded["exactness"][readme.shown()["machines"]["exactness"]]["figures"]["mismatches"] = 3.0
    for module in (tables, readme):
        monkeypatch.setattr(module, "load_results", lambda name: loaded[name])
    text = README.read_text()
    assert "| 3 of " in readme.with_figures(text) != text
    assert re.search(r"\| `mismatches` \|.* 3 \|", tables.page("exactness"))


def test_the_picture_shows_the_figures_of_the_result_file(tmp_path: Path) -> None:
    draw_speedup(tmp_path / "speedup.svg", readme.shown_result("engine"))
    shown = picture_texts(tmp_path / "speedup.svg")
    assert f"{readme.shown_result('engine')['figures']['spec_over_plain_b1']:.2f}x" in shown
    assert picture_texts(PAGES / "speedup.svg") == shown, WRITE


def test_equal_figures_give_an_equal_picture(tmp_path: Path) -> None:
    for name in ("first.svg", "second.svg"):
        draw_speedup(tmp_path / name, readme.shown_result("engine"))
    assert (tmp_path / "first.svg").read_bytes() == (tmp_path / "second.svg").read_bytes()


def test_the_readme_is_short() -> None:
    by_hand = readme.with_figures(README.read_text(), rows=())
    assert len(by_hand.split()) <= MOST_WORDS
