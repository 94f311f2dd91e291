"""`rlhfspec diagnose` finds a run's processes and looks into them from outside, frozen ones too. No Ray."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from live_pages import NOW, PAGE

from rlhfspec.cluster.cli import main
from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.observe import processes as stacks
from rlhfspec.cluster.observe.diagnosis import Diagnosis, diagnose_here
from rlhfspec.cluster.observe.processes import SeenProcess, by_signal, is_stopped, parse_faulthandler
from rlhfspec.cluster.observe.status_text import where
from rlhfspec.cluster.placement.origin import ROOT
from rlhfspec.core.config import Config

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux only")

RUN = f"a-run-of-{os.getpid()}"
ACTOR = """
import sys, time
from rlhfspec.actors.waiting.stack_page import begin_stack_page, end_stack_page
begin_stack_page({run!r}, sys.argv[1])
if sys.argv[1] == "deaf":
    import signal
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
def wait_for_the_trainer():
    print("ready", flush=True)
    time.sleep(600)
wait_for_the_trainer()
"""
Start = Callable[[str], subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start an actor of the run, without Ray."""
    children: list[subprocess.Popen[str]] = []

    def make(actor: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-c", ACTOR.format(run=RUN), actor]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        child = subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True)
        children.append(child)
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        return child

    yield make
    for child in children:
        child.kill()
        child.communicate()


def stop(child: subprocess.Popen[str]) -> None:
    """Freeze it, and wait until it stands still."""
    child.send_signal(signal.SIGSTOP)
    ends = time.monotonic() + 60
    while not is_stopped(child.pid):
        assert time.monotonic() < ends
        time.sleep(0.01)


def of(diagnosis: Diagnosis, actor: str) -> SeenProcess:
    (found,) = [one for one in diagnosis.processes if one.actor == actor]
    return found


@pytest.fixture(params=["by py-spy where it is there", "without py-spy"])
def with_or_without(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "without py-spy":
        monkeypatch.setattr(stacks, "by_py_spy", lambda pid, timeout_s: ())
    return request.param == "without py-spy"


def test_every_process_is_found_and_a_frozen_one_is_named_and_holds_nobody_up(
    start: Start, with_or_without: bool
) -> None:
    busy, frozen = start("gen-0"), start("trainer")
    stop(frozen)
    page = replace(PAGE, run=RUN, host=os.uname().nodename)
    diagnosis = diagnose_here(RUN, page, timeout_s=60.0)
    assert {one.actor: one.pid for one in diagnosis.processes} == {"gen-0": busy.pid, "trainer": frozen.pid}
    functions = [frame.function for stack in of(diagnosis, "gen-0").stacks for frame in stack.frames]
    assert "wait_for_the_trainer" in functions
    assert of(diagnosis, "gen-0").own_bytes > 1 << 20 and not of(diagnosis, "gen-0").is_stopped
    assert of(diagnosis, "trainer").is_stopped
    if with_or_without:
        assert of(diagnosis, "trainer").stacks == ()
    (line,) = diagnosis.silent
    assert line.endswith(f"is stopped: kill -CONT {frozen.pid} lets it go on") and "trainer" in line


def test_a_process_that_does_not_hear_the_signal_is_left_alone(start: Start) -> None:
    child = start("deaf")
    why = by_signal(child.pid, Path(f"/proc/{child.pid}/fd/0"), timeout_s=60.0)
    assert why == "it does not answer the signal for stacks" and child.poll() is None


def test_stacks_can_be_asked_for_again_and_again(start: Start) -> None:
    child = start("gen-0")
    pages = Path(f"/proc/{child.pid}/fd").iterdir()
    (page,) = [link for link in pages if "memfd" in os.readlink(link)]
    for _ in range(2):
        seen = by_signal(child.pid, page, timeout_s=60.0)
        assert not isinstance(seen, str) and len(seen) == 1
        assert [frame.function for frame in seen[0].frames] == ["wait_for_the_trainer", "<module>"]


def test_an_instance_that_serves_and_has_no_process_here_is_named() -> None:
    page = replace(PAGE, run="no-such-run", host=os.uname().nodename)
    assert diagnose_here("no-such-run", page).silent == (f"gen-0 has no process on {page.host}",)
    assert diagnose_here("no-such-run", replace(page, ended=True)).silent == ()


def test_a_thread_is_where_it_left_our_code() -> None:
    told = """Current thread 0x00007f (most recent call first):
  File "/x/site-packages/actors/y.py", line 3 in wait
  File "/x/pkg/actors/waiting/waiting.py", line 57 in _get_awake
  File "/x/pkg/cluster/run/loop.py", line 190 in run_iteration

Thread 0x00008f (most recent call first):
  File "/x/pkg/actors/waiting/vitals.py", line 30 in tell
"""
    first, second = parse_faulthandler(told)
    assert where(first) == "cluster/run/loop.py:190 run_iteration calls wait"
    assert where(second) is None


def test_the_command_says_who_waits_where_everyone_is_and_what_was_decided(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = {"data": {"task": "chain"}, "speculation": {"drafter": "none"}}
    run_dir = RunDir.create(Config.model_validate(tree), tmp_path / RUN)
    row = replace(PAGE.instances[0], draft="24 nodes, depth 4, width 2: best goodput")
    page = replace(PAGE, run=RUN, instances=(row,), moves=PAGE.events, host=os.uname().nodename)
    run_dir.live_file.write_bytes(replace(page, told_at=NOW).encode())
    child = start("gen-0")
    assert main(["diagnose", str(run_dir.path), "--stacks"]) == 0
    shown = capsys.readouterr().out
    for words in (
        "the loop for trainer to 'update'",
        f"{child.pid}",
        "drafts 24 nodes",
        "wait_for_the_trainer",
    ):
        assert words in shown
    assert main(["diagnose", str(run_dir.path), "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert told["page"]["waits"][0]["waited_for"] == "trainer"
    assert [one["pid"] for one in told["nodes"][0]["processes"]] == [child.pid]
