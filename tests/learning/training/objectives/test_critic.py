"""The critic: what it sees of the past, and that it can learn to notice a slip."""

import math

import torch
from pytest import approx, mark

from rlhfspec.core.config import AlgorithmConfig, TrainerConfig
from rlhfspec.learning.training.objectives.critic import Critic, history_features
from rlhfspec.learning.training.policy_forward import OwnStates


def all_of(hidden):
    return OwnStates(places=torch.arange(len(hidden)), states=hidden)


def fit(critic, hidden, history, returns, **settings):
    own = all_of(hidden)
    return critic.fit(own, history, returns, critic.values(own, history), **settings)


def test_history_speaks_of_earlier_tokens_only():
    # probabilities 1/2, 1/4, 1/8; before each position: (1, 1), (1/2, 1/2), (1/8, 1/4)
    logprobs = torch.tensor([[0.5, 0.25, 0.125]]).log()
    features = history_features(logprobs, torch.ones(1, 3, dtype=torch.bool))[0]
    assert features[:, 0].tolist() == approx([1.0, 0.5, 0.125])
    assert features[:, 1].tolist() == approx([1.0, 0.5, 0.25])
    assert features[:, 2].tolist() == approx([0.0, math.log(2), math.log(3)])


def test_a_value_starts_at_zero_and_is_fitted_without_touching_the_trunk():
    critic = Critic(8, seed=0, learning_rate=1e-2, max_grad_norm=1.0, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 8, generator=generator, requires_grad=True)
    history = torch.rand(64, 3, generator=generator)
    assert critic.values(all_of(hidden), history).abs().max() == 0.0
    returns = (history[:, 1] > 0.5).float()
    losses = [
        fit(
            critic,
            hidden,
            history,
            returns,
            epochs=4,
            num_minibatches=4,
            clip_value=10.0,
            generator=generator,
        )
        for _ in range(30)
    ]
    assert losses[-1] < 0.2 * losses[0]
    assert hidden.grad is None


@mark.parametrize("hidden_size", [128, 576])
def test_the_default_settings_learn_within_a_few_iterations(hidden_size):
    trainer, algorithm = TrainerConfig(), AlgorithmConfig()
    generator = torch.Generator().manual_seed(0)
    critics = [
        Critic(
            hidden_size,
            seed=0,
            learning_rate=trainer.value_learning_rate,
            max_grad_norm=trainer.max_grad_norm,
            device=torch.device("cpu"),
        )
        for _ in range(2)
    ]
    direction = torch.randn(hidden_size, generator=generator) / hidden_size**0.5
    for _ in range(6):
        # 64 responses of 30 tokens; the mean of hidden states is far from zero, as a trunk's is
        hidden, history = (
            2.0 + torch.randn(1920, hidden_size, generator=generator),
            torch.rand(1920, 3, generator=generator),
        )
        half = ((hidden - 2.0) @ direction > 0.0).float()
        for critic, returns in zip(critics, (torch.ones(1920), half), strict=True):
            explained = returns - critic.values(all_of(hidden), history)
            fit(
                critic,
                hidden,
                history,
                returns,
                epochs=trainer.value_epochs,
                num_minibatches=2,
                clip_value=algorithm.clip_value,
                generator=generator,
            )
    assert critics[0].values(all_of(hidden), history).mean() == approx(1.0, abs=0.1)
    assert 1.0 - explained.var() / half.var() > 0.3, "of states that it had not been fitted to"


def test_the_clip_bounds_one_fit():
    # far from its target of 100, the head stops being pushed once it moved by more than the clip
    critic = Critic(8, seed=0, learning_rate=1e-2, max_grad_norm=1.0, device=torch.device("cpu"))
    hidden, history = torch.randn(16, 8), torch.zeros(16, 3)
    fit(
        critic,
        hidden,
        history,
        torch.full((16,), 100.0),
        epochs=60,
        num_minibatches=1,
        clip_value=0.2,
        generator=torch.Generator(),
    )
    assert 0.2 <= float(critic.values(all_of(hidden), history).mean()) < 1.0
