"""`python -m benchmarks.pages`: writes the tables of every page, the README's rows, the pictures, from the results."""

from __future__ import annotations

from benchmarks.pages.pictures import draw_speedup
from benchmarks.pages.readme import shown_result, with_figures
from benchmarks.pages.tables import PAGES, ROOT, names, page


def main() -> None:
    """Write them all."""
    for name in names():
        (PAGES / f"{name}.md").write_text(page(name))
    draw_speedup(PAGES / "speedup.svg", shown_result("engine"))
    readme = ROOT / "README.md"
    readme.write_text(with_figures(readme.read_text()))


if __name__ == "__main__":
    main()
