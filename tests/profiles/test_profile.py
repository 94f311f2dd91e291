"""Profiles on disk: what is saved is loaded, bit for bit; what cannot serve is refused, saying why."""

import json
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hand_profile import hand_cost, hand_profile, hand_provenance
from hand_tables import noisy_table, two_drafts

from rlhfspec.core.errors import ProfileError
from rlhfspec.profiles.acceptance import AcceptanceModel
from rlhfspec.profiles.profile import Profile, YieldCurve, load_profile, save_profile
from rlhfspec.profiles.provenance import Provenance

TREE = YieldCurve(branching=2, width=2, levels=3, curve=(0.0, 0.1 + 0.2, 1 / 3))


def awkward_profile() -> Profile:
    """Numbers that a rounding to few digits would change."""
    profile = hand_profile(0.7, hand_cost(knee_ms=1 / 3), trees=(TREE,))
    return replace(
        profile,
        acceptance=AcceptanceModel(first=(0.1 + 0.2, 1e-17, np.pi, -5e300, 0.0), other=(1 / 3,) * 5),
        quality={"verify_cost_median_rel_error": 1 / 7},
    )


def test_a_saved_profile_is_loaded_bit_for_bit(tmp_path: Path) -> None:
    profile = awkward_profile()
    save_profile(profile, tmp_path / "a" / "b")
    assert load_profile(tmp_path / "a" / "b") == profile


def test_saving_again_replaces_the_profile_and_leaves_no_other_file(tmp_path: Path) -> None:
    save_profile(awkward_profile(), tmp_path)
    second = hand_profile(0.5, hand_cost())
    save_profile(second, tmp_path)
    assert load_profile(tmp_path) == second
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]


def test_the_tables_beside_it_hold_what_was_measured(tmp_path: Path) -> None:
    costs, drafts = noisy_table(0, count=12), two_drafts()
    save_profile(awkward_profile(), tmp_path, costs, [drafts, drafts])
    table = pq.read_table(tmp_path / "costs.parquet").to_pydict()
    assert table["verify_s"] == costs.verify_s.tolist()
    assert table["widest"] == np.asarray(costs.shape.widest).tolist()
    rows = pq.read_table(tmp_path / "drafts.parquet").to_pydict()
    assert len(rows["parent"]) == 2 * 12
    assert rows["parent"][:12] == drafts.parent.ravel().tolist()
    assert rows["level"][:12] == [1, 1, 2, 2, 2, 2] * 2
    assert rows["sample"][:12] == [4] * 6 + [7] * 6
    assert rows["accepted"][12:] == drafts.accepted.ravel().tolist()


def test_a_missing_profile_is_named_with_the_command_that_makes_one(tmp_path: Path) -> None:
    folder = tmp_path / "nowhere"
    with pytest.raises(ProfileError, match="rlhfspec profile") as error:
        load_profile(folder)
    assert str(folder) in str(error.value)


def spoilt(tmp_path: Path, **changes: object) -> Path:
    save_profile(awkward_profile(), tmp_path)
    tree = json.loads((tmp_path / "profile.json").read_text()) | changes
    kept = {key: value for key, value in tree.items() if value != "gone"}
    (tmp_path / "profile.json").write_text(json.dumps(kept))
    return tmp_path


@pytest.mark.parametrize(
    "changes",
    [
        {"cost": "gone"},
        {"cost": [1, 2]},
        {"cost": {"draft": [1.0]}},
        {"cost": {"draft": 1.0, "verify": [1.0], "rest": [1.0]}},
        {"acceptance": None},
        {"acceptance": {"first": [0.0], "other": [0.0] * 5}},
        {"yields": [{"branching": 1, "width": 1, "levels": 1, "curve": [0.0, float("nan")]}]},
        {"max_samples": 0},
        {"provenance": {"device": "x"}},
        {"yields": [1.0]},
        {"yields": [{"branching": 1}]},
        {"schema_version": "gone"},
    ],
    ids=str,
)
def test_a_spoilt_profile_is_refused_naming_the_file(tmp_path: Path, changes: dict[str, object]) -> None:
    with pytest.raises(ProfileError, match="make it anew") as error:
        load_profile(spoilt(tmp_path, **changes))
    assert str(tmp_path / "profile.json") in str(error.value)


@pytest.mark.parametrize("text", ["{", "", "[]", "3", "null", '"profile"'])
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "profile.json").write_text(text)
    with pytest.raises(ProfileError, match="make it anew") as error:
        load_profile(tmp_path)
    assert str(tmp_path / "profile.json") in str(error.value)


def test_another_schema_version_is_refused_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="schema_version 99, expected 2"):
        load_profile(spoilt(tmp_path, schema_version=99))


NOT_COMPARED = {"date", "versions"}
WEIGHTS = {"target_weights", "draft_weights"}
NAMES = [f.name for f in fields(Provenance)]


def other(name: str) -> Provenance:
    value = asdict(hand_provenance())[name]
    return hand_provenance(**{name: value + 1 if isinstance(value, int) else "something else"})


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NOT_COMPARED])
def test_every_difference_that_counts_is_refused_and_named(name: str) -> None:
    measured, running = hand_provenance(), other(name)
    with pytest.raises(ProfileError, match=f"{name} is ") as error:
        measured.require_match(running, where="the profile of the tests")
    message = str(error.value)
    assert "the profile of the tests" in message and "rlhfspec profile" in message
    assert str(getattr(running, name)) in message and str(getattr(measured, name)) in message


@pytest.mark.parametrize("name", sorted(NOT_COMPARED))
def test_date_and_versions_are_not_compared(name: str) -> None:
    hand_provenance().require_match(other(name), where="it")


def test_all_differences_are_named_at_once_and_the_others_are_not() -> None:
    running = hand_provenance(device="new", dtype="new", date="new", torch_version="new")
    with pytest.raises(ProfileError) as error:
        hand_provenance().require_match(running, where="it")
    named = {name for name in NAMES if f"{name} is " in str(error.value)}
    assert named == {"device", "dtype", "torch_version"}


def test_weights_that_were_trained_on_do_not_count_when_told_so() -> None:
    running = hand_provenance(**dict.fromkeys(WEIGHTS, "trained"))
    hand_provenance().require_match(running, where="it", weights=False)
    with pytest.raises(ProfileError, match=r"target_weights is 'trained'.*draft_weights is 'trained'"):
        hand_provenance().require_match(running, where="it")
    with pytest.raises(ProfileError, match="device"):
        hand_provenance().require_match(replace(running, device="new"), where="it", weights=False)
