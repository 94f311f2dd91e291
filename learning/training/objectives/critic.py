"""PPO's critic, a small network on the target's own hidden states and on how likely its tokens were; its advantages.

It reads the trunk without sending gradients into it, so value errors, large at first, cannot disturb the
target, no second model is held, and the states of a batch, computed once, serve many passes.

Beside the hidden state it sees the history of log-probabilities: an unlikely token is often a slip, and
a critic that notices it puts the blame on that token instead of the whole response.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from ....core.config import AlgorithmConfig, TrainerConfig
from ....engine.upload import upload
from ..experience import Experience
from ..parallel import OneTrainer
from ..policy_forward import OwnStates, padded
from .advantages import (
    discounted_returns,
    explained_variance,
    gae,
    token_rewards,
    whiten,
)
from .losses import clipped_value_loss

NUM_HISTORY = 3


def history_features(
    logprobs: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]
) -> Float[Tensor, "B R NUM_HISTORY"]:
    """Features of the tokens before each position, all between 0 and 1 but the last.

    exp of the sum of their log-probabilities, exp of the smallest one, and log(1 + how many).
    """
    before = torch.zeros_like(logprobs)
    before[:, 1:] = torch.where(mask, logprobs, torch.zeros_like(logprobs))[:, :-1]
    count = torch.arange(logprobs.shape[1], dtype=torch.float32).expand_as(before)
    smallest = before.cummin(dim=1).values
    return torch.stack([before.cumsum(dim=1).exp(), smallest.exp(), torch.log1p(count)], dim=-1)


class ValueHead(nn.Module):
    """Normalised hidden state and history -> tanh layer -> one number; starts at zero."""

    def __init__(self, hidden_size: int, *, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.norm = nn.LayerNorm(hidden_size)
            self.from_hidden = nn.Linear(hidden_size, hidden_size)
            self.from_history = nn.Linear(NUM_HISTORY, hidden_size, bias=False)
            self.outer = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    def forward(self, hidden: Float[Tensor, "M H"], history: Float[Tensor, "M F"]) -> Float[Tensor, " M"]:
        """Return one value a position; no gradient reaches `hidden`."""
        inner = self.from_hidden(self.norm(hidden.detach().float())) + self.from_history(history)
        return self.outer(torch.tanh(inner)).squeeze(-1)


class Critic:
    """Value head and its optimizer. Fitted after the advantages of a batch are taken, for the next one.

    Of several trainers each computes the tokens whose states it has: values are summed into one batch's, gradients
    before each step, and the heads stay equal.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        seed: int,
        learning_rate: float,
        max_grad_norm: float,
        device: torch.device,
        trainers: OneTrainer | None = None,
    ) -> None:
        self.head = ValueHead(hidden_size, seed=seed).to(device)
        self.optimizer = torch.optim.AdamW(self.head.parameters(), lr=learning_rate, weight_decay=0.0)
        self.max_grad_norm = max_grad_norm
        self._trainers = trainers or OneTrainer()

    @torch.no_grad()
    def values(self, own: OwnStates, history: Float[Tensor, "M F"]) -> Float[Tensor, " M"]:
        """The values of a batch's `M` states, of which this trainer has its own; on the CPU. Collective."""
        out = torch.zeros(len(history))
        if len(own.places):
            (mine,) = upload([history[own.places].numpy()], own.states.device)
            out[own.places] = self.head(own.states, mine).cpu()
        return self._trainers.sum(out)

    def fit(
        self,
        own: OwnStates,
        history: Float[Tensor, "M F"],
        returns: Float[Tensor, " M"],
        old_values: Float[Tensor, " M"],
        *,
        epochs: int,
        num_minibatches: int,
        clip_value: float,
        generator: torch.Generator,
    ) -> float:
        """Regress on the returns; return the mean loss of the first pass. Collective.

        `old_values` are those of `values`. Minibatches are of all tokens of the batch; each trainer computes those
        that it has.
        Source: Schulman et al. 2017, equation 9 (the value term), apart from the target's updates as in
        Cobbe et al. 2021, 'Phasic policy gradient', section 2.
        """
        num_tokens = len(returns)
        row_of = torch.full((num_tokens,), -1)
        row_of[own.places] = torch.arange(len(own.places))
        orders = [torch.randperm(num_tokens, generator=generator) for _ in range(epochs)]
        parts = [part for order in orders for part in order.tensor_split(num_minibatches) if len(part)]
        rows_of = [rows[rows >= 0].numpy() for rows in (row_of[part] for part in parts)]
        mine = (tensor[own.places].numpy() for tensor in (history, returns, old_values))
        history, returns, old_values, *sent = upload([*mine, *rows_of], own.states.device)
        parameters = list(self.head.parameters())
        losses: list[Tensor] = []
        for part, rows in zip(parts, sent, strict=True):
            values = self.head(own.states[rows], history[rows])
            loss = clipped_value_loss(values, old_values[rows], returns[rows], clip_value=clip_value).sum()
            loss = loss / len(part)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self._trainers.sum_whole(parameters)
            torch.nn.utils.clip_grad_norm_(parameters, self.max_grad_norm)
            self.optimizer.step()
            losses.append(loss.detach())
        # read once: on a GPU every single number would be a wait
        return float(self._trainers.sum(torch.stack(losses[: len(losses) // epochs])).mean())


def ppo_advantages(
    critic: Critic,
    experience: Experience,
    own: OwnStates,
    penalty: Float[Tensor, "B R"],
    learned: Bool[Tensor, " B"],
    *,
    algorithm: AlgorithmConfig,
    trainer: TrainerConfig,
    generator: torch.Generator,
    metrics: dict[str, float],
) -> Float[Tensor, "B R"]:
    """GAE under the critic as it is; then the critic learns from this batch, for the next one.

    The critic's returns are undiluted by lambda (lambda = 1), the target's advantages are not.
    Source: Yuan et al. 2025, 'What's behind PPO's collapse in long-CoT?', section 4 (decoupled GAE).

    Args:
        critic: is fitted.
        experience: the batch, `M` response tokens in all.
        own: states that predict its tokens, of this trainer's rows.
        penalty: what each token's reward is lowered by.
        learned: responses that are part of the loss; over them advantages are whitened. The critic learns from all.
        algorithm: gamma, lambda, what a truncated response is.
        trainer: passes and minibatches of the critic.
        generator: orders the critic's minibatches.
        metrics: gets explained_variance and value_loss.
    """
    mask = experience.mask
    history = history_features(experience.old_logprobs, mask)[mask]
    flat_values = critic.values(own, history)
    values = padded(flat_values, mask)
    after = _values_after(values, experience) if algorithm.truncated == "bootstrap" else None
    rewards = token_rewards(experience, penalty)
    advantages, _ = gae(
        rewards, values, mask, gamma=algorithm.gamma, lam=algorithm.gae_lambda, last_values=after
    )
    returns = discounted_returns(rewards, mask, gamma=algorithm.gamma, last_values=after)
    metrics["explained_variance"] = explained_variance(values, returns, mask)
    metrics["value_loss"] = critic.fit(
        own,
        history,
        returns[mask],
        flat_values,
        epochs=trainer.value_epochs,
        num_minibatches=-(-len(mask) // trainer.minibatch_size),
        clip_value=algorithm.clip_value,
        generator=generator,
    )
    return whiten(advantages, mask & learned[:, None]) if algorithm.whiten_advantages else advantages


def _values_after(values: Float[Tensor, "B R"], experience: Experience) -> Float[Tensor, " B"]:
    """What a response that was cut would still have got; 0 of one that ended.

    The value before its last token stands for the one after it, whose state no forward has computed.
    Source: Pardo et al. 2018, 'Time limits in reinforcement learning', section 3.
    """
    places = torch.arange(values.shape[1]).expand_as(values)
    last = torch.where(experience.mask, places, 0).amax(dim=1)
    return torch.where(experience.truncated, values[torch.arange(len(values)), last], 0.0)
