"""A step log comes back from disk as it was, to the last bit, or not at all; with what its policy is made from."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hand_profile import hand_cost, hand_profile

from rlhfspec.core.config import SpeculationConfig
from rlhfspec.core.decode_records import PLAIN, Budget, DecodeState, DraftLog, LookUpLog, StepRecord
from rlhfspec.core.errors import DataError
from rlhfspec.profiles.step_log import PolicyOrigin, encode_step_log, read_step_log

SCORES = np.array(
    [[0.1, 1 / 3, 0.0, -0.0, 1e-45, np.nan], [1.0, 0.7, 0.49, 0.2, 3e-39, np.inf]], dtype=np.float32
)
DRAFT = DraftLog(
    scores=SCORES,
    level_sizes=(2, 4),
    num_nodes=np.array([0, 5]),
    num_accepted=np.array([0, 2]),
)
PLAIN_STEP = StepRecord(
    state=DecodeState(
        decode_step=7,
        num_samples=2,
        context_tokens=2**40 + 1,
        max_remaining_tokens=9,
        num_waiting=3,
        weight_version=4,
        drafter_version=5,
    ),
    budget=replace(PLAIN, reason="drafting does not pay; α ≤ 0.3"),
    num_draft_tokens=0,
    num_accepted_tokens=0,
    num_accepted_rank2_plus=0,
    num_emitted_tokens=2,
    draft_s=0.1,
    verify_s=1 / 3,
    accept_s=5e-324,
    other_s=1e-9,
    select_s=0.25,
)
REFINED_STEP = replace(
    PLAIN_STEP,
    state=replace(PLAIN_STEP.state, decode_step=8),
    budget=Budget(num_nodes=8, depth=3, branching=2, width=2, reason="a tree", refined=True),
    num_draft_tokens=5,
    num_accepted_tokens=2,
    num_accepted_rank2_plus=1,
    num_emitted_tokens=4,
    draft=DRAFT,
)


PAIRED_STEP = replace(
    REFINED_STEP,
    budget=replace(REFINED_STEP.budget, look_up=5),
    draft=replace(
        DRAFT,
        look_up=LookUpLog(scores=SCORES[:, 1:4].copy(), used=np.array([True, False]), seconds=1 / 3),
    ),
    num_accepted_looked_up=2,
)
ALONE = DraftLog(
    scores=np.zeros((2, 0), dtype=np.float32),
    level_sizes=(),
    num_nodes=np.array([0, 0]),
    num_accepted=np.array([0, 0]),
    look_up=LookUpLog(scores=np.zeros((2, 0), dtype=np.float32), used=np.zeros(2, dtype=bool), seconds=0.0),
)
PROFILE = hand_profile(0.7, hand_cost(knee_ms=1 / 3))
ORIGIN = PolicyOrigin(speculation=SpeculationConfig(max_nodes=9), profile=PROFILE)


def write_step_log(path: Path, records: list[StepRecord], origin: PolicyOrigin = ORIGIN) -> None:
    path.write_bytes(encode_step_log(records, origin))


def assert_equal(ours: StepRecord, theirs: StepRecord) -> None:
    """Every field, arrays by bytes and type."""
    assert replace(ours, draft=None) == replace(theirs, draft=None)
    assert (ours.draft is None) == (theirs.draft is None)
    if ours.draft is None or theirs.draft is None:
        return
    assert_equal_arrays(ours.draft, theirs.draft)


def assert_equal_arrays(ours: DraftLog | LookUpLog, theirs: DraftLog | LookUpLog) -> None:
    for field in fields(ours):
        a, b = getattr(ours, field.name), getattr(theirs, field.name)
        assert type(a) is type(b), field.name
        if isinstance(a, LookUpLog):
            assert_equal_arrays(a, b)
            continue
        if isinstance(a, np.ndarray):
            assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), field.name
            assert a.flags.c_contiguous and a.flags.writeable
        else:
            assert a == b, field.name


def test_records_come_back_bit_for_bit_and_in_order(tmp_path: Path) -> None:
    alone = replace(PAIRED_STEP, draft=ALONE)
    records = [REFINED_STEP, PLAIN_STEP, replace(REFINED_STEP, select_s=0.5), PAIRED_STEP, alone, PLAIN_STEP]
    write_step_log(tmp_path / "steps.parquet", records)
    back, origin = read_step_log(tmp_path / "steps.parquet")
    assert origin == ORIGIN
    assert len(back) == len(records)
    for ours, theirs in zip(back, records, strict=True):
        assert_equal(ours, theirs)


def test_views_of_larger_arrays_are_written_as_seen(tmp_path: Path) -> None:
    wide = np.arange(24, dtype=np.float32).reshape(2, 12)
    for scores in (wide[:, ::2], wide.T[:2, :].repeat(3, axis=1)):
        write_step_log(
            tmp_path / "steps.parquet", [replace(REFINED_STEP, draft=replace(DRAFT, scores=scores))]
        )
        draft = read_step_log(tmp_path / "steps.parquet")[0][0].draft
        assert draft is not None
        assert draft.scores.tolist() == scores.tolist()


def test_a_log_of_no_step_is_a_log(tmp_path: Path) -> None:
    write_step_log(tmp_path / "steps.parquet", [])
    assert read_step_log(tmp_path / "steps.parquet") == ([], ORIGIN)


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="found none"):
        read_step_log(tmp_path)
    write_step_log(tmp_path / "iteration_0001.parquet", [REFINED_STEP])
    write_step_log(tmp_path / "iteration_0000.parquet", [PLAIN_STEP])
    records, origin = read_step_log(tmp_path)
    assert [record.decode_step for record in records] == [7, 8] and origin == ORIGIN
    other = PolicyOrigin(speculation=SpeculationConfig(max_nodes=8), profile=PROFILE)
    write_step_log(tmp_path / "iteration_0002.parquet", [PLAIN_STEP], other)
    with pytest.raises(DataError, match="different policies"):
        read_step_log(tmp_path)


def test_scores_that_would_not_come_back_are_refused(tmp_path: Path) -> None:
    double = replace(REFINED_STEP, draft=replace(DRAFT, scores=SCORES.astype(np.float64)))
    with pytest.raises(DataError, match=r"decode step 8 are float64, expected float32"):
        write_step_log(tmp_path / "steps.parquet", [PLAIN_STEP, double])
    assert not list(tmp_path.iterdir())


def test_what_is_no_step_log_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "steps.parquet"
    with pytest.raises(DataError, match=r"steps\.parquet"):
        read_step_log(path)
    path.write_text("no parquet")
    with pytest.raises(DataError, match=r"steps\.parquet"):
        read_step_log(path)
    write_step_log(path, [REFINED_STEP])
    whole, table = path.read_bytes(), pq.read_table(path)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError):
        read_step_log(path)
    pq.write_table(table.replace_schema_metadata({b"step_log_version": b"99"}), path)
    with pytest.raises(DataError, match="99"):
        read_step_log(path)
    metadata = {name: text for name, text in table.schema.metadata.items() if name != b"policy_origin"}
    pq.write_table(table.replace_schema_metadata(metadata), path)
    with pytest.raises(DataError, match="policy_origin"):
        read_step_log(path)
    pq.write_table(table.drop_columns(["budget"]), path)
    with pytest.raises(DataError, match="budget"):
        read_step_log(path)


def test_arrays_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    torn = replace(REFINED_STEP, draft=replace(DRAFT, level_sizes=(2, 5)))
    write_step_log(tmp_path / "steps.parquet", [torn])
    with pytest.raises(DataError):
        read_step_log(tmp_path / "steps.parquet")
