"""`python -m benchmarks.pages`: writes the page of every benchmark with results, the README's rows, the picture."""

from __future__ import annotations

from benchmarks.pages.about import ABOUT, CURVE
from benchmarks.pages.picture import draw_learning_curve, draw_speedup
from benchmarks.pages.tables import HEADLINE_MACHINE, ROOT, load_results, page, with_figures


def main() -> None:
    """Write them all."""
    folder, readme = ROOT / "docs" / "benchmarks", ROOT / "README.md"
    folder.mkdir(parents=True, exist_ok=True)
    for name in filter(load_results, ABOUT):
        (folder / f"{name}.md").write_text(page(name))
    draw_speedup(folder / "speedup.svg", load_results("engine")[HEADLINE_MACHINE])
    for result in load_results(CURVE).values():
        draw_learning_curve(folder / f"{CURVE}.svg", result)
    readme.write_text(with_figures(readme.read_text()))


if __name__ == "__main__":
    main()
