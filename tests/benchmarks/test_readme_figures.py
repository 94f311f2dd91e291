"""The README's figures: of a commit that the history has, of the engine of today or said to be of another."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from rlhfspec.benchmarks.pages import measure, readme
from rlhfspec.benchmarks.pages.readme import (
    ROWS,
    commits_behind,
    has_history,
    shown,
    shown_commits,
    wrong_commits,
)
from rlhfspec.benchmarks.pages.tables import ROOT
from rlhfspec.core.errors import InputError

README = ROOT / "README.md"


def test_shown_figures_are_of_the_engine_of_today_or_say_of_which() -> None:
    if not has_history():
        pytest.skip("this checkout has no history (a shallow clone, or no git): ages of figures are unknown")
    told = wrong_commits(README.read_text(), shown_commits())
    assert not told, f"{told}; run: make bench-readme, or say what changed since in {readme.SHOWN}"


def test_nothing_is_said_of_commits_that_are_not_shown() -> None:
    assert shown()["before"].keys() <= {*shown_commits()}
    assert shown()["machines"].keys() <= {row.result for row in ROWS}


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(["git", *who, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A checkout whose engine changed for the last time in its second last commit; all commits, oldest first."""
    folder = tmp_path_factory.mktemp("history")
    git(folder, "init", "-q")
    (folder / "engine").mkdir()
    commits = []
    for number, name in enumerate(("engine/a", "b", "engine/a", "b")):
        (folder / name).write_text(str(number))
        git(folder, "add", ".")
        git(folder, "commit", "-qm", name)
        commits.append(git(folder, "rev-parse", "--short", "HEAD"))
    return folder, commits


def test_age_is_counted_to_the_last_change_of_the_engine(history: tuple[Path, list[str]]) -> None:
    folder, commits = history
    assert [commits_behind(commit, root=folder) for commit in commits] == [2, 1, 0, 0]
    assert commits_behind("abcdef0", root=folder) is None
    assert commits_behind(f"{commits[-1]}-dirty", root=folder) is None


def test_an_old_or_unknown_commit_is_told_unless_the_readme_says_so(
    history: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, (old, older_still_good, *_, newest) = history
    monkeypatch.setattr(readme, "MOST_COMMITS", 1)
    shown_ones = [old, older_still_good, newest, "abcdef0"]
    assert wrong_commits("", shown_ones, root=folder) == [
        f"{old} is 2 commits older than the engine, at most 1 are",
        "abcdef0 is no commit of the history",
    ]
    assert wrong_commits(f"Measured at 1234567, {old}, before x.", shown_ones[:3], root=folder) == []
    assert wrong_commits(f"Measured at {old}; at 1234567, before x.", [old], root=folder) != []


def test_a_shallow_clone_has_no_history(history: tuple[Path, list[str]], tmp_path: Path) -> None:
    git(tmp_path, "clone", "-q", "--depth=1", f"file://{history[0]}", "shallow")
    assert has_history(history[0])
    assert not has_history(tmp_path / "shallow")
    assert not has_history(tmp_path)


def test_new_results_are_filed_with_their_machine_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, told = tmp_path / "results", tmp_path / "results" / "readme.json"
    results.mkdir()
    told.write_text(json.dumps({"machines": {"exactness": "old-1c"}, "before": {"aaa": "x", "bbb": "y"}}))
    for name, value in {"RESULTS": results, "SHOWN": told}.items():
        monkeypatch.setattr(measure, name, value)
    monkeypatch.setattr(readme, "SHOWN", told)
    monkeypatch.setattr("rlhfspec.benchmarks.pages.tables.RESULTS", results)
    made = tmp_path / "exactness.json"
    provenance = {"cpu_model": "New CPU", "num_cores": 2, "commit": "bbb", "date": "2026-01-02"}
    made.write_text(json.dumps({"figures": {"samples": 3.0}, "intervals": {}, "provenance": provenance}))
    measure.file_results({"exactness": made})
    assert json.loads(told.read_text()) == {"machines": {"exactness": "new-2c"}, "before": {"bbb": "y"}}
    assert readme.shown_result("exactness")["figures"] == {"samples": 3.0}
    assert measure.show({"exactness": made}) == ["mismatches", "tokens"]


def test_changes_that_no_commit_holds_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "checked_out_commit", lambda: "abc-dirty")
    with pytest.raises(InputError, match="expected a checkout without changes, got abc-dirty"):
        measure.main([])
