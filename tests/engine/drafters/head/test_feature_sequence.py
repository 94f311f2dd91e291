"""A feature sequence holds the hidden states of every position that predicts, and says what it takes."""

import numpy as np
import pytest
import torch

from rlhfspec.engine.drafters.head.feature_recorder import FeatureSequence

HIDDEN = 4


def _sequence(
    *, total: int = 7, prompt: int = 3, taps: int | None = None, last: int | None = None
) -> FeatureSequence:
    return FeatureSequence(
        token_ids=np.arange(total, dtype=np.int64),
        prompt_length=prompt,
        taps=torch.zeros(total - 1 if taps is None else taps, 3 * HIDDEN, dtype=torch.bfloat16),
        last=torch.zeros(total - prompt if last is None else last, HIDDEN),
    )


def test_counts_of_a_sequence():
    sequence = _sequence()
    assert sequence.first == 2
    assert sequence.num_response_tokens == 4
    assert sequence.num_bytes == 7 * 8 + 6 * 3 * HIDDEN * 2 + 4 * HIDDEN * 4


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"prompt": 7}, "a prompt of 7 tokens"),
        ({"prompt": 0}, "a prompt of 0 tokens"),
        ({"taps": 7}, "taps expected to be"),
        ({"last": 3}, "last expected to have 4 rows, got 3"),
    ],
)
def test_what_does_not_fit_is_refused(wrong: dict, said: str):
    with pytest.raises(ValueError, match=said):
        _sequence(**wrong)
