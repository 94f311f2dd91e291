"""A norm for an early exit is trained from own responses, within its seconds, and judged on others."""

import numpy as np
import pytest
import torch
from tiny_llama import tiny_llama

from core.errors import ConfigError, DataError
from core.records import Prompt, SamplingParams
from learning.heads.make_exit_norm import make_exit_norm

SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=16)


def prompts(num: int = 48) -> list[Prompt]:
    rng = np.random.default_rng(0)
    return [Prompt(prompt_id=i, token_ids=rng.integers(2, 19, size=4)) for i in range(num)]


def model():
    """Its last norm fits its last layers: it drops half of the state, which the exit could use."""
    target = tiny_llama(initializer_range=0.2).eval()
    gain = target.base_model.norm.weight.data
    gain.copy_(torch.linspace(0.05, 4.0, len(gain)))
    return target


def made(**settings):
    return make_exit_norm(
        model(),
        prompts(),
        **{"num_layers": 1, "sampling": SAMPLING, "vocab_size": 19, "budget_s": 1e6, **settings},
    )


def test_what_was_trained_guesses_no_worse_than_the_last_norm() -> None:
    norm = made().norm
    assert (norm.num_layers, norm.num_target_layers) == (1, 2)
    assert torch.isfinite(norm.gain).all() and not norm.gain.equal(model().base_model.norm.weight)
    again = made()
    assert again.norm.gain.equal(norm.gain), "the same from the same seed"
    assert again.num_steps > 3 and again.num_tokens > 500
    assert again.after >= again.before - 0.02


def test_what_cannot_be_made_is_refused() -> None:
    with pytest.raises(ConfigError, match="behind 1 to 1 layers"):
        made(num_layers=2)
    with pytest.raises(DataError, match="two prompts"):
        make_exit_norm(model(), prompts(1), num_layers=1, sampling=SAMPLING, vocab_size=19, budget_s=1e6)
    ticks = iter(range(10**6))
    with pytest.raises(ConfigError, match="give --budget more seconds"):
        made(budget_s=1.0, clock=lambda: float(next(ticks)))
