"""Every loss and its gradient equals that of TRL's own trainers (`benchmarks/oracles/trl_losses.py`)."""

import pytest

from benchmarks.oracles.trl_comparison import OURS, differences, frozen, loss_and_gradient

FROZEN = frozen()


def test_every_frozen_case_is_compared():
    assert sorted(FROZEN["cases"]) == sorted(OURS)


@pytest.mark.parametrize("case", sorted(OURS))
def test_loss_and_gradient_are_those_of_trl(case):
    assert differences(case, FROZEN) < 1e-6
    _, gradient = loss_and_gradient(OURS[case], FROZEN)
    assert float(gradient.abs().max()) > 1e-3, "a comparison of zeros shows nothing"
    off_mask = [
        value
        for row, real in zip(gradient.tolist(), FROZEN["inputs"]["mask"], strict=True)
        for value, is_real in zip(row, real, strict=True)
        if not is_real
    ]
    assert off_mask and not any(off_mask)
