"""The value head: a small network on the policy's last hidden states.

It reads the trunk without sending gradients into it: value errors, large at first, cannot disturb the
policy, the trunk is run only once a token, and no second model has to be held.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn


class ValueHead(nn.Module):
    """Normalised hidden state -> tanh layer -> one number; starts at zero."""

    def __init__(self, hidden_size: int, *, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.norm = nn.LayerNorm(hidden_size)
            self.inner = nn.Linear(hidden_size, hidden_size)
            self.outer = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    def forward(self, hidden: Float[Tensor, "M H"]) -> Float[Tensor, " M"]:
        """Return one value a position; no gradient reaches `hidden`."""
        inner = torch.tanh(self.inner(self.norm(hidden.detach().float())))
        return self.outer(inner).squeeze(-1)
