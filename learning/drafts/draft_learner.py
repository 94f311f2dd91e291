"""A draft model that learns to follow its target: what a refit and co-training have in common.

Weights that turn out worse, or are not finite, are given up: the former ones come back, Adam begins anew, and learning
goes on at half the rate (`LearningRate`).
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...core.config import DrafterTrainingConfig
from ...core.errors import ConfigError
from ...core.files import storage_errors
from ...engine.weights.causal_lm import PreTrainedModel
from ...engine.weights.chunks import not_finite, unique_tensors
from ..training.trainer_core import Trainer, small_trainer
from ..training.training_forward import prepare_for_training
from .held_out import LearningRate

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


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTerms:
    """What a draft model learns under, whenever it does."""

    settings: DrafterTrainingConfig
    temperature: float
    vocab_size: int
    "token ids that take part"
    pad_token_id: int = 0
    seed: int = 0
    "of the order of a refit's batches"
    weight_version: int = 0
    "that it begins with"
    compute_dtype: torch.dtype = torch.float32


class DraftLearner:
    """Holds the draft model and its optimizer from one update to the next."""

    def __init__(self, model: PreTrainedModel, terms: DraftTerms) -> None:
        self.model, self._terms = model, terms
        self.weight_version = terms.weight_version
        self._rate = LearningRate(terms.settings.learning_rate)
        self._before: list[Tensor] = []
        self._begin_anew()

    def weights(self) -> Generator[tuple[str, Tensor]]:
        """The draft model's weights to be published, in name order."""
        yield from unique_tensors(self.model)

    def save(self, path: Path) -> None:
        """Write all that goes on from here into a file. Raises StorageError."""
        tensors = {name: value.contiguous() for name, value in _tensors_of(self._trainer).items()}
        with storage_errors(path):
            save_file(tensors, path, metadata={_KEY: json.dumps(self._facts())})

    def load(self, path: Path) -> None:
        """Go on where `save` was called. Raises ConfigError: it does not fit."""
        self._begin_anew()
        try:
            with safe_open(path, "pt") as file:
                facts = json.loads(file.metadata()[_KEY])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            _put(tensors, self._trainer)
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
        prepare_for_training(self.model, gradient_checkpointing=False)
        self.model.zero_grad(set_to_none=True)
        self._trainer = small_trainer(self.model, learning_rate=self._rate.full, warmup_steps=WARMUP_STEPS)
        self._trainer.learning_rate = self._rate.now


def _tensors_of(trainer: Trainer) -> dict[str, Tensor]:
    """Weights and the optimizer's moments by name, to be read only."""
    found = {"num_steps": torch.tensor(trainer.num_steps)}
    for name, parameter in trainer.model.named_parameters():
        found[f"model.{name}"] = parameter.detach()
        for part, value in trainer.optimizer.state.get(parameter, {}).items():
            found[f"optimizer.{name}.{part}"] = value
    return found


@torch.no_grad()
def _put(state: Mapping[str, Tensor], trainer: Trainer) -> None:
    """Go on where `_tensors_of` was called. Raises ConfigError when it is another model's."""
    parameters = dict(trainer.model.named_parameters())
    shapes = {f"model.{name}": parameter.shape for name, parameter in parameters.items()}
    if shapes != {name: value.shape for name, value in state.items() if name.startswith("model.")}:
        raise ConfigError(
            "the saved draft model has other weights than this one; resume with the same models"
        )
    trainer.num_steps = int(state["num_steps"])
    trainer.optimizer.state.clear()
    for name, parameter in parameters.items():
        parameter.copy_(state[f"model.{name}"])
        prefix = f"optimizer.{name}."
        parts = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        if parts:
            # Adam counts its steps on the CPU
            trainer.optimizer.state[parameter] = {
                part: value.clone() if part == "step" else value.to(parameter.device, copy=True)
                for part, value in parts.items()
            }
