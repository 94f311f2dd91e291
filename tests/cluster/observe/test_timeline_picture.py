"""The picture of a timeline: the lanes asked for, an arrow a journey, a PNG on disk."""

from __future__ import annotations

from pathlib import Path

from made_moves import span, three_moves, two_instances
from matplotlib.text import Annotation

from rlhfspec.cluster.observe.pictures import draw_timeline, write_timeline_picture
from rlhfspec.cluster.observe.timeline import build_timeline


def drawn(spans, moves=()):
    (axes,) = draw_timeline(build_timeline(spans, moves), title="t").axes
    return axes


def test_each_instance_has_a_lane_that_says_how_busy_it_was() -> None:
    axes = drawn(two_instances(), three_moves())
    assert [label.get_text() for label in axes.get_yticklabels()] == ["gen-0\n80% busy", "gen-1\n70% busy"]
    assert axes.get_xlim() == (0.0, 10.0)
    top, bottom = axes.get_ylim()[1], axes.get_ylim()[0]
    assert top < 0 and bottom > 1, "the first lane is at the top, and both can be seen"


def test_each_journey_is_an_arrow_from_lane_to_lane_and_a_move_that_came_to_nothing_is_none() -> None:
    axes = drawn(two_instances(), three_moves())
    arrows = [child for child in axes.get_children() if isinstance(child, Annotation)]
    assert [(arrow.xyann, arrow.xy) for arrow in arrows] == [((5.0, 0), (6.25, 1)), ((8.0, 0), (9.0, 1))]


def test_the_file_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "timeline.png"
    write_timeline_picture(build_timeline(two_instances(), three_moves()), path, title="t")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_pool_that_did_nothing_and_one_of_sixty_four_can_be_drawn(tmp_path: Path) -> None:
    many = {f"gen-{n}": [span("step", n / 64, 1.0, num_samples=n)] for n in range(64)}
    for number, spans in enumerate(({"gen-0": []}, {}, many)):
        path = tmp_path / f"{number}.png"
        write_timeline_picture(build_timeline(spans), path)
        assert path.read_bytes().startswith(b"\x89PNG")
