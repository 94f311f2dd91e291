"""The recorder over real actors: who answers is recorded, who does not is left out and named."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from made_moves import move, three_moves, two_instances

from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.observe.console import Reporter
from rlhfspec.cluster.observe.timeline import write_kept_trace
from rlhfspec.cluster.run import recorder as recorder_module
from rlhfspec.cluster.run.recorder import Recorder
from rlhfspec.cluster.run.stream import Collected
from rlhfspec.core.decode_records import GenerationStats
from rlhfspec.core.errors import ConfigError

pytestmark = pytest.mark.ray


@ray.remote(max_concurrency=2)
class Instance:
    """Has a script of spans, one list a call, and can fall silent."""

    def __init__(self, *script: list, log: bytes = b"") -> None:
        self.script = list(script)
        self.log = log
        self.is_silent = False

    def take_spans(self) -> list:
        if self.is_silent:
            time.sleep(60.0)
        return self.script.pop(0)

    def take_step_log(self, timeout_s: float) -> bytes:
        return self.log

    def fall_silent(self) -> None:
        self.is_silent = True


class Notes(Reporter):
    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def collected(*moves: Any) -> Collected:
    return Collected(
        rollouts=[],
        stats=GenerationStats(verify_s=16.0),
        moves=moves,
        planning_s=0.25,
        generate_s=10.0,
        generated_s=10.0,
        score_s=0.0,
    )


@pytest.fixture
def instances(local_ray) -> Iterator[dict[str, Any]]:
    spans = two_instances()
    first = [spans["gen-0"][0]]
    made = {
        "gen-0": Instance.options(num_cpus=0).remote(first, spans["gen-0"], log=b"a log"),
        "gen-1": Instance.options(num_cpus=0).remote([], spans["gen-1"], []),
    }
    yield made
    for handle in made.values():
        ray.kill(handle)


def test_moves_of_every_iteration_are_kept_and_the_timeline_of_the_last(
    instances, tmp_path: Path, monkeypatch
):
    run_dir, report = RunDir(path=tmp_path), Notes()
    recorder = Recorder(run_dir, report)
    recorder.write_timeline()
    assert not run_dir.timeline_file.exists(), "nothing has been recorded yet"

    monkeypatch.setattr(recorder_module, "SPANS_TIMEOUT_S", 60.0)
    recorder.record(0, collected(move("0-1", "lost", why_ended="gen-1: died")), instances)
    metrics = recorder.record(1, collected(*three_moves()), instances)
    assert metrics["moves/num_moved"] == 2 and metrics["moves/transfer_hidden_share"] == 1.0
    assert metrics["moves/overhead_share"] == 0.25 / 16.0
    lines = run_dir.moves_file.read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [0, 1, 1, 1]
    assert report.notes == ["move 0-1 of sample 1 from gen-0 to gen-1 was lost: gen-1: died"]
    assert [path.name for path in sorted(tmp_path.glob("traces/*"))] == [
        f"iteration_000{number}.json.gz" for number in (0, 1)
    ]
    recorder.write_timeline()
    kept = write_kept_trace(run_dir, 2, tmp_path / "kept.json")
    assert kept.read_text() == run_dir.timeline_file.read_text()
    with pytest.raises(ConfigError, match=r"no trace of iteration 3; it has 1 to 2"):
        write_kept_trace(run_dir, 3, None)
    assert (
        '"title": "generation of iteration 2: 10.0 s, 2 samples moved"' in run_dir.timeline_file.read_text()
    )

    # one dies and one is silent: the run goes on, and says who is missing
    ray.kill(instances["gen-0"])
    with pytest.raises(ray.exceptions.RayActorError):
        # not at once
        while True:
            ray.get(instances["gen-0"].take_step_log.remote(0.0), timeout=60)
    ray.get(instances["gen-1"].fall_silent.remote(), timeout=60)
    monkeypatch.setattr(recorder_module, "SPANS_TIMEOUT_S", 1.0)
    recorder.record(2, collected(), instances)
    dead, silent = report.notes[1:]
    assert dead.startswith("gen-0 is left out of the timeline: gen-0 died")
    assert silent.startswith("gen-1 is left out of the timeline: the loop waited 1 s for gen-1")
    recorder.write_timeline()
    assert '"traceEvents": []' in run_dir.timeline_file.read_text()


def test_step_logs_are_written_where_they_are_asked_for_and_not_empty(instances, tmp_path: Path):
    run_dir = RunDir(path=tmp_path)
    Recorder(run_dir, Notes()).record(0, collected(), instances)
    assert not list(tmp_path.glob("steps/**/*"))
    Recorder(run_dir, Notes(), step_log=True).record(1, collected(), instances)
    assert [path.relative_to(tmp_path) for path in tmp_path.glob("steps/*/*")] == [
        Path("steps/gen-0/iteration_0001.parquet")
    ]
    assert run_dir.steps_file("gen-0", 1).read_bytes() == b"a log"
