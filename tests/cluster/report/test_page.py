"""`rlhfspec report`: one page of whatever a run folder has, with nothing in it that a browser would obey."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from browser import require_good_page
from made_moves import three_moves, two_instances
from made_rollouts import rollout
from made_run import change_row, make_run, run_config

from rlhfspec.cluster.cli import main
from rlhfspec.cluster.folder.iteration_logs import append_moves
from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.folder.rollouts import SCHEMA
from rlhfspec.cluster.observe.timeline import make_trace, read_trace
from rlhfspec.cluster.report.charts import draw, draw_timeline, ticks
from rlhfspec.cluster.report.samples import DRAFTED, GIVEN, OWN, accepted_depths, text_pieces
from rlhfspec.core.errors import ConfigError
from rlhfspec.core.outside import visible
from tests.conftest import TinyPair

SECTIONS = ["outcome", "timeline", "acceptance", "samples", "time"]
EVIL = "<script>alert(1)</script>\x1b]0;owned\x07\u202e\x00<img src=x onerror=alert(2)>{{ 7 * 7 }}"


@pytest.fixture(scope="module")
def made(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two iterations that drafted, a sample with words of its own mind, a timeline with moves."""
    folder = tmp_path_factory.mktemp("made")
    run = RunDir(path=make_run(run_config(tiny_pair, folder), folder / "run", is_drafted=True))
    rows = [
        {
            "iteration": i,
            "reward/mean": 0.25 + 0.5 * i,
            "rollout/response_tokens_mean": 20.0,
            "rollout/num_samples": 6,
            "rollout/mean_acceptance_length": 1.5,
            "time/generate_s": 3.0,
            "time/iteration_s": 4.0,
        }
        for i in range(2)
    ]
    run.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    evil = {"prompt": EVIL, "response": EVIL, "reward": 99.0, "draft_depths": None}
    change_row(run.path, 0, 0, lambda row: row.update(evil))
    run.trace_file(1).parent.mkdir()
    text = make_trace(two_instances(), three_moves()).text(1)
    run.trace_file(1).write_bytes(gzip.compress(text.encode()))
    append_moves(run.moves_file, 1, three_moves())
    return run.path


@pytest.fixture
def run(made: Path, tmp_path: Path) -> RunDir:
    return RunDir(path=shutil.copytree(made, tmp_path / "run"))


def page(run: RunDir, *arguments: str) -> str:
    out = run.path.parent / "page.html"
    assert main(["report", str(run.path), "--out", str(out), *arguments]) == 0
    return out.read_text()


def sections(html: str) -> list[str]:
    return re.findall(r'<section id="(\w+)">', html)


def test_a_run_of_a_record_stands_beside_the_run_that_it_is_of(run: RunDir) -> None:
    parent = RunDir(path=run.path.rename(run.path.parent / "parent"))
    shutil.copytree(parent.path, run.path)
    tree = yaml.safe_load(run.config_file.read_text())
    tree["rollout"]["record"] = str(parent.path)
    run.config_file.write_text(yaml.safe_dump(tree))
    run.metrics_file.write_text(
        parent.metrics_file.read_text().replace('"reward/mean": 0.75', '"reward/mean": 0.5')
    )
    html = page(run)
    assert (
        "mean: 0.25 at iteration 1, 0.5 at 2" in html
        and "mean of parent: 0.25 at iteration 1, 0.75 at 2" in html
    )
    shutil.rmtree(parent.path)
    assert "the run of rollout.record is not drawn: " in page(run)


def test_a_run_fills_every_section(run: RunDir) -> None:
    html = page(run)
    assert sections(html) == SECTIONS and len(html) < 100_000
    assert 'class="missing"' not in html
    assert html.count("<mark>") > 1 and "Before: iteration 1" in html and "After: iteration 2" in html
    assert html.count('marker-end="url(#tip)"') == 2 and html.count('class="move again"') == 1
    assert "What to change next</caption>" in html and "change next</th>" in html
    assert "gen-0 would finish last" in html and "1.60 x if 2 x as fast" in html


def test_nothing_of_a_text_is_obeyed_and_nothing_is_asked_for(run: RunDir) -> None:
    html = page(run)
    assert "<script" not in html and "<img" not in html and "&lt;script&gt;" in html and "{{ 7 * 7 }}" in html
    assert html == visible(html) and "\\x1b]0;owned" in html
    assert not re.search(r"""(src|href)=["'](?!#|data:,)|@import|url\((?!#)|https?:""", html)


def test_a_browser_shows_it_whole_on_a_phone_on_a_desk_and_on_paper(run: RunDir, tmp_path: Path) -> None:
    page(run)
    require_good_page(tmp_path / "page.html", tmp_path, SECTIONS)


def lose(*names: str) -> Callable[[RunDir], None]:
    def change(run: RunDir) -> None:
        for name in names:
            path = run.path / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return change


def supervised(run: RunDir) -> None:
    lose("traces", "rollouts", "moves.jsonl")(run)
    row = {"iteration": 1, "train/loss": 2.0, "train/tokens_per_s": 9.0, "time/step_s": 1.0, "eval/loss": 2.5}
    run.metrics_file.write_text(json.dumps(row) + "\n")


def plain(run: RunDir) -> None:
    for file in (run.path / "rollouts").iterdir():
        rows = pq.read_table(file).to_pylist()
        for row in rows:
            row["draft_depths"] = [0] * len(row["response_token_ids"])
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), file)


def older(run: RunDir) -> None:
    for file in (run.path / "rollouts").iterdir():
        pq.write_table(pq.read_table(file).drop_columns(["draft_depths"]), file)


MISSING: dict[str, tuple[Callable[[RunDir], None], list[str]]] = {
    "died in its first update": (
        lose("metrics.jsonl", "traces", "moves.jsonl", "checkpoints"),
        ["No iteration has finished.", "No trace of an iteration"],
    ),
    "no moves": (lose("moves.jsonl"), ["No sample moved in this iteration."]),
    "no trace": (lose("traces"), ["No trace of an iteration is in the folder."]),
    "no drafter": (plain, ["Nothing drafted was accepted", "0% of the tokens drafted"]),
    "of a version without depths": (
        older,
        ["does not tell which tokens were drafted", "is not in the folder"],
    ),
    "no tokenizer": (lose("checkpoints"), ["Before: iteration 1"]),
    "one iteration": (lose("rollouts/iteration_0001.parquet"), ["Before: iteration 1"]),
    "supervised": (supervised, ["A supervised run decodes nothing.", "training loss", "held out"]),
    "damaged": (
        lambda run: [file.write_bytes(b"PAR1 cut") for file in run.path.rglob("iteration_*")],
        ["What could not be read", "iteration_0001.json.gz cannot be read", "iteration_0000.parquet"],
    ),
    "no trace in the trace's place": (
        lambda run: run.trace_file(1).write_bytes(gzip.compress(b'{"traceEvents": [{"ph": 1}]}')),
        ["expected the trace of an iteration, got KeyError"],
    ),
    "a config of another version": (
        lambda run: run.config_file.write_text(run.config_file.read_text() + "\nkey_of_old: 1\n"),
        ["what to change next is not known", "key_of_old"],
    ),
    "resumed": (
        lambda run: shutil.copy(run.path / "owners/0001.json", run.path / "owners/0002.json"),
        ["resumed 1 times"],
    ),
}


@pytest.mark.parametrize(("change", "told"), MISSING.values(), ids=MISSING)
def test_what_a_folder_lacks_is_said_in_its_place(run: RunDir, change, told) -> None:
    change(run)
    html = page(run)
    assert set(SECTIONS) <= set(sections(html))
    for words in told:
        assert words in html


def test_a_run_without_an_iteration_gets_a_sentence_and_no_empty_page(run: RunDir, capsys) -> None:
    lose("metrics.jsonl", "traces", "rollouts", "moves.jsonl")(run)
    out = run.path.parent / "page.html"
    assert main(["report", str(run.path), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: no iteration of RLHF has finished in {run.path} (state ")
    assert error.count("\n") == 1 and not out.exists()


def test_what_is_no_run_or_no_iteration_is_refused_in_one_line(run: RunDir, capsys) -> None:
    assert main(["report", str(run.path.parent)]) == 2
    assert "is not a run folder" in capsys.readouterr().err
    assert main(["report", str(run.path), "--iteration", "1"]) == 2
    assert "has no trace of iteration 1; it has 2 to 2" in capsys.readouterr().err


def test_a_run_without_a_name_for_its_page_gets_one_in_the_current_folder(
    run: RunDir, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(run.path.parent)
    assert main(["report", "run"]) == 0
    assert Path(capsys.readouterr().out.strip()) == run.path.parent / "run-report.html"


def test_a_trace_is_read_as_it_was_written() -> None:
    trace = make_trace(two_instances(), three_moves())
    assert read_trace(trace.text(0).encode()) == trace


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"traceEvents": [[]]}', b"\xff", b"[" * 9999])
def test_what_is_no_trace_is_refused(text: bytes) -> None:
    with pytest.raises(ConfigError, match="expected the trace of an iteration"):
        read_trace(text)


def test_depths_are_shares_of_decode_steps_that_accepted_so_many() -> None:
    def of(depths: list[int], steps: int):
        completion = rollout(0, reward=0.0, response="").completion
        arrays = {"draft_depths": np.array(depths, dtype=np.uint8), "num_decode_steps": steps}
        return type(completion)(**{name: getattr(completion, name) for name in completion.__slots__} | arrays)

    # (1 2 own) (own) (1 own) and (own) (1 own)
    assert accepted_depths([of([1, 2, 0, 0, 1, 0], 3), of([0, 1, 0], 2)]) == [0.6, 0.2]
    assert accepted_depths([of([0], 1)]) == []
    assert accepted_depths([rollout(0, reward=0.0, response="").completion]) is None


def test_a_letter_of_several_tokens_is_not_cut_in_two() -> None:
    completion = rollout(0, reward=0.0, response="").completion
    letters = "aé!b".encode()
    ids = np.frombuffer(letters, dtype=np.uint8).astype(np.int64)
    arrays = {
        "token_ids": ids,
        "draft_depths": np.array([0, 1, 0, 0, 1], dtype=np.uint8),
        "sampled": np.array([True, True, True, False, True]),
    }
    made = type(completion)(**{name: getattr(completion, name) for name in completion.__slots__} | arrays)
    pieces = text_pieces(made, lambda ids: bytes(ids).decode(errors="replace"))
    assert pieces == [("a", OWN), ("é", OWN), ("!", GIVEN), ("b", DRAFTED)]


def test_a_scale_encloses_its_values_by_round_numbers() -> None:
    assert ticks(0.0, 9.0) == [0.0, 5.0, 10.0] and ticks(3.0, 3.0)[0] <= 3.0 <= ticks(3.0, 3.0)[-1]
    for low, high in ((0.1, 0.12), (-5.0, 7.0), (1e-9, 1e9), (-3e-7, -1e-7)):
        made = ticks(low, high)
        assert made[0] <= low and high <= made[-1] and 2 <= len(made) <= 7


def test_a_long_run_is_thinned_to_means_and_a_short_one_is_marked() -> None:
    chart = draw("r", {"a": [(x, x % 2) for x in range(10_000)]}, x_label="x")
    assert chart is not None
    (line,) = chart["lines"]
    assert len(line["polyline"].split()) == 200 and not line["marks"]
    one = draw("r", {"a": [(1, 5)], "b": []}, x_label="x")
    assert one is not None
    assert [(line["name"], len(line["marks"])) for line in one["lines"]] == [("a", 1)]
    assert draw("r", {"a": []}, x_label="x") is None


def test_many_instances_stay_a_page() -> None:
    spans = {f"gen-{i}": two_instances()["gen-0"] for i in range(100)}
    chart = draw_timeline(make_trace(spans), iteration=1, recomputed={})
    assert chart is not None and (len(chart["lanes"]), chart["num_left_out"], len(chart["rows"])) == (
        64,
        36,
        100,
    )
    assert {row[1] for row in chart["rows"]} == {"100%"} and chart["most_samples"] == 4
