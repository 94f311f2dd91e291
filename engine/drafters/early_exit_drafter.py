"""Drafts with the target's own first layers: no weights, no cache of its own (Zhang et al. 2024, 'Draft & Verify').

The target's head reads the state behind the first layers through the last norm, or one trained for it
(`engine.drafters.exit_norm`). What the draft writes into the
target's cache, the verification writes again: the root's and the nodes' first layers are computed twice.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from core.errors import ConfigError
from engine.cache.kv_pool import KVPool
from engine.decoding.running_batch import RunningBatch
from engine.drafters.cacheless import CachelessDrafter
from engine.drafters.exit_norm import ExitNorm, require_exit_fits
from engine.drafters.level_drafter import LevelDrafter, level_plan
from engine.model.forward_plan import TreePlan
from engine.model.runner import ModelRunner

SHARE = 3
"One layer in so many drafts, where nothing else is asked for."


def exit_depth(have: int, wanted: int) -> int:
    """Behind how many of a target's `have` layers the exit is; 0 wants a third. Raises ConfigError: too many."""
    depth = wanted or max(have // SHARE, 1)
    if not 1 <= depth < max(have, 2):
        raise ConfigError(
            f"expected speculation.exit_layers from 1 to {have - 1}, less than the target's layers, got {wanted}; 0 "
            "takes a third"
        )
    return depth


class EarlyExitDrafter(LevelDrafter, CachelessDrafter):
    """The first layers of the target, and its head."""

    def __init__(self, runner: ModelRunner, *, num_layers: int = 0, norm: ExitNorm | None = None) -> None:
        """Draft with the first `num_layers` layers; 0: those that the norm was trained for, else a third of all.

        Raises ConfigError: there are not so many, or the norm is of others; ModelError: it is of another target.
        """
        have = runner.pool.shape.num_layers
        self._gain: Tensor | None = None
        if norm is not None:
            require_exit_fits(norm, runner.model.config, exit_layers=num_layers)
            num_layers, self._gain = norm.num_layers, norm.gain.to(runner.device)
        self.num_layers = exit_depth(have, num_layers)
        self._runner = runner

    @property
    def pool(self) -> KVPool:
        """The target's, behind whose committed tokens a draft stands until it is verified."""
        return self._runner.pool

    def root_logits(self, batch: RunningBatch) -> Float[Tensor, "B V"]:
        """See `LevelDrafter`."""
        inputs = batch.inputs()
        base = inputs.lengths - 1
        plan = TreePlan(
            pool=self.pool,
            attention=self._runner.attention,
            base=base,
            num_tokens=1,
            view_tokens=int(batch.lengths[: len(batch)].max()),
        )
        return self._logits(inputs.last_tokens[:, -1], base, plan)

    def forward_level(
        self, batch: RunningBatch, ids: Tensor, seen: Tensor | None, depth: Tensor, parents: Tensor | None
    ) -> Float[Tensor, "B n V"]:
        """See `LevelDrafter`. Parents are seen in the cache."""
        plan, positions = level_plan(self.pool, self._runner.attention, batch, ids, seen, depth)
        return self._logits(ids.reshape(-1), positions.reshape(-1), plan).view(*ids.shape, -1)

    def _logits(self, ids: Tensor, positions: Tensor, plan: TreePlan) -> Tensor:
        # the target's own follows its updates
        gain = self._runner.model.base_model.norm.weight if self._gain is None else self._gain
        return self._runner.exit_logits(self.num_layers, gain, ids, positions, plan)
