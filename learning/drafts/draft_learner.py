"""A draft model that learns to follow its target: what a refit and co-training have in common.

Weights that turn out worse, or are not finite, are given up: the former ones come back, Adam begins anew, and learning
goes on at half the rate (`LearningRate`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from rlhfspec.core.config import DrafterTrainingConfig
from rlhfspec.core.errors import ConfigError
from rlhfspec.core.files import storage_errors
from rlhfspec.engine.weights.chunks import not_finite, unique_tensors
from rlhfspec.learning.drafts.learning_rate import LearningRate
from rlhfspec.learning.trainer.next_token import SupervisedTrainer
from rlhfspec.learning.trainer.training_forward import prepare_for_training

WARMUP_STEPS = 10
_KEY = "refit"

Outcome = Literal["taken", "worse", "not_finite", "no_time", "one_sample"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RefitReport:
    """What became of one update's learning. Only the outcome `taken` changes weights and version."""

    outcome: Outcome
    weight_version: int
    "of the draft model, afterwards"
    num_steps: int = 0
    num_tokens: int = 0
    "response tokens learned from, repeated ones each time"
    kl_before: float | None = None
    "KL(target || draft) on the held-out slice, nats a token; None when not computed or not finite"
    kl_after: float | None = None
    "of the weights that were tried, taken or not"
    refit_s: float = 0.0


class DraftLearner:
    """Holds the draft model and its optimizer from one update to the next."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        settings: DrafterTrainingConfig,
        temperature: float,
        vocab_size: int,
        weight_version: int = 0,
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model = model
        self.weight_version = weight_version
        self._settings = settings
        self._temperature = temperature
        self._vocab_size = vocab_size
        self._compute_dtype = compute_dtype
        self._rate = LearningRate(settings.learning_rate)
        self._before: list[Tensor] = []
        self._begin_anew()

    def weights(self) -> Generator[tuple[str, Tensor]]:
        """The draft model's weights to be published, in name order."""
        yield from unique_tensors(self.model)

    def save(self, path: Path) -> None:
        """Write all that goes on from here into a file. Raises StorageError."""
        tensors = {name: value.contiguous() for name, value in self._trainer.state().items()}
        with storage_errors(path):
            save_file(tensors, path, metadata={_KEY: json.dumps(self._facts())})

    def load(self, path: Path) -> None:
        """Go on where `save` was called. Raises ConfigError: it does not fit."""
        self._begin_anew()
        try:
            with safe_open(path, "pt") as file:
                facts = json.loads(file.metadata()[_KEY])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            self._trainer.load_state(tensors)
            self._take_facts(facts)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{path} is no state of a draft model's training: {type(error).__name__}: {error}; resume from another"
            ) from error
        self._trainer.learning_rate = self._rate.now

    def _facts(self) -> dict[str, Any]:
        """What is saved beside the tensors, as JSON values."""
        return {"weight_version": self.weight_version, "rate_scale": self._rate.scale}

    def _take_facts(self, facts: Mapping[str, Any]) -> None:
        self.weight_version, self._rate.scale = int(facts["weight_version"]), float(facts["rate_scale"])

    def _remember(self) -> None:
        """Keep the weights that `_give_up` puts back; it and `_take` let go of them."""
        self._before = [parameter.detach().clone() for parameter in self.model.parameters()]

    def _is_finite(self) -> bool:
        return not not_finite(self.model.named_parameters())

    def _take(self) -> None:
        """What was learned is the next version."""
        self.weight_version += 1
        self._before = []
        self._rate.taken()
        self._trainer.learning_rate = self._rate.now

    def _give_up(self) -> None:
        """Put the weights of before back; Adam begins anew, since its moments are those of the lost ones."""
        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), self._before, strict=True):
                parameter.copy_(value)
        self._before = []
        self._rate.given_up()
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._trainer = SupervisedTrainer(self.model, learning_rate=self._rate.now, warmup_steps=WARMUP_STEPS)
        prepare_for_training(self.model, gradient_checkpointing=False)


def finite_or_none(value: float) -> float | None:
    """A number as reports have it."""
    return value if math.isfinite(value) else None
