"""`rlhfspec status` shows what a run told last, and says when that is old. No Ray."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from live_pages import NOW, PAGE

from rlhfspec.cluster.cli import main
from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.observe.live_page import STALE_AFTER_S, STARTING, LivePage
from rlhfspec.cluster.observe.status_text import page_lines, stale_lines
from rlhfspec.core.config import Config


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    tree = {
        "run": {"output_dir": str(tmp_path / "runs")},
        "data": {"task": "chain"},
        "speculation": {"drafter": "none"},
    }
    run_dir = RunDir.create(Config.model_validate(tree))
    run_dir.live_file.write_bytes(PAGE.encode())
    return run_dir


def test_a_page_is_read_as_it_was_written() -> None:
    assert LivePage.decode(PAGE.encode()) == PAGE


@pytest.mark.parametrize("text", [b"", b"{}", b"[1]", b"null", PAGE.encode()[:-9], b'{"instances": 3}'])
def test_a_damaged_page_is_none(text: bytes) -> None:
    assert LivePage.decode(text) is None


def test_status_shows_where_the_run_is_for_whom_it_waits_and_what_happened(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", str(run_dir.path)]) == 0
    shown = capsys.readouterr().out
    for word in (
        "state running",
        "iteration 3 of 5: generate 12 of 64",
        "reward 0.250",
        "gen-0",
        "training 12 s",
        "the loop for trainer to 'update'",
        "instance gen-1 was lost",
    ):
        assert word in shown
    # the page is years old, whatever status.json says
    assert "stale" in shown


def test_ranks_are_shown_where_an_instance_has_several(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    for num_ranks in (1, 2):
        first, *others = PAGE.instances
        page = replace(PAGE, instances=(replace(first, num_ranks=num_ranks), *others))
        run_dir.live_file.write_bytes(page.encode())
        main(["status", str(run_dir.path)])
        lines = capsys.readouterr().out.splitlines()
        (header,) = [line for line in lines if line.startswith("name")]
        (row,) = [line for line in lines if line.startswith("gen-0")]
        assert ("ranks" in header) == (num_ranks == 2)
        assert row.split()[4] == ("2" if num_ranks == 2 else "3")


def test_only_an_old_page_of_a_run_that_has_not_ended_is_stale() -> None:
    assert stale_lines(PAGE, NOW + STALE_AFTER_S) == []
    assert "told nothing for 10 min (process 7 on node)" in stale_lines(PAGE, NOW + 600.0)[0]
    assert stale_lines(replace(PAGE, ended=True), NOW + 600.0) == []


def test_without_a_name_the_newest_run_is_shown(
    run_dir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["iteration"] == 2
    monkeypatch.chdir(run_dir.path)
    assert main(["status"]) == 2
    assert "no run to look at" in capsys.readouterr().err


def test_a_run_without_a_page_still_has_its_state(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir.live_file.unlink()
    run_dir.set_status("failed", "the disk is full")
    assert main(["status", str(run_dir.path)]) == 0
    shown = capsys.readouterr().out
    assert "state failed: the disk is full" in shown and "no live.json" in shown


def test_of_a_run_that_has_ended_is_said_where_and_nothing_goes_on(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    first = replace(PAGE, iteration=0, phase=STARTING, done=0, total=0, waits=())
    run_dir.live_file.write_bytes(first.encode())
    assert "iteration 1 of 5: starting for 4 s" in page_lines(first, NOW)[1]
    run_dir.set_status("failed", "no place for trainer-0")
    assert main(["status", str(run_dir.path)]) == 0
    shown = capsys.readouterr().out
    assert "iteration none begun: it ended while it was starting, after 4 s" in shown
    assert "starting for" not in shown and "last progress" not in shown
    later = page_lines(replace(PAGE, ended=True), NOW + 600.0)[1]
    assert later == "iteration 3 of 5: ended in generate 12 of 64, after 4 s"
