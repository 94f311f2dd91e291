"""The pure parts of `bench faults`: what is drawn, what is kept, what is judged."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

import pytest
from rich.console import Console

from rlhfspec.benchmarks import faults
from rlhfspec.benchmarks.faults import FAULTS, GROUPED, ITERATIONS, run
from rlhfspec.benchmarks.faulty.injection import (
    CARDS,
    HEARTBEAT_LIMIT_S,
    NETWORK_KINDS,
    ORDER_LIMIT_S,
    POOLS,
    Fault,
    deal,
    freeze_s,
)
from rlhfspec.benchmarks.faulty.outcome import Comparison, Disturbed, Resumed, fault_figures, kept, problems
from rlhfspec.benchmarks.support import runs
from rlhfspec.benchmarks.support.harness import Bench
from rlhfspec.benchmarks.support.result import machine_provenance

SAME = Comparison(
    num_samples=9, num_lost=0, num_duplicated=0, num_different=0, weights_equal=True, metrics_different=[]
)
BORNE = Fault(kind="kill", pool="trainer", outcome="recovered", recovery_s=8.0)
CUT = Fault(kind="cut", pool="driver-trainer", outcome="recovered", recovery_s=4.0)
RUN = Disturbed(seed=0, faults=[BORNE, CUT], comparison=SAME, undisturbed_s=10.0, disturbed_s=30.0)
RESUME = Resumed(name="cut_0_ppo", has_been_killed=True, is_equal=True)


def wrong(
    run: Disturbed = RUN, resume: Resumed = RESUME, differences: float = 0.0, ratio: float = 0.9
) -> list[str]:
    figures = {"verify_differences": differences, "verify_over_generate": ratio}
    return problems([run], [resume], most=2, num_resumes=1, figures=figures)


def test_faults_are_a_function_of_the_seed() -> None:
    first, again, other = (list(islice(deal(seed), 60)) for seed in (3, 3, 4))
    assert first == again != other
    assert [card.gap_s for card in first] != [card.gap_s for card in other]


@pytest.mark.parametrize("seed", range(3))
def test_a_run_has_every_card_in_its_number(seed: int) -> None:
    dealt = Counter((card.kind, card.pool) for card in islice(deal(seed), FAULTS["full"]))
    assert dealt == {(kind, pool): number for kind, pool, number in CARDS}


def test_every_pool_is_killed_and_frozen_beyond_its_limit() -> None:
    cards = {(kind, pool) for kind, pool, _ in CARDS}
    assert cards >= {(kind, pool) for kind in ("kill", "freeze", "long_freeze") for pool in POOLS}
    for pool in POOLS:
        limit_s = HEARTBEAT_LIMIT_S if pool in ("generation", "follower") else ORDER_LIMIT_S
        assert freeze_s("freeze", pool) < HEARTBEAT_LIMIT_S <= limit_s < freeze_s("long_freeze", pool)


def test_kinds_that_cannot_be_had_are_left_out_and_the_rest_fills_the_run() -> None:
    dealt = list(islice(deal(0, without=NETWORK_KINDS), FAULTS["full"]))
    assert len(dealt) == FAULTS["full"] and not NETWORK_KINDS & {card.kind for card in dealt}


def test_a_run_that_bore_all_is_right() -> None:
    assert wrong() == []


@pytest.mark.parametrize(
    ("run", "resume", "line"),
    [
        (replace(RUN, faults=[BORNE]), RESUME, "1 faults, expected 2"),
        (
            replace(RUN, faults=[BORNE, replace(CUT, outcome="not_found")]),
            RESUME,
            "driver-trainer: not_found",
        ),
        (replace(RUN, faults=[BORNE, replace(CUT, outcome="not_recovered")]), RESUME, "not_recovered"),
        (replace(RUN, comparison=replace(SAME, num_lost=1)), RESUME, "num_lost=1"),
        (RUN, replace(RESUME, is_equal=False), "cut_0_ppo: resumed, and differs"),
        (RUN, replace(RESUME, has_been_killed=False), "0 drivers killed, expected 1"),
    ],
)
def test_what_is_wrong_is_one_line(run: Disturbed, resume: Resumed, line: str) -> None:
    (said,) = wrong(run, resume)
    assert line in said


def test_a_difference_that_verify_finds_is_wrong() -> None:
    assert "3 differences" in wrong(differences=3.0)[0]


def test_a_sample_that_a_move_between_groups_changed_is_wrong() -> None:
    figures = {"groups_differing_samples": 0.0, "groups_missing_samples": 1.0}
    (said,) = problems([RUN], [RESUME], most=2, num_resumes=1, figures=figures)
    assert said == "moves between groups: groups_missing_samples is 1, expected 0"


def test_figures_count_by_kind_and_pool_and_over_all_runs() -> None:
    ended = replace(BORNE, outcome="ended", recovery_s=99.0)
    other = replace(RUN, faults=[ended, replace(CUT, recovery_s=6.0)], comparison=replace(SAME, num_lost=2))
    found = fault_figures([RUN, other], [RESUME, replace(RESUME, has_been_killed=False, is_equal=False)])
    assert found["faults"] == 4 and found["kill_trainer"] == 2 and found["cut_driver_trainer"] == 2
    assert found["samples"] == 18 and found["samples_lost"] == 2 and found["weights_equal"] == 0.5
    assert found["recovery_s_median"] == 6.0 and found["recovery_s_max"] == 8.0
    assert found["resumes"] == 1 and found["resumes_equal"] == 1


def test_a_proof_that_takes_longer_than_generation_is_a_fault() -> None:
    assert wrong(ratio=1.25) == ["rlhfspec verify took 1.25 times what generation took, expected less than 1"]


def test_a_part_is_made_once_until_its_code_or_settings_change(tmp_path: Path) -> None:
    made = []

    def make() -> dict[str, object]:
        made.append(1)
        return asdict(RUN)

    for commit in ("a", "a", "b"):
        part = kept(tmp_path / "seed_0.json", {"commit": commit}, make)
    assert len(made) == 2 and part["faults"][0] == asdict(BORNE)


def keep_parts(out: Path, num_faults: int) -> None:
    """All parts of the quick size, as an earlier call has left them."""
    (out / "parts").mkdir(parents=True)
    parts = {
        "seed_0": asdict(replace(RUN, faults=[BORNE] * num_faults)),
        "groups": {"groups_differing_samples": 0.0},
        "verified": {"verify_differences": 0.0, "verify_over_generate": 0.7},
        "cut_0_ppo": asdict(RESUME),
    }
    stamp = {"mode": "quick", "commit": machine_provenance()["commit"]}
    for name, part in parts.items():
        (out / "parts" / f"{name}.json").write_text(json.dumps({"stamp": stamp, "part": part}))


@pytest.mark.parametrize(("num_faults", "code"), [(FAULTS["quick"], 0), (FAULTS["quick"] - 1, 1)])
def test_the_benchmark_goes_on_from_its_parts_and_fails_with_too_few_faults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], num_faults: int, code: int
) -> None:
    keep_parts(tmp_path, num_faults)
    assert run(Bench("faults", out=tmp_path, mode="quick")) == code
    assert ("not met: seed 0: 3 faults, expected 4" in capsys.readouterr().out) == bool(code)
    figures = json.loads((tmp_path / "faults.json").read_text())["figures"]
    assert figures["faults"] == figures["kill_trainer"] == num_faults and figures["resumes_equal"] == 1.0


def test_a_run_that_ends_before_its_last_fault_goes_on_and_so_does_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, ...]] = []

    def command(words: list[str], **_: object) -> float:
        ran.append(tuple(words))
        return 10.0

    def under_faults(words: list[str], cards: object, *, most: int, **_: object) -> list[Fault]:
        ran.append(tuple(words))
        return [BORNE] * min(most, 3)

    for module in (faults, runs):
        monkeypatch.setattr(module, "run_command", command)
        monkeypatch.setattr(module, "newest_run", lambda out, name: out / name)
    monkeypatch.setattr(faults, "_under_faults", under_faults)
    monkeypatch.setattr(faults, "compare_runs", lambda one, other: SAME)
    part = faults._seed_part(tmp_path, 0, "quick", frozenset(), Console(quiet=True))
    assert len(part["faults"]) == FAULTS["quick"] == 4 and part["undisturbed_s"] == 20.0
    first, second, third, fourth = ran
    assert f"run.iterations={ITERATIONS['quick']}" in first and first[:3] == second[:3]
    assert set(GROUPED) <= set(second) and not set(GROUPED) & set(first)
    longer = ("--set", f"run.iterations={ITERATIONS['quick'] * 3 // 2}")
    assert third == ("train", "--resume", str(tmp_path / "disturbed_0"), *longer)
    assert fourth == ("train", "--resume", str(tmp_path / "undisturbed_0"), *longer)
