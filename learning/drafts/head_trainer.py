"""Trains a draft head on features that the engine recorded, in steps that stop within milliseconds.

The head learns to put its probability where the target does, at the positions that the target's own responses have
visited, on every level that it is unrolled to: KL(target || head) over the draft vocabulary.

Source: Li et al. 2025, 'EAGLE-3', section 3.2 (several levels unrolled); Zhou et al. 2024, 'DistillSpec' (own
responses, forward KL).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ...core.errors import ConfigError
from ...engine.drafters.head.feature_recorder import FeatureSequence
from ...engine.drafters.head.head_weights import HeadWeights
from .features import PackedFeatures, Stretch, num_anchors, pack_stretches
from .head import HeadModule, TargetParts
from .soft_loss import LevelRows, SoftTargetLoss, TargetRows
from .stoppable import Products, StoppableAdam, Stopped
from .unrolled import unroll

LEVEL_WEIGHT = 0.8
"A level's weight in the loss over that of the level before (SpecForge's choice)."
WARMUP_STEPS = 10
PACK_ANCHORS = 256
"Anchors in one forward: what is held for the backward pass is theirs."


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one step learned from, by the weights before it."""

    num_anchors: int
    "positions that were drafted from"
    loss: float
    "weighted mean of KL(target || head) over levels, nats a token"
    level_losses: tuple[float, ...]
    "KL of each level, unweighted; 0 where no sequence is long enough for it"
    level_overlaps: tuple[float, ...]
    "mean sum of min(p, q) of each level: at most so often can exact drafting be right"
    needs: tuple[float, ...]
    "of each sequence that was given: share of its positions where level 1 is expected to fail; 0 without an anchor"
    grad_norm: float
    "before clipping; where it is not finite, no step was taken"

    @property
    def num_learned(self) -> int:
        """Positions that were learned from: none without a step."""
        return self.num_anchors if math.isfinite(self.grad_norm) else 0


class HeadTrainer:
    """Holds head and optimizer. What it reads of the target is never changed."""

    def __init__(
        self,
        head: HeadWeights,
        target: TargetParts,
        *,
        learning_rate: float,
        num_unrolled: int = 3,
        temperature: float = 1.0,
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        """Prepare on the device that the target is on.

        Args:
            head: what training begins with.
            target: what is learned from.
            learning_rate: of Adam, after a warm-up of some steps; `learning_rate` may be set between steps.
            num_unrolled: levels that are trained.
            temperature: that responses are sampled at; 0 learns as 1 does.
            compute_dtype: of products; weights are float32 (`stoppable.fastest_dtype`).

        Raises:
            ConfigError: a number is out of its range.
        """
        if num_unrolled < 1 or temperature < 0.0 or learning_rate <= 0.0:
            raise ConfigError(
                "a draft head's training expects num_unrolled of 1 or more, a temperature of 0 or more and a "
                f"learning_rate above 0, got {num_unrolled}, {temperature} and {learning_rate}"
            )
        self.module = HeadModule(head).to(target.embedding.device)
        self.learning_rate = learning_rate
        self._head = head
        self._dtype = compute_dtype
        self._num_unrolled = num_unrolled
        self._temperature = temperature or 1.0
        self.take_target(target)
        self._optimizer = StoppableAdam(dict(self.module.named_parameters()))

    def take_target(self, target: TargetParts) -> None:
        """Learn from these weights of the target from now on; call it when the target has changed."""
        self._embedding = target.embedding
        self._output_rows = target.output_weight[self.module.token_ids].to(self._dtype)
        self._final_gain, self._eps = target.final_norm_gain.float(), target.final_norm_eps

    @property
    def num_steps(self) -> int:
        """Optimizer steps taken."""
        return self._optimizer.num_steps

    @property
    def head(self) -> HeadWeights:
        """The head as it is now; a copy."""
        return self._head.with_trained(self.weights())

    def step(
        self, sequences: Sequence[FeatureSequence], should_stop: Callable[[], bool] = lambda: False
    ) -> StepReport | None:
        """Take one optimizer step on the mean over all anchors of some sequences.

        `should_stop` is asked before every product, forward, backward and in the optimizer. Returns None when it said
        so: nothing has changed then. Sequences without an anchor count for nothing; None too when none has one.
        """
        counts = [num_anchors(sequence) for sequence in sequences]
        if not sum(counts):
            return None
        try:
            work = _Step(self._num_unrolled, sequences, counts)
            products = Products(should_stop, self._dtype)
            for pack in pack_stretches(sequences, PACK_ANCHORS):
                self._learn(work, pack, products)
            rate = self.learning_rate * min(1.0, (self.num_steps + 1) / WARMUP_STEPS)
            return work.report(self._optimizer.step(rate, products))
        except Stopped:
            return None
        finally:
            self.module.zero_grad(set_to_none=True)

    @torch.no_grad()
    def evaluate(self, sequences: Sequence[FeatureSequence]) -> StepReport:
        """Report on a step that is not taken: nothing changes."""
        counts = [num_anchors(sequence) for sequence in sequences]
        work, products = _Step(self._num_unrolled, sequences, counts), Products(dtype=self._dtype)
        for pack in pack_stretches(sequences, PACK_ANCHORS):
            self._learn(work, pack, products)
        return work.report(0.0)

    def weights(self) -> dict[str, Tensor]:
        """Copies of the trained tensors by EAGLE-3's names, float32, on the CPU."""
        return self.module.weights()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from other weights of its names and shapes; the optimizer keeps its moments. Raises ConfigError."""
        parameters = dict(self.module.named_parameters())
        given = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
        wrong = sorted(
            name
            for name in parameters.keys() | given.keys()
            if name not in parameters or name not in given or parameters[name].shape != given[name].shape
        )
        if wrong:
            raise ConfigError(
                f"these weights are of another draft head: {', '.join(wrong[:3])} differ in name or shape; go on with "
                "the head that they were saved with"
            )
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(given[name])

    def forget_direction(self) -> None:
        """Let the next step's direction be its own gradient's: that of steps before it was wrong."""
        self._optimizer.forget_direction()

    def _learn(self, work: _Step, pack: Sequence[Stretch], products: Products) -> None:
        """Add the gradient of some anchors."""
        packed = PackedFeatures(work.sequences, self._embedding.device, stretches=pack)
        states = unroll(
            self.module,
            packed,
            embedding=self._embedding,
            num_levels=self._num_unrolled,
            products=products,
        )
        last = packed.target_states(len(states))
        last = F.rms_norm(last, self._final_gain.shape, self._final_gain, self._eps)
        target = TargetRows(
            states=last.to(self._dtype), weight=self._output_rows, temperature=self._temperature
        )
        levels = [
            LevelRows(targets=packed.level_rows(level + 1, len(states)), scale=work.scales[level])
            for level in range(len(states))
        ]
        losses = torch.zeros(len(states), device=last.device)
        overlaps = [torch.zeros(len(each), device=each.device) for each in states]
        normed = [products.watched(self.module.norm(each)) for each in states]
        loss: Tensor = SoftTargetLoss.apply(  # type: ignore[assignment]
            products, target, levels, losses, overlaps, self.module.lm_head.weight, *normed
        )
        if loss.requires_grad:
            loss.backward()
        work.add(pack, float(loss.detach()), losses, overlaps)


class _Step:
    """Sums over the packs of one step."""

    def __init__(self, num_levels: int, sequences: Sequence[FeatureSequence], counts: Sequence[int]) -> None:
        self.sequences, self.counts = sequences, counts
        self._totals = [sum(max(count - level, 0) for count in counts) for level in range(num_levels)]
        weights = [LEVEL_WEIGHT**level if total else 0.0 for level, total in enumerate(self._totals)]
        self.scales = [
            weight / sum(weights) / max(total, 1) for weight, total in zip(weights, self._totals, strict=True)
        ]
        self._losses = torch.zeros(num_levels, dtype=torch.float64)
        self._overlaps = torch.zeros(num_levels, dtype=torch.float64)
        self._overlap_of = [0.0] * len(sequences)
        self._loss = 0.0

    def add(self, pack: Sequence[Stretch], loss: float, losses: Tensor, overlaps: Sequence[Tensor]) -> None:
        """Count a pack in."""
        self._loss += loss
        self._losses[: len(losses)] += losses.cpu()
        for level, overlap in enumerate(overlaps):
            self._overlaps[level] += float(overlap.sum())
        of_first = overlaps[0].split([len(stretch.anchors) for stretch in pack])
        for stretch, overlap in zip(pack, of_first, strict=True):
            self._overlap_of[stretch.index] += float(overlap.sum())

    def report(self, grad_norm: float) -> StepReport:
        """All of it."""
        totals = torch.tensor(self._totals).clamp(min=1)
        needs = [
            1.0 - overlap / count if count else 0.0
            for overlap, count in zip(self._overlap_of, self.counts, strict=True)
        ]
        return StepReport(
            num_anchors=self._totals[0],
            loss=self._loss,
            level_losses=tuple((self._losses / totals).tolist()),
            level_overlaps=tuple((self._overlaps / totals).tolist()),
            needs=tuple(needs),
            grad_norm=grad_norm,
        )
