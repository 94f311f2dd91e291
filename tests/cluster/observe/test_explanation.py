"""`rlhfspec explain`: five rows below the closing table; the change fits the largest part of the time."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from rlhfspec.cluster.cli import main
from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.observe.explanation import Explained
from rlhfspec.cluster.observe.summary import start_up_metrics, start_up_rows, summarise
from rlhfspec.core.config import Config
from rlhfspec.core.config_io import apply_overrides, config_from_dict

TREE: dict[str, Any] = {
    "models": {"target": "demo", "draft": "demo"},
    "data": {"task": "chain"},
    "cluster": {"generation": {"num_actors": 2}},
    "trainer": {"num_threads": 2},
    "algorithm": {"kl_coef": 0.0},
}
EQUAL = {"reward/min": 0.5, "reward/max": 0.5}
AHEAD = ["rollout.max_staleness=1", "algorithm.correction.kind=tis"]
PARTS = {"generate": 4.0, "update": 2.0, "publish": 1.0, "score": 0.5, "refit": 0.5, "evaluate": 0.0}


def row(parts: dict[str, float], **more: float) -> dict[str, float]:
    """An iteration of 10 s of which these parts took their seconds."""
    seconds = PARTS | parts
    metrics = {f"time/{part}_s": value for part, value in seconds.items()}
    return metrics | {
        "time/iteration_s": 10.0,
        "reward/mean": 0.5,
        "rollout/num_samples": 10.0,
        "rollout/response_tokens_mean": 20.0,
        "rollout/mean_acceptance_length": 3.0,
        "rollout/acceptance_rate": 0.75,
        "rollout/decode_s": 1.5 * seconds["generate"],
        "rollout/draft_s": 0.3 * seconds["generate"],
        "moves/num_moved": 2.0,
        "moves/expected_gain_s": 0.5,
        "moves/decode_thread_s": 0.03,
        "moves/planning_s": 0.03,
        **more,
    }


def config_of(*settings: str) -> Config:
    return config_from_dict(apply_overrides(deepcopy(TREE), list(settings)), origin="the test")


def explained(
    *settings: str, num_cores: int = 2, parts: dict[str, float] | None = None, **more: float
) -> Explained:
    return of_rows([row(parts or {}, **more)] * 2, *settings, num_cores=num_cores)


def of_rows(metrics: list[dict[str, float]], *settings: str, num_cores: int = 2) -> Explained:
    summary = summarise(metrics)
    assert summary is not None
    return Explained(config=config_of(*settings), metrics=metrics, summary=summary, num_cores=num_cores)


def test_five_rows_say_what_each_mechanism_gave() -> None:
    rows = dict(explained().rows())
    assert len(rows) == 5
    assert rows["waiting"].startswith("instances decoded 75% of generation")
    waits = {"time/rollout_wait_s": 2.0, "time/backpressure_s": 0.5, "time/pause_s": 0.25}
    assert dict(explained(**waits).rows())["waiting"].endswith(
        "Trainers waited 4.0 s for samples, instances 1.0 s for trainers and 0.5 s for publications"
    )
    assert rows["drafting"] == "20% of decoding; the draft's refit 5% of all"
    assert rows["moves"] == "expected to shorten the tails by 1.0 s; they cost 1.0% of decoding"
    assert "rlhfspec compare RUN" in rows["measured"]
    assert dict(explained(**{"moves/num_moved": 0.0}).rows())["moves"] == "none was worth its cost"


@pytest.mark.parametrize(
    ("settings", "more", "said"),
    [
        (["speculation.policy=off"], {}, "speculation.policy=goodput"),
        (["reallocation.policy=static"], {}, "reallocation.policy=finish_time"),
        ([], {"rollout/mean_acceptance_length": 1.1}, "speculation.look_up=suffix"),
        ([], {"rollout/decode_s": 4.0}, "rollout.prompts_per_iteration=64: instances stood idle for 50%"),
        ([], {"num_cores": 8}, "cluster.generation.num_actors=8"),
        ([], {}, "nothing that these records show"),
        ([], {"rollout/length_cut_share": 0.7}, "sampling.max_new_tokens=512: most responses are cut"),
        (
            ["algorithm.kind=grpo", "rollout.samples_per_prompt=4"],
            {"update/num_tokens": 500.0, "parts": {"update": 6.0}},
            "rollout.samples_per_prompt=8: 60% of its",
        ),
        (["trainer.num_threads=1"], {"parts": {"update": 6.0}}, "trainer.num_threads=2"),
        (["algorithm.kl_coef=0.1"], {"parts": {"update": 6.0}}, "algorithm.kl_coef=0"),
        (["trainer.epochs=3"], {"parts": {"update": 6.0}}, "trainer.epochs=1"),
        ([], {"parts": {"update": 6.0}}, "nothing that these records show"),
        (
            ["cluster.trainer.num_gpus=1", "trainer.device=auto"],
            {"parts": {"update": 6.0}},
            "rollout.max_staleness=1",
        ),
        (
            AHEAD,
            {"time/backpressure_s": 5.0, "time/pause_s": 0.1},
            "cluster.generation.num_actors=1: instances share",
        ),
        (
            [*AHEAD, "speculation.policy=off"],
            {"time/rollout_wait_s": 5.0, "time/pause_s": 0.1},
            "speculation.policy=goodput",
        ),
        ([], {"parts": {"publish": 6.0, "generate": 1.0}}, "rollout.prompts_per_iteration=64"),
        ([], {"parts": {"score": 6.0, "generate": 1.0}}, "cluster.reward.num_actors=2"),
        ([], {"parts": {"refit": 6.0, "generate": 1.0}}, "drafter_training.budget_share=0.025"),
        (
            [],
            EQUAL | {"learner/no_signal": 1.0},
            "the rewards first: iteration 1: its rewards taught nothing",
        ),
    ],
)
def test_the_change_fits_the_largest_part(settings: list[str], more: dict[str, Any], said: str) -> None:
    assert explained(*settings, **more).change().startswith(said)


@pytest.mark.parametrize("parts", [{"update": 6.0}, {"publish": 6.0}, {"score": 6.0}, {"refit": 6.0}, {}])
def test_a_change_is_a_key_with_a_value_that_the_config_takes(parts: dict[str, float]) -> None:
    settings = ("reallocation.policy=pull", "trainer.epochs=2")
    told = explained(*settings, parts=parts).change().split(": ")[0]
    assert config_of(*settings, *told.split(" with ")) != config_of(*settings)


def test_of_a_folder_without_iterations_nothing_is_explained(tmp_path: Path, capsys) -> None:
    run = RunDir.create(config_of(), tmp_path / "run")
    assert main(["explain", str(run.path)]) == 2
    error = capsys.readouterr().err
    assert f"no iteration of RLHF has finished in {run.path} (state running: process " in error
    assert ", starting, before the first iteration)): nothing to show" in error and error.count("\n") == 1
    run.metrics_file.write_text(json.dumps({"iteration": 0, **row({})}) + "\n")
    assert main(["explain", str(run.path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("iterations") and lines[-1].startswith("change next")
    with run.metrics_file.open("a") as file:
        file.write("damaged\n" + json.dumps({"iteration": 2, **row({})}) + "\n")
    assert main(["explain", str(run.path)]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("iterations") and str(run.metrics_file) in said.err, "what is left out is told"


def test_an_earlier_versions_run_is_explained_without_what_it_did_not_record() -> None:
    old = {
        name: value
        for name, value in row({}).items()
        if name not in ("rollout/decode_s", "rollout/draft_s", "moves/expected_gain_s")
    }
    assert "not recorded" in of_rows([old]).text()


def test_cores_are_those_that_the_run_had(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir.create(config_of(), tmp_path / "run")
    slow = {"generate": 9.0, "update": 0.5}
    for had, said in (
        (96.0, "cluster.generation.num_actors=96: instances used 2 of 96 cores"),
        (0.0, "nothing"),
    ):
        run.metrics_file.write_text(json.dumps({"iteration": 0, **row(slow), "pool/cores": had}) + "\n")
        assert main(["explain", str(run.path)]) == 0
        assert capsys.readouterr().out.splitlines()[-1].removeprefix("change next").strip().startswith(said)
    ahead = {"parts": {"update": 6.0}, "time/backpressure_s": 5.0, "time/pause_s": 0.1}
    assert "cores" not in explained(*AHEAD, num_cores=0, **ahead).change(), (
        "of several machines none is counted"
    )


def test_seconds_below_0_are_no_run_s(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir.create(config_of(), tmp_path / "run")
    rows = [row({}), row({"publish": -3.0}), row({}, **{"moves/downtime_s_max": -0.001})]
    lines = (json.dumps({"iteration": number, **one}) for number, one in enumerate(rows))
    run.metrics_file.write_text("".join(f"{line}\n" for line in lines))
    assert main(["explain", str(run.path)]) == 0
    said = capsys.readouterr()
    assert "1 lines without 'iteration', or of seconds below 0, are left out" in said.err
    assert (
        said.out.startswith("iterations") and said.out.splitlines()[0].endswith(" 2") and " -" not in said.out
    )


def test_where_no_seconds_are_recorded_nothing_is_to_be_changed() -> None:
    assert of_rows([{"iteration": 0.0}]).change() == "nothing that these records show"


def test_a_start_is_explained_by_its_parts_of_the_process_that_ran_last() -> None:
    first = start_up_metrics(40.0, {"starting Ray": 30.0})
    stages = {"loading torch and transformers": 4.0, "starting Ray": 3.0, "evaluating": 9.0}
    metrics = [row({}, **first), row({}, **start_up_metrics(10.0, stages)), row({})]
    assert start_up_rows(metrics) == [
        ("  loading torch and transformers", "4.0 s (40%)"),
        ("  starting Ray", "3.0 s (30%)"),
        ("  the rest", "3.0 s (30%)"),
    ]
    labels = [line.split("  ")[0] for line in of_rows(metrics).text().splitlines()]
    assert labels.count("start-up") == 1
    whole = of_rows(metrics).text().splitlines()[labels.index("start-up") :]
    assert whole[0].endswith("10.0 s, before the first iteration")
    assert [line.split()[0] for line in whole[1:5]] == ["loading", "starting", "the", "time"]
    assert start_up_rows([row({}, **{"time/start_up_s": 10.0})]) == []
