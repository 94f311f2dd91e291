"""What an update computes before its first step, in blocks of samples: at once, or each as soon as it is whole.

Log-probabilities of the reference, the policy's own, the critic's states: none depends on a step, so they may be
computed while the rollout's tail still runs. What a token's values round to may depend on the sequences that share
its forward, so a forward's company is fixed: a block is a number of samples that follow each other by sample index,
and its packs depend on it alone. Values are therefore the same bits whenever a block was computed. The engine's
forward rounds by a token's prefix alone, in any company.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
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
_BY_POLICY: tuple[Part, ...] = ("own", "states")
_BY_ENGINE: tuple[Part, ...] = ("engine", "reference")


def blocks(num_rows: int, size: int) -> list[list[int]]:
    """Rows in the order of their sample index, `size` at a time; the last block may be smaller."""
    return [list(range(start, min(start + size, num_rows))) for start in range(0, num_rows, size)]


@dataclass(slots=True, kw_only=True)
class _Block:
    """What is known of some samples; values are flat, one a response token, row-major."""

    ids: Tensor
    before_targets: Tensor
    values: dict[Part, Tensor] = field(default_factory=dict)
    states: OwnStates | None = None

    def lacks(self, parts: Iterable[Part]) -> list[Part]:
        known = self.values.keys() | ({"states"} if self.states is not None else set())
        return [part for part in parts if part not in known]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstValues:
    """Of a whole batch."""

    logprobs: dict[Part, Float[Tensor, "B R"]]
    "padded with zeros; by part, without states"
    states: OwnStates | None
    num_ahead: int
    "samples of which everything was there before it was asked for"


@dataclass(slots=True, kw_only=True)
class FirstForwards:
    """Computes them, and keeps what was computed ahead until it is forgotten."""

    forward: PolicyForward
    model: PreTrainedModel
    reference: PreTrainedModel | None
    adapter: Adapter | None
    scorer: EngineScorer | None
    weights: Callable[[], Iterator[tuple[str, Tensor]]]
    "the policy's, as they are published; collective"
    block_size: int
    _kept: dict[tuple[int, ...], _Block] = field(default_factory=dict)

    def ahead(self, experience: Experience, parts: Sequence[Part]) -> None:
        """Compute and keep the values of one block: all of it, and nothing else. Collective."""
        key = experience.sample_indices
        block = self._known(key, experience, list(range(len(key))))
        self._kept[key] = block
        self._fill([block], [list(range(len(key)))], experience, parts)

    def of(self, experience: Experience, parts: Sequence[Part]) -> FirstValues:
        """The values of a batch; what is missing is computed. Collective."""
        rows_of = blocks(len(experience.lengths), self.block_size)
        found = [
            self._known(tuple(experience.sample_indices[row] for row in rows), experience, rows)
            for rows in rows_of
        ]
        num_ahead = sum(
            len(rows) for block, rows in zip(found, rows_of, strict=True) if parts and not block.lacks(parts)
        )
        self._fill(found, rows_of, experience, parts)
        whole: dict[Part, Tensor] = {
            part: padded(torch.cat([block.values[part] for block in found]), experience.mask)
            for part in parts
            if part != "states"
        }
        states = _joined(found) if "states" in parts else None
        return FirstValues(logprobs=whole, states=states, num_ahead=num_ahead)

    def forget(self) -> None:
        """Weights changed, or will: nothing that was computed ahead holds any more."""
        self._kept.clear()

    def _known(self, key: tuple[int, ...], experience: Experience, rows: list[int]) -> _Block:
        """What is kept of these samples, if they are the same to the token."""
        packed = experience.packed(rows)
        block = self._kept.get(key)
        if (
            block is None
            or not torch.equal(block.ids, packed.ids)
            or not torch.equal(block.before_targets, packed.before_targets)
        ):
            block = _Block(ids=packed.ids, before_targets=packed.before_targets)
        return block

    def _fill(
        self,
        found: Sequence[_Block],
        rows_of: Sequence[list[int]],
        experience: Experience,
        parts: Sequence[Part],
    ) -> None:
        for block, rows in zip(found, rows_of, strict=True):
            missing = block.lacks(parts)
            if any(part in _BY_POLICY for part in missing):
                own, states = self.forward.values(
                    self.model,
                    experience,
                    rows,
                    with_logprobs="own" in missing,
                    with_states="states" in missing,
                )
                if own is not None:
                    block.values["own"] = own
                block.states = states or block.states
            if "reference" in missing and self.scorer is None:
                with nullcontext() if self.adapter is None else self.adapter.switched_off():
                    values, _ = self.forward.values(self.reference or self.model, experience, rows)
                assert values is not None
                block.values["reference"] = values
        if self.scorer is not None:
            self._score(self.scorer, found, rows_of, experience, parts)

    def _score(
        self,
        scorer: EngineScorer,
        found: Sequence[_Block],
        rows_of: Sequence[list[int]],
        experience: Experience,
        parts: Sequence[Part],
    ) -> None:
        """By the engine's forward, whatever is missing at once: weights are loaded once for all of it."""
        wanted: list[Part] = [part for part in _BY_ENGINE if part in parts]
        # whose weights are there already comes first
        for part in sorted(wanted, key=lambda part: part != scorer.holds):
            missing = [
                (block, rows) for block, rows in zip(found, rows_of, strict=True) if block.lacks([part])
            ]
            rows = [row for _, of_block in missing for row in of_block]
            if not rows:
                continue
            if scorer.holds != part:
                scorer.load(self.weights() if part == "engine" else self._reference_weights(), name=part)
            trainers = self.forward.trainers
            mine = [
                row
                for pack in self.forward.packs(rows, experience)
                if not pack.is_filler
                for row in pack.rows
            ]
            scored = trainers.sum(scorer.logprobs(experience, sorted(mine)))
            for block, of_block in missing:
                block.values[part] = scored[of_block][experience.mask[of_block]]

    def _reference_weights(self) -> Iterator[tuple[str, Tensor]]:
        trainers = self.forward.trainers
        if self.reference is not None:
            return trainers.tensors(self.reference)
        assert self.adapter is not None, "KL control has a reference, or adapters to take off"
        return self.adapter.base_tensors(trainers.tensors(self.model))


def _joined(found: Sequence[_Block]) -> OwnStates:
    """The blocks' states, places counted over the whole batch."""
    places, states, before = [], [], 0
    for block in found:
        assert block.states is not None
        places.append(block.states.places + before)
        states.append(block.states.states)
        before += len(block.before_targets)
    return OwnStates(places=torch.cat(places), states=torch.cat(states))
