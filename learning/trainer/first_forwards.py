"""What an update computes before its first step, in blocks of samples.

Log-probabilities of the reference, the policy's own, the critic's states. What a token's values round to may depend on
the sequences that share its forward, so a forward's company is fixed: a block is a number of samples that follow each
other by sample index, and its packs depend on it alone. The engine's forward rounds by a token's prefix alone, in any
company.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from rlhfspec.learning.trainer.adapter import Adapter
from rlhfspec.learning.trainer.engine_scoring import EngineScorer
from rlhfspec.learning.trainer.experience import Experience
from rlhfspec.learning.trainer.policy_forward import OwnStates, PolicyForward, padded

Part = Literal["reference", "own", "states", "engine"]
"The reference's log-probabilities, the policy's by the library's forward, its states, the policy's by the engine's."
_BY_ENGINE: tuple[Part, ...] = ("engine", "reference")


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstValues:
    """Of a whole batch."""

    logprobs: dict[Part, Float[Tensor, "B R"]]
    "padded with zeros; by part, without states"
    states: OwnStates | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstForwards:
    """Computes them."""

    forward: PolicyForward
    model: PreTrainedModel
    reference: PreTrainedModel | None
    adapter: Adapter | None
    scorer: EngineScorer | None
    weights: Callable[[], Iterator[tuple[str, Tensor]]]
    "the policy's, as they are published; collective"
    block_size: int

    def of(self, experience: Experience, parts: Sequence[Part]) -> FirstValues:
        """The values of a batch. Collective."""
        logprobs: dict[Part, list[Tensor]] = {}
        places, states, num_before = [], [], 0
        num_rows = len(experience.lengths)
        for start in range(0, num_rows, self.block_size):
            rows = list(range(start, min(start + self.block_size, num_rows)))
            if "own" in parts or "states" in parts:
                own, of_block = self.forward.values(
                    self.model,
                    experience,
                    rows,
                    with_logprobs="own" in parts,
                    with_states="states" in parts,
                )
                if own is not None:
                    logprobs.setdefault("own", []).append(own)
                if of_block is not None:
                    places.append(of_block.places + num_before)
                    states.append(of_block.states)
            if "reference" in parts and self.scorer is None:
                with nullcontext() if self.adapter is None else self.adapter.switched_off():
                    values, _ = self.forward.values(self.reference or self.model, experience, rows)
                assert values is not None
                logprobs.setdefault("reference", []).append(values)
            num_before += int(experience.mask[rows].sum())
        whole: dict[Part, Tensor] = {
            part: padded(torch.cat(values), experience.mask) for part, values in logprobs.items()
        }
        return FirstValues(
            logprobs=whole | self._by_engine(experience, parts),
            states=OwnStates(places=torch.cat(places), states=torch.cat(states)) if places else None,
        )

    def _by_engine(self, experience: Experience, parts: Sequence[Part]) -> dict[Part, Tensor]:
        """By the engine's forward, all rows at once: weights are loaded once for all of them."""
        scorer, trainers = self.scorer, self.forward.trainers
        if scorer is None:
            return {}
        packs = self.forward.packs(range(len(experience.lengths)), experience)
        mine = sorted(row for pack in packs if not pack.is_filler for row in pack.rows)
        scored: dict[Part, Tensor] = {}
        # whose weights are there already comes first
        for part in sorted(_BY_ENGINE, key=lambda part: part != scorer.holds):
            if part not in parts:
                continue
            if scorer.holds != part:
                scorer.load(self.weights() if part == "engine" else self._reference_weights(), name=part)
            values = trainers.sum(scorer.logprobs(experience, mine))
            scored[part] = padded(values[experience.mask], experience.mask)
        return scored

    def _reference_weights(self) -> Iterator[tuple[str, Tensor]]:
        trainers = self.forward.trainers
        if self.reference is not None:
            return trainers.tensors(self.reference)
        assert self.adapter is not None, "KL control has a reference, or adapters to take off"
        return self.adapter.base_tensors(trainers.tensors(self.model))
