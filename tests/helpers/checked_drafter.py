"""A drafter whose cache is compared, before every draft, with a dense forward over the committed tokens."""

import copy

import numpy as np
import torch
from transformers import PreTrainedModel

from rlhfspec.core.decode_records import Budget
from rlhfspec.engine.decoding.draft_tree import DraftTree
from rlhfspec.engine.decoding.noise import HashedNoise
from rlhfspec.engine.decoding.running_batch import RunningBatch
from rlhfspec.engine.drafters.model_drafter import ModelDrafter
from rlhfspec.engine.drafters.refinement import Refinement
from rlhfspec.engine.engine import Engine


class CheckedDrafter(ModelDrafter):
    """Drafts as a model drafter does."""

    def __init__(self, drafter: ModelDrafter, draft: PreTrainedModel) -> None:
        super().__init__(drafter.runner, max_prefill_tokens=96)
        self.errors: list[float] = []
        "largest difference of a slot's cache, draft after draft"
        self._plain = copy.deepcopy(draft)
        self._plain.set_attn_implementation("eager")

    def draft(
        self,
        batch: RunningBatch,
        budget: Budget,
        noise: torch.Tensor | HashedNoise,
        refinement: Refinement | None = None,
    ) -> DraftTree:
        for slot in range(len(batch)):
            if count := self.num_cached_tokens(slot):
                assert count < batch.lengths[slot], "the root is computed with the draft"
                self.errors.append(self._error(slot, batch.tokens[slot, :count]))
        return super().draft(batch, budget, noise, refinement)

    @torch.inference_mode()
    def _error(self, slot: int, token_ids: np.ndarray) -> float:
        """Of values, and of the keys' lengths: a rotation may order a key's elements as it likes."""
        ids = torch.from_numpy(np.asarray(token_ids))[None]
        layers = self._plain(input_ids=ids, use_cache=True).past_key_values.layers
        keys, values = (
            torch.stack([getattr(layer, kind)[0] for layer in layers]) for kind in ("keys", "values")
        )
        cached = self.cache.range_of(slot, 0, len(token_ids))
        of_keys = cached[:, 0].norm(dim=-1) - keys.norm(dim=-1)
        return max(of_keys.abs().max().item(), (cached[:, 1] - values).abs().max().item())


def checked(
    engine: Engine, draft: PreTrainedModel, kind: type[CheckedDrafter] = CheckedDrafter
) -> tuple[Engine, CheckedDrafter]:
    """Return an engine with a checked drafter in place of a new engine's own, made of `draft`."""
    assert isinstance(engine.drafter, ModelDrafter)
    drafter = kind(engine.drafter, draft)
    return (
        Engine(
            engine.runner,
            drafter=drafter,
            policy=engine.policy,
            scorer=engine.scorer,
            max_total_tokens=engine.max_total_tokens,
            max_prefill_tokens=96,
        ),
        drafter,
    )
