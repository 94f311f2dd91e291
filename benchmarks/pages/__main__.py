"""`python -m rlhfspec.benchmarks.pages`: tables, the README's rows and pictures, from the results."""

from __future__ import annotations

from .pictures import draw_speedup
from .readme import shown_result, with_figures
from .tables import PAGES, ROOT, names, page, path_of


def main() -> None:
    """Write them all."""
    for name in names():
        path_of(name).write_text(page(name))
    draw_speedup(PAGES / "speedup.svg", shown_result("engine"))
    readme = ROOT / "README.md"
    readme.write_text(with_figures(readme.read_text()))


if __name__ == "__main__":
    main()
