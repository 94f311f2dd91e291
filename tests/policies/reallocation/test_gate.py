"""The gate: whichever is predicted sooner, with the crossing where the arithmetic puts it."""

import numpy as np
import pytest

from rlhfspec.policies.reallocation.gate import BYSTANDER_SHARE, HANDLING_S, Gate, GateMode
from rlhfspec.policies.reallocation.pool_records import MoveMode
from rlhfspec.profiles.transfer import PrefillModel, TransferModel


def gate(mode: GateMode = "auto") -> Gate:
    """Migrate: 20 ms + 0.1 ms a token, 100 ms for a cold pair; recompute: 5 ms + 0.25 ms a token."""
    return Gate(
        kv_bytes_per_token=1e5,
        transfer=TransferModel(latency_s=0.020, bytes_per_s=1e9, open_s=0.100),
        prefill=PrefillModel(fixed_s=0.005, token_s=2.5e-4, token_squared_s=0.0),
        mode=mode,
    )


@pytest.mark.parametrize(("cold", "crossing"), [(False, 100), (True, 115 / 0.15)])
def test_the_choice_flips_at_the_computed_crossing(cold: bool, crossing: float) -> None:
    made = gate()
    assert made.choose(int(crossing) - 2, cold=cold) is MoveMode.RECOMPUTE
    assert made.choose(int(crossing) + 2, cold=cold) is MoveMode.MIGRATE
    contexts = np.arange(16, 2048)
    costs = made.costs(contexts, cold=cold)
    assert ((costs.recompute_s < costs.migrate_s) == (contexts < crossing)).all()


def test_observed_transfer_times_shift_the_crossing() -> None:
    made = gate()
    assert made.choose(1000) is MoveMode.MIGRATE
    for number in range(40):
        num_bytes = 10_000_000 * (1 + number % 10)
        # the link is ten times slower than thought
        made.note_transfer(num_bytes=num_bytes, seconds=0.020 + num_bytes / 1e8, cold=False)
    assert made.choose(1000) is MoveMode.RECOMPUTE
    for number in range(40):
        tokens = 100 * (1 + number % 10)
        made.note_prefill(num_tokens=tokens, seconds=0.005 + 2.5e-3 * tokens)
    assert made.choose(1000) is MoveMode.MIGRATE


def test_each_baseline_gate_has_one_mode_only() -> None:
    for context in (16, 2048):
        assert gate("always_migrate").choose(context) is MoveMode.MIGRATE
        assert gate("always_recompute").choose(context) is MoveMode.RECOMPUTE


def test_a_transfer_slows_other_samples_by_a_share_of_its_time_and_a_prefill_by_all() -> None:
    costs = gate().costs(np.array([100, 200]))
    # of 30 and 40 ms, 20 are latency: waiting costs nobody
    assert costs.migrate_lost_s == pytest.approx(HANDLING_S + BYSTANDER_SHARE * np.array([0.010, 0.020]))
    assert costs.recompute_lost_s == pytest.approx([0.030, 0.055])
