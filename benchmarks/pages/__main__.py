"""`python -m benchmarks.pages`: writes the tables of every page, the README's rows, the pictures."""

from __future__ import annotations

from benchmarks.pages.tables import (
    HEADLINE_MACHINE,
    PAGES,
    ROOT,
    draw_learning_curve,
    draw_speedup,
    load_results,
    names,
    page,
    with_figures,
)


def main() -> None:
    """Write them all."""
    for name in names():
        (PAGES / f"{name}.md").write_text(page(name))
    draw_speedup(PAGES / "speedup.svg", load_results("engine")[HEADLINE_MACHINE])
    for result in load_results("learning_curve").values():
        draw_learning_curve(PAGES / "learning_curve.svg", result)
    readme = ROOT / "README.md"
    readme.write_text(with_figures(readme.read_text()))


if __name__ == "__main__":
    main()
