"""Forwards over rollouts: the tokens of each sample, none of padding, within a number of tokens a forward.

`FirstForwards` is what an update computes before its first step, in blocks of samples: log-probabilities of the
reference, the policy's own, the critic's states. What a token's values round to may depend on the sequences that share
its forward, so a forward's company is fixed: a block is a number of samples that follow each other by sample index, and
its packs depend on it alone. The engine's forward rounds by a token's prefix alone, in any company.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...engine.upload import upload
from ...engine.weights.causal_lm import PreTrainedModel
from .adapter import Adapter
from .batching import Pack, PackedSequences, shared_packs
from .engine_scoring import EngineScorer
from .experience import Experience
from .objectives.head_statistics import TeacherLogits
from .parallel import OneTrainer
from .training_forward import Statistics, response_logits, response_statistics


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnStates:
    """Last hidden states that predict response tokens of this trainer's rows; `m` of the batch's `M` tokens."""

    places: Int[Tensor, " m"]
    "of the tokens in the batch, row-major; ascending, on the CPU"
    states: Float[Tensor, "m H"]

    @classmethod
    def in_order(cls, places: Tensor, states: Tensor) -> OwnStates:
        """Put states that came in the order of packs into that of places."""
        order = places.argsort()
        (there,) = upload([order.numpy()], states.device)
        return cls(places=places[order], states=states[there])


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyForward:
    """How a learner computes: the same way for the policy, its hidden states and the reference."""

    vocab_size: int
    "token ids that take part; padded ones above do not"
    temperature: float
    max_tokens: int
    "in one forward"
    compute_dtype: torch.dtype
    "of matrix products"
    trainers: OneTrainer = field(default_factory=OneTrainer)

    def packs(self, rows: Sequence[int], experience: Experience) -> list[Pack]:
        """This trainer's share of some rows (the same ones for all trainers), as many packs as any trainer has."""
        rows = list(rows)
        packs = shared_packs([[experience.sequence(row)] for row in rows], self.max_tokens, self.trainers)
        return [Pack(rows=[rows[i] for i in pack.rows], is_filler=pack.is_filler) for pack in packs]

    def logits(
        self, model: PreTrainedModel, packed: PackedSequences, *, with_logits: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Logits [M, V] and hidden states [M, H] that predict the pack's targets; logits [0, V] where not wanted."""
        return response_logits(
            model,
            packed,
            self.vocab_size,
            compute_dtype=self.compute_dtype,
            with_logits=with_logits,
            keeps_casts=not self.trainers.is_sharded,
        )

    def statistics(
        self,
        model: PreTrainedModel,
        packed: PackedSequences,
        *,
        entropy: bool,
        learns_entropy: bool = False,
        logits: list[Tensor] | None = None,
        teacher: TeacherLogits | None = None,
    ) -> Statistics:
        """Of the pack's targets: log-probabilities, entropies, distances from a teacher, states that predict them.

        `logits`: a list that gets the logits too, [M, V], without a gradient.
        """
        return response_statistics(
            model,
            packed,
            self.vocab_size,
            self.temperature,
            entropy=entropy,
            learns_entropy=learns_entropy,
            compute_dtype=self.compute_dtype,
            keeps_casts=not self.trainers.is_sharded,
            logits=logits,
            teacher=teacher,
        )

    def rows_of(self, rows: Sequence[int], experience: Experience) -> list[int]:
        """Rows of this trainer's packs, those computed for nothing among them; each once."""
        return sorted({row for pack in self.packs(rows, experience) for row in pack.rows})

    @torch.no_grad()
    def least_entropy(
        self, model: PreTrainedModel, experience: Experience, rows: Sequence[int], share: float
    ) -> float:
        """What the tokens of highest entropy, that share of these rows' response tokens, have at least. Collective.

        As TRL has it over the rows of one step.
        """
        found = []
        for pack in self.packs(rows, experience):
            entropy = self.statistics(model, experience.packed(pack.rows), entropy=True).entropy
            found += [] if pack.is_filler or entropy is None else [entropy.float().cpu()]
        entropies = torch.cat(self.trainers.gather(torch.cat([torch.zeros(0), *found])))
        return float(torch.quantile(entropies, 1.0 - share)) if len(entropies) else 0.0

    @torch.no_grad()
    def values(
        self,
        model: PreTrainedModel,
        experience: Experience,
        rows: Sequence[int],
        *,
        with_logprobs: bool = True,
        with_states: bool = False,
    ) -> tuple[Float[Tensor, " M"] | None, OwnStates | None]:
        """Log-probabilities of some rows' response tokens, on the CPU, and the states that predict them.

        `M` tokens in row-major order. Log-probabilities are those of all trainers; each has the states of its own
        rows. Collective.
        """
        mask = experience.mask[list(rows)]
        place = torch.full(experience.mask.shape, -1)
        place[list(rows)] = padded(torch.arange(int(mask.sum())), mask)
        logprobs = torch.zeros(int(mask.sum()))
        found, places, states = [], [], []
        for pack in self.packs(rows, experience):
            packed = experience.packed(pack.rows)
            here = place[pack.rows][experience.mask[pack.rows]]
            if with_logprobs:
                of_pack = self.statistics(model, packed, entropy=False)
                hidden = of_pack.states
                if not pack.is_filler:
                    found.append((here, of_pack.logprobs.float()))
            else:
                _, hidden = self.logits(model, packed, with_logits=False)
            if with_states:
                empty = pack.is_filler
                places.append(here[:0] if empty else here)
                states.append(hidden[:0] if empty else hidden)
        if found:
            # read once: on a GPU every pack would be waited for
            logprobs[torch.cat([here for here, _ in found])] = torch.cat([flat for _, flat in found]).cpu()
        own = OwnStates.in_order(torch.cat(places), torch.cat(states)) if places else None
        return self.trainers.sum(logprobs) if with_logprobs else None, own


def padded(flat: Tensor, mask: Tensor) -> Tensor:
    """One number a real token, row-major, as [B, R] with zeros elsewhere."""
    out = torch.zeros(mask.shape, dtype=flat.dtype)
    out[mask] = flat
    return out


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
