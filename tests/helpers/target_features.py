"""Hidden states of a target for given sequences, by a forward of its Hugging Face module.

For responses that no engine of ours recorded (`engine.drafters.head.feature_recorder` does while it decodes).
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhfspec.engine.drafters.head.feature_recorder import FeatureSequence


class TargetFeatures:
    """Listens to a model's layers while it is open; close it (or use `with`) to let the model go."""

    def __init__(
        self, model: PreTrainedModel, taps: tuple[int, ...], *, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self._base: Any = model.base_model
        self._taps, self._dtype = taps, dtype
        self._seen: dict[int | str, Tensor] = {}
        places: list[tuple[int | str, nn.Module]] = [
            (tap, self._base.layers[tap]) for tap in sorted(set(taps))
        ]
        places.append(("last", self._base.norm))
        self._hooks = [module.register_forward_pre_hook(self._keep(name)) for name, module in places]

    def __enter__(self) -> TargetFeatures:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take the listeners off the model."""
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def of(self, prompt: np.ndarray, response: np.ndarray) -> FeatureSequence:
        """Return what one sequence gives a head to learn from; [T] token ids, both at least one."""
        token_ids = np.concatenate([prompt, response]).astype(np.int64)
        ids = torch.from_numpy(token_ids[None, :-1]).to(next(self._base.parameters()).device)
        self._base(ids, use_cache=False)
        taps = torch.cat([self._seen[tap][0] for tap in self._taps], dim=-1)
        last = self._seen["last"][0, len(prompt) - 1 :]
        self._seen.clear()
        return FeatureSequence(
            token_ids=token_ids,
            prompt_length=len(prompt),
            taps=taps.to("cpu", self._dtype, copy=True),
            last=last.to("cpu", self._dtype, copy=True),
        )

    def _keep(self, name: int | str) -> Any:
        def hook(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            self._seen[name] = args[0]

        return hook
