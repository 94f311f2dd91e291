"""`rlhfspec replay`: a real engine's log comes out again, a changed one is named, what is no log is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_pool
from refused_command import refused

from rlhfspec.actors.generation.decode_loop import DecodeLoop
from rlhfspec.actors.generation.loop_orders import StepLogOrder, StopOrder, SubmitOrder
from rlhfspec.cluster.cli import main
from rlhfspec.core.config import EngineConfig, SpeculationConfig
from rlhfspec.core.decode_records import StepRecord
from rlhfspec.engine.build import build_engine
from rlhfspec.engine.engine import Engine
from rlhfspec.profiles.step_log import PolicyOrigin, encode_step_log

SPECULATION = SpeculationConfig(policy="bandit", max_nodes=4, max_depth=4)
Write = Callable[..., Path]


class Host:
    """An engine that has its weights."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.spot_trainer = None


@pytest.fixture(scope="module")
def parts() -> list[list[StepRecord]]:
    """What an instance hands over after each of two iterations."""
    engine = build_engine(
        tiny_pool.target(),
        tiny_pool.draft(),
        engine=EngineConfig(device="cpu", max_running_samples=4, probe=False),
        speculation=SPECULATION,
        max_total_tokens=tiny_pool.MAX_TOTAL_TOKENS,
    )
    engine.step_log = []
    loop = DecodeLoop("gen-0", Host(engine), report_interval_s=1.0)  # type: ignore[arg-type]
    taken = []
    for requests in (tiny_pool.requests(5), tiny_pool.requests(3)):
        loop.order(SubmitOrder(requests=tuple(requests)))
        loop.run_once(wait_s=0.0)
        while engine.has_work:
            loop.run_once(wait_s=0.0)
        answer = loop.order(StepLogOrder())
        loop.run_once(wait_s=0.0)
        taken.append(answer.result(timeout=0))
    loop.order(StopOrder())
    loop.run_once(wait_s=0.0)
    assert engine.step_log == [] and len(taken[0]) > 20 and len(taken[1]) > 10
    return taken


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def make(*parts: list[StepRecord]) -> Path:
        origin = PolicyOrigin(speculation=SPECULATION)
        for number, records in enumerate(parts):
            (tmp_path / f"iteration_{number:04d}.parquet").write_bytes(encode_step_log(records, origin))
        return tmp_path

    return make


def test_a_folder_and_its_first_file_replay(parts, write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(*parts)
    for path, count in ((folder, sum(map(len, parts))), (folder / "iteration_0000.parquet", len(parts[0]))):
        assert main(["replay", str(path)]) == 0
        assert capsys.readouterr().out == (
            f"{count} decode steps of policy bandit: every decision comes out again\n"
        )


def test_the_first_decision_that_differs_is_named(
    parts, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    first = [*parts[0]]
    budget = first[9].budget
    first[9] = replace(first[9], budget=replace(budget, num_nodes=budget.num_nodes + 1))
    assert main(["replay", str(write(first, parts[1]))]) == 1
    assert capsys.readouterr().out == (
        f"decode step 9 differs: budget.num_nodes is {budget.num_nodes + 1} in the log, {budget.num_nodes} in the "
        "replay\n"
    )


def test_what_cannot_be_replayed_is_one_error(
    parts, write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(path: Path, said: str) -> None:
        assert said in refused(capsys, "replay", path)

    refuses(tmp_path / "none", "is not a step log")
    refuses(tmp_path, "found none")
    folder = write(parts[0], parts[1])
    refuses(folder / "iteration_0001.parquet", f"begins with decode step {len(parts[0])}, expected 0")
    refuses(write(parts[0], parts[1][1:]), f"goes from decode step {len(parts[0]) - 1} to")
    (folder / "iteration_0001.parquet").write_text("no parquet")
    refuses(folder, "iteration_0001.parquet is not a step log")
    (folder / "iteration_0001.parquet").unlink()
    refuses(write([]), "holds no decode step")
