"""The documentation names files, functions and settings that exist."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from rlhfspec.benchmarks.pages import site
from rlhfspec.benchmarks.pages.reference import COMMAND, pages
from rlhfspec.core.settings.algorithm import ALGORITHMS, AlgorithmConfig
from rlhfspec.core.settings.correction import CORRECTIONS, CorrectionConfig

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = (
    "core",
    "profiles",
    "policies",
    "engine",
    "learning",
    "actors",
    "cluster",
    "integrations",
    "benchmarks",
    "tests",
)
PATH = re.compile(
    r"`((?:core|profiles|policies|engine|learning|actors|cluster|integrations|benchmarks|configs|deploy|docs)/[\w./-]*)"
)
SECTION = re.compile(r"\bdesign((?:,? (?:and )?\d+\.\d+)+)")
MEMBER = re.compile(rf"`((?:{'|'.join(SOURCES)})/[\w/]+\.py):(\w+)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_named_in_a_page_exists(page: Path) -> None:
    missing = [path for path in PATH.findall(page.read_text()) if not (ROOT / path).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_function_named_in_a_page_exists(page: Path) -> None:
    members = MEMBER.findall(page.read_text())
    assert page.name != "papers.md" or len(members) > 20
    missing = [
        f"{path}:{name}"
        for path, name in members
        if not re.search(rf"^\s*(def|class) {name}\b", (ROOT / path).read_text(), re.MULTILINE)
    ]
    assert not missing


def test_every_design_section_named_exists() -> None:
    design = (ROOT / "docs" / "developers" / "design.md").read_text()
    headings = set(re.findall(r"^#+ (\d+\.\d+) ", design, re.MULTILINE))
    sources = [path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")]
    named = [
        (str(path.relative_to(ROOT)), section)
        for path in [*sources, *PAGES]
        for numbers in SECTION.findall(path.read_text())
        for section in re.findall(r"\d+\.\d+", numbers)
    ]
    assert len(named) > 30
    assert [place for place in named if place[1] not in headings] == []


def rows_of_kinds(last_column: str) -> list[list[str]]:
    """Rows of the table in docs/reference/algorithms.md whose last column has this title."""
    text = (ROOT / "docs" / "reference" / "algorithms.md").read_text()
    table = re.search(rf"^\| kind \|.*\| {last_column} \|\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert table is not None
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1].splitlines()]


def test_the_table_of_corrections_is_that_of_the_code() -> None:
    rows = {kind: shown for kind, *shown, _ in rows_of_kinds("elsewhere")}
    assert rows.keys() == CORRECTIONS.keys()
    for kind, shown in rows.items():
        correction = CorrectionConfig.model_validate({"kind": kind})
        low, high = correction.band
        written = "1/1.01 to 1.01" if low == 1 / 1.01 else f"{low} to {high}"
        assert shown == [
            correction.weight,
            "" if correction.weight == "none" else str(correction.weight_cap or "none"),
            correction.mask,
            written if correction.mask != "none" else "",
        ]


def test_the_table_of_algorithms_is_that_of_the_code() -> None:
    rows = rows_of_kinds("dynamic_sampling")
    assert [row[0] for row in rows] == list(ALGORITHMS)
    for kind, *shown in rows:
        algorithm = AlgorithmConfig.model_validate({"kind": kind})
        kl = f"{algorithm.kl_coef} {algorithm.kl_estimator} {algorithm.kl_placement}"
        assert shown == [
            algorithm.advantage,
            algorithm.ratio_level,
            algorithm.policy_loss,
            f"{algorithm.clip_ratio}, {algorithm.upper_clip}",
            algorithm.loss_aggregation,
            kl if algorithm.kl_coef else "none",
            "yes" if algorithm.dynamic_sampling else "no",
        ]


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs" / "decisions").glob("*.md")), ids=lambda page: page.name
)
def test_a_decision_is_one_page(page: Path) -> None:
    assert len(page.read_text().split()) <= 600


@pytest.mark.parametrize("name", sorted(pages()))
def test_a_reference_page_is_what_the_code_says(name: str) -> None:
    written = (ROOT / "docs" / "reference" / name).read_text()
    assert written == pages()[name], f"out of date: {COMMAND}"


LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """What a link can name of a page: its headings, as GitHub and the site write them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        place, _, anchor = link.partition("#")
        if "://" in place or place.startswith("mailto:"):
            continue
        there = (page.parent / place).resolve() if place else page
        assert there.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in anchors(there), f"{page.name} links to {link}"


def test_every_page_has_a_place_in_the_site() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = re.findall(r"[\w/-]+\.md", str(site["nav"]))
    there = [str(page.relative_to(ROOT / "docs")) for page in sorted((ROOT / "docs").rglob("*.md"))]
    assert sorted(listed) == [page for page in there if not page.startswith("log/")], "list it in mkdocs.yml"


QUOTED = re.compile(r"^\| (`.+?`(?: \.\.\. `.+?`)*)", re.MULTILINE)


def test_the_messages_that_are_explained_are_those_of_the_code() -> None:
    sources = [path.read_text() for folder in SOURCES[:7] for path in (ROOT / folder).rglob("*.py")]
    text = re.sub(r'"\s*\n\s*f?"', "", "\n".join(sources))
    quoted = QUOTED.findall((ROOT / "docs" / "how-to" / "errors.md").read_text())
    assert len(quoted) > 20
    assert [part for row in quoted for part in row.strip("`").split("` ... `") if part not in text] == []


GENERATED = re.compile(r"<!-- (?:tables|figures): .*?-->.*?<!-- end of \w+ -->", re.DOTALL)
MAX_WORDS = 24_800
"Written by hand, beside decisions, papers, notebooks and what is generated."
MAX_PAGE_WORDS = 1_500


def written_words(page: Path) -> int:
    """Words of a page that somebody wrote: without code, marks, and tables that a benchmark wrote."""
    text = re.sub(r"^```.*?^```$", "", GENERATED.sub("", page.read_text()), flags=re.MULTILINE | re.DOTALL)
    return sum(1 for word in text.split() if any(letter.isalnum() for letter in word))


def test_the_documentation_is_short_enough_to_be_read() -> None:
    made = {*pages(), "models.md"}
    by_hand = {
        str(page.relative_to(ROOT / "docs")): written_words(page)
        for page in (ROOT / "docs").rglob("*.md")
        if page.parent.name not in ("decisions", "log") and page.name != "papers.md"
        if not (page.parent.name == "reference" and page.name in made)
    }
    assert written_words(ROOT / "README.md") <= 700
    assert {name: number for name, number in by_hand.items() if number > MAX_PAGE_WORDS} == {}
    assert sum(by_hand.values()) <= MAX_WORDS, sorted(by_hand.items(), key=lambda item: -item[1])


def test_a_change_is_one_short_line_of_the_changelog() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    changes = [line for line in lines[lines.index("## [Unreleased]") :] if line and not line.startswith("#")]
    assert [line for line in changes if not line.startswith("- ") or len(line) > 160] == []


def test_the_site_has_every_page_as_markdown_and_a_list_of_them(tmp_path: Path) -> None:
    """As `mkdocs build` calls the hook; mkdocs itself is not needed for the tests."""
    pages_there = ["index.md", "how-to/gpus.md", "how-to/lora.md"]
    how_to = SimpleNamespace(title="How to")
    nav = [
        SimpleNamespace(
            title=source.removesuffix(".md"),
            parent=how_to if "/" in source else None,
            file=SimpleNamespace(src_uri=source, abs_src_path=str(ROOT / "docs" / source)),
        )
        for source in pages_there
    ]
    config = SimpleNamespace(site_dir=str(tmp_path), site_name="name", site_description="what", extra={})
    site.on_nav(SimpleNamespace(pages=nav), config, None)
    site.on_post_build(config)
    listed = (tmp_path / "llms.txt").read_text()
    assert listed.startswith(
        "# name\n\n> what\n\n## Start\n\n- [index](index.md)\n\n## How to\n\n- [how-to/gpus]"
    )
    for source in pages_there:
        assert f"({source})" in listed
        assert (tmp_path / source).read_text() == (ROOT / "docs" / source).read_text()
