"""Scores of a chain's levels by our own code are those of the acceptance model in numpy."""

import numpy as np
import pytest

from engine.cpu.program import common_code
from engine.cpu.scoring import COEFFICIENTS
from engine.cpu.writer import WIDTH
from engine.drafters.refinement import Scorer
from profiles.acceptance import AcceptanceModel

SCORER = Scorer(
    AcceptanceModel(first=(0.4, 0.9, 0.3, 0.2, -0.5), other=(-2.0, -0.5, 0.3, 0.1, -0.4)),
)
LEVELS = 5


def drawn(samples: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Scores and log-probabilities of two leaders, [levels, samples, 2], with room for whole vectors."""
    rows = -(-samples // WIDTH) * WIDTH
    scores = -np.sort(-random.normal(0, 4, (LEVELS, rows, 2)), axis=-1).astype(np.float32)
    logprobs = -random.exponential(2.0, (LEVELS, rows, 2)).astype(np.float32)
    # a tie, and a sample of which filters left one token
    scores[3, 0] = 1.5
    scores[1, 0, 1] = logprobs[1, 0, 1] = -np.inf
    return scores, logprobs


def paths_of(scores: np.ndarray, logprobs: np.ndarray, samples: int) -> np.ndarray:
    coefficients = SCORER.chain_coefficients(LEVELS)
    assert coefficients is not None and coefficients.shape[1] == COEFFICIENTS
    paths = np.ones((LEVELS + 1, scores.shape[1]), dtype=np.float32)
    for level in range(LEVELS):
        common_code().operations["paths"](
            paths[level + 1].ctypes.data,
            paths[level].ctypes.data,
            scores[level].ctypes.data,
            logprobs[level].ctypes.data,
            coefficients[level].ctypes.data,
            samples,
        )
    return paths[1:, :samples].T


@pytest.mark.parametrize("samples", [1, 7, 8, 19])
def test_every_level_is_scored_as_numpy_does(samples: int) -> None:
    scores, logprobs = drawn(samples, np.random.default_rng(samples))
    share = SCORER.acceptance(
        scores[:, :samples].swapaxes(0, 1), logprobs[:, :samples].swapaxes(0, 1), tuple(range(1, LEVELS + 1))
    )
    expected = np.multiply.accumulate(share[..., 0], axis=1)
    assert expected.max() > 0.3 and expected.min() < 0.1
    np.testing.assert_allclose(paths_of(scores, logprobs, samples), expected, rtol=2e-5)


def test_a_broken_drafters_scores_stay_no_numbers() -> None:
    scores, logprobs = drawn(3, np.random.default_rng(0))
    scores[2, 1, 0] = np.nan
    paths = paths_of(scores, logprobs, 3)
    assert np.isnan(paths[1, 2:]).all()
    assert np.isfinite(np.delete(paths, 1, axis=0)).all() and np.isfinite(paths[1, :2]).all()
