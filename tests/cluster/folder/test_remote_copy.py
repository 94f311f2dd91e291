"""A copy holds what the folder holds, never half a state, and comes back as a run that can be gone on with."""

from __future__ import annotations

import shutil
from pathlib import Path

import fsspec
import pytest

from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.folder.remote_copy import RemoteCopy, copying, fetch_newest, fetch_run, require_place
from rlhfspec.core.checkpoint_manifest import MANIFEST, verify_checkpoint, write_manifest
from rlhfspec.core.config_io import config_from_dict
from rlhfspec.core.errors import ConfigError, RunTaken

CONFIG = config_from_dict({"models": {"target": "a", "draft": "b"}, "data": {"task": "chain"}})
PLACE = "memory://bucket/runs"


@pytest.fixture(autouse=True)
def empty_bucket():
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir.create(CONFIG, tmp_path / "here" / "demo-20260101-120000")
    run_dir.metrics_file.write_text('{"iteration": 0}\n')
    return run_dir


def state(run_dir: RunDir, number: int) -> Path:
    folder = run_dir.checkpoint_dir("state", number)
    (folder / "trainer").mkdir(parents=True)
    (folder / "trainer" / "weights").write_bytes(bytes([number]) * 10)
    write_manifest(folder, model="state", weight_version=number, parameter_checksum="ab")
    return folder


def copied() -> set[str]:
    root = "/bucket/runs/demo-20260101-120000/"
    return {name.removeprefix(root) for name in fsspec.filesystem("memory").find(root)}


def test_a_copy_follows_the_folder_and_comes_back_whole(run_dir: RunDir, tmp_path: Path) -> None:
    first = state(run_dir, 1)
    (run_dir.path / ".partial-x").write_text("half")
    copy = RemoteCopy(run_dir, PLACE, print)
    assert copy.bring_up_to_date()
    shutil.rmtree(first)
    state(run_dir, 2)
    run_dir.metrics_file.write_text('{"iteration": 0}\n{"iteration": 1}\n')
    assert copy.bring_up_to_date()
    expected = {"config.yaml", "status.json", "metrics.jsonl", "owners/0001.json"}
    expected |= {f"checkpoints/state_0002/{name}" for name in ("trainer/weights", MANIFEST)}
    assert copied() == expected
    on_disk = RemoteCopy(run_dir, f"file://{tmp_path}/disk", print)
    assert on_disk.bring_up_to_date()
    assert verify_checkpoint(fetch_run(on_disk.url, tmp_path / "back", print) / "checkpoints" / "state_0002")
    back = fetch_run(copy.url, tmp_path / "there", print)
    assert verify_checkpoint(back / "checkpoints" / "state_0002")["weight_version"] == 2
    assert (back / "metrics.jsonl").read_text() == run_dir.metrics_file.read_text()


def test_a_run_folder_that_vanishes_does_not_take_its_copy_with_it(run_dir: RunDir) -> None:
    state(run_dir, 1)
    notes: list[str] = []
    copy = RemoteCopy(run_dir, PLACE, notes.append)
    assert copy.bring_up_to_date()
    before = copied()
    shutil.rmtree(run_dir.path)
    assert not copy.bring_up_to_date() and copied() == before
    assert "config.yaml is gone from it; the copy stays as it is" in notes[0]


def test_the_first_of_two_machines_that_copy_one_run_ends(run_dir: RunDir, tmp_path: Path) -> None:
    silent = RemoteCopy(run_dir, PLACE, print)
    silent.claim()
    state(run_dir, 1)
    assert silent.bring_up_to_date()
    other = RunDir.open(fetch_run(silent.url, tmp_path / "there", print))
    assert other.owner.claim(after=other.owner.last())
    copy = RemoteCopy(other, PLACE, print)
    copy.claim()
    state(run_dir, 2)
    assert not silent.bring_up_to_date() and copy.bring_up_to_date()
    with pytest.raises(RunTaken, match="taken up by another process, which copies it to memory://"):
        run_dir.owner.require()
    assert not any("state_0002" in name for name in copied())


def test_of_two_machines_that_resume_one_copy_the_last_goes_on(run_dir: RunDir, tmp_path: Path) -> None:
    copy = RemoteCopy(run_dir, PLACE, print)
    assert copy.bring_up_to_date()
    both = [RunDir.open(fetch_run(copy.url, tmp_path / where, print)) for where in ("a", "b")]
    copies = [RemoteCopy(one, PLACE, print) for one in both]
    for one, its_copy in zip(both, copies, strict=True):
        assert one.owner.claim(after=1)
        its_copy.claim()
    assert [its_copy.bring_up_to_date() for its_copy in copies] == [True, False]
    both[0].owner.require()
    with pytest.raises(RunTaken):
        both[1].owner.require()


def test_a_folder_that_another_machine_has_gone_beyond_is_moved_aside_and_harms_no_copy(
    run_dir: RunDir, tmp_path: Path
) -> None:
    state(run_dir, 1)
    assert RemoteCopy(run_dir, PLACE, print).bring_up_to_date()
    there = RunDir.open(fetch_run(f"{PLACE}/{run_dir.path.name}", tmp_path / "there", print))
    assert there.owner.claim(after=1)
    state(there, 2)
    ahead = RemoteCopy(there, PLACE, print)
    ahead.claim()
    assert ahead.bring_up_to_date()
    # the first machine comes back, and is told to go on with what it has
    old = RunDir.open(run_dir.path)
    assert old.owner.claim(after=1)
    behind, before = RemoteCopy(old, PLACE, print), copied()
    behind.claim()
    assert not behind.bring_up_to_date() and copied() == before
    with pytest.raises(RunTaken):
        old.owner.require()
    # or to go on with the newest
    notes: list[str] = []
    fetch_newest(PLACE, "demo", run_dir.path.parent, notes.append)
    assert (run_dir.path / "checkpoints" / "state_0002").is_dir()
    (aside,) = run_dir.path.parent.glob(".behind-*")
    assert (aside / "checkpoints" / "state_0001").is_dir() and "another machine has gone on" in notes[0]
    # and what is not behind stays
    fetch_newest(PLACE, "demo", run_dir.path.parent, notes.append)
    assert "is there already" in notes[-1]


@pytest.mark.parametrize(
    "place", [".", "demo-20260101-120000", "demo-20260101-120000/copies", "file://{here}"]
)
def test_a_copy_into_the_run_folder_itself_is_refused(run_dir: RunDir, place: str) -> None:
    here = run_dir.path.parent
    named = place.format(here=here) if "{" in place else str(here / place)
    with pytest.raises(ConfigError, match=r"into itself; expected a place beside .* --resume file:///"):
        require_place(named, run_dir.path)
    require_place(str(here.parent / "copies"), run_dir.path)
    require_place(PLACE, run_dir.path)


@pytest.mark.parametrize("place", ["/proc/copies", "file:///proc/copies/of/runs", "{file}/copies"])
def test_a_place_that_can_never_be_written_is_refused_at_the_start(
    run_dir: RunDir, tmp_path: Path, place: str
) -> None:
    file = tmp_path / "file"
    file.touch()
    named = place.format(file=file)
    with pytest.raises(
        ConfigError, match=rf"run\.copy_to {named}: no folder can be made there: .*; name a place"
    ):
        require_place(named, run_dir.path)
    there = tmp_path / "copies"
    require_place(str(there), run_dir.path)
    assert not there.exists(), "nothing is left of the try"


@pytest.mark.parametrize("is_fetched", [False, True], ids=["here", "on another machine"])
def test_a_resumed_run_sends_what_changed_and_removes_what_the_rewind_took(
    run_dir: RunDir, tmp_path: Path, is_fetched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    state(run_dir, 1), state(run_dir, 2)
    first = RemoteCopy(run_dir, PLACE, pytest.fail)
    assert first.bring_up_to_date()
    if is_fetched:
        run_dir = RunDir.open(fetch_run(first.url, tmp_path / "there", print))
    # what a rewind and a new iteration do: the same size, another content
    shutil.rmtree(run_dir.checkpoint_dir("state", 2))
    (run_dir.checkpoint_dir("state", 1) / "trainer" / "weights").write_bytes(bytes([7]) * 10)
    again = RemoteCopy(run_dir, PLACE, pytest.fail)
    put, sent = again._fs.put_file, []

    def put_file(here: str, there: str) -> None:
        sent.append(there.removeprefix("/bucket/runs/demo-20260101-120000/"))
        put(here, there)

    monkeypatch.setattr(again._fs, "put_file", put_file)
    assert again.bring_up_to_date()
    assert sent == ["checkpoints/state_0001/trainer/weights"]
    assert not [name for name in copied() if "state_0002" in name]
    assert again._fs.cat("/bucket/runs/demo-20260101-120000/" + sent[0]) == bytes([7]) * 10


def test_what_another_wrote_at_the_copy_or_went_from_there_is_sent_again(run_dir: RunDir) -> None:
    state(run_dir, 1)
    assert RemoteCopy(run_dir, PLACE, pytest.fail).bring_up_to_date()
    whole, root = copied(), "/bucket/runs/demo-20260101-120000/"
    bucket = fsspec.filesystem("memory")
    bucket.rm_file(root + "config.yaml")
    # of the same size: another process has copied its own there
    bucket.pipe(root + "metrics.jsonl", b"x" * run_dir.metrics_file.stat().st_size)
    assert RemoteCopy(run_dir, PLACE, pytest.fail).bring_up_to_date()
    assert copied() == whole and bucket.cat(root + "metrics.jsonl") == run_dir.metrics_file.read_bytes()


def test_a_run_that_has_sent_nothing_removes_nothing_of_what_is_there(run_dir: RunDir) -> None:
    fsspec.filesystem("memory").pipe("/bucket/runs/demo-20260101-120000/of_another", b"x")
    assert RemoteCopy(run_dir, PLACE, pytest.fail).bring_up_to_date()
    assert "of_another" in copied()


def test_a_state_s_manifest_goes_last_so_that_half_of_one_is_none(run_dir: RunDir, monkeypatch) -> None:
    state(run_dir, 1)
    notes: list[str] = []
    copy = RemoteCopy(run_dir, PLACE, notes.append)
    put = copy._fs.put_file

    def cut_off(here: str, there: str) -> None:
        if here.endswith(MANIFEST):
            raise OSError("the network is gone")
        put(here, there)

    monkeypatch.setattr(copy._fs, "put_file", cut_off)
    assert not copy.bring_up_to_date() and not copy.bring_up_to_date()
    assert "checkpoints/state_0001/trainer/weights" in copied()
    assert not any(name.endswith(MANIFEST) for name in copied())
    assert len(notes) == 1 and "the network is gone; it is tried again" in notes[0]
    monkeypatch.undo()
    assert copy.bring_up_to_date() and f"checkpoints/state_0001/{MANIFEST}" in copied()


def test_what_a_run_ended_with_is_in_the_copy_however_it_ended(run_dir: RunDir) -> None:
    with pytest.raises(KeyboardInterrupt), copying(run_dir, PLACE, print):
        run_dir.metrics_file.write_text("last")
        raise KeyboardInterrupt
    assert fsspec.filesystem("memory").cat("/bucket/runs/demo-20260101-120000/metrics.jsonl") == b"last"


def test_the_newest_copy_is_fetched_unless_the_machine_has_one_as_new(
    run_dir: RunDir, tmp_path: Path
) -> None:
    RemoteCopy(run_dir, PLACE, print).bring_up_to_date()
    fetch_newest(PLACE, "demo", tmp_path / "there", print)
    assert (tmp_path / "there" / run_dir.path.name / "config.yaml").is_file()
    newer = tmp_path / "other" / "demo-20260202-120000"
    newer.mkdir(parents=True)
    fetch_newest(PLACE, "demo", newer.parent, print)
    assert [path.name for path in newer.parent.iterdir()] == [newer.name]
    fetch_newest("memory://nothing", "demo", tmp_path / "empty", print)
    assert not (tmp_path / "empty").exists()


@pytest.mark.parametrize(
    ("url", "said"),
    [("memory://bucket/none", "holds no run"), ("nosuch://x/y", "cannot be used")],
)
def test_what_is_no_copy_is_refused(tmp_path: Path, url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        fetch_run(url, tmp_path, print)
    assert not list(tmp_path.iterdir())
