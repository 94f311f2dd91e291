"""Coefficients move towards their targets, by the numbers of their papers, and rest where there is none."""

from pytest import approx

from rlhfspec.core.config import AlgorithmConfig
from rlhfspec.learning.training.objectives.policy import Coefficients


def test_the_kl_coefficient_grows_above_its_target_and_shrinks_below():
    # Ziegler et al.: error clip(kl / target - 1, -0.2, 0.2); coefficient times 1 + error * samples / horizon
    algorithm = AlgorithmConfig(kl_coef=0.1, kl_target=0.05, kl_horizon=1000)
    steered = Coefficients.first(algorithm)
    steered.after_update(0.055, 100, algorithm)
    assert steered.kl == approx(0.1 * (1 + 0.1 * 100 / 1000))
    before = steered.kl
    steered.after_update(0.0, 100, algorithm)
    assert steered.kl == approx(before * (1 - 0.2 * 100 / 1000))


def test_a_kl_coefficient_is_never_negative():
    algorithm = AlgorithmConfig(kl_coef=0.1, kl_target=0.05, kl_horizon=1)
    steered = Coefficients.first(algorithm)
    steered.after_update(0.0, 100, algorithm)
    assert steered.kl == 0.0


def test_without_targets_nothing_moves():
    algorithm = AlgorithmConfig(kl_coef=0.1, entropy_coef=0.02)
    steered = Coefficients.first(algorithm)
    steered.after_update(5.0, 100, algorithm)
    steered.after_step(0.0, algorithm)
    assert (steered.kl, steered.entropy_bonus(algorithm)) == (0.1, 0.02)


def test_the_entropy_bonus_counts_only_below_its_target():
    algorithm = AlgorithmConfig(entropy_target=0.5, entropy_coef_step=0.01, entropy_coef_max=0.02)
    steered = Coefficients.first(algorithm)
    assert steered.entropy_bonus(algorithm) == 0.0, "nothing is known of the entropy yet"
    steered.after_step(0.6, algorithm)
    assert (steered.entropy, steered.entropy_bonus(algorithm)) == (0.0, 0.0)
    for expected in (0.01, 0.02, 0.02):
        steered.after_step(0.4, algorithm)
        assert steered.entropy_bonus(algorithm) == approx(expected)
    steered.after_step(0.6, algorithm)
    assert steered.entropy == approx(0.01), "it shrinks"
    assert steered.entropy_bonus(algorithm) == 0.0, "and rests"
