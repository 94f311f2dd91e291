"""How what has learned goes out: to instances as buckets, and as Hugging Face checkpoints, a model and its adapter."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
)
from transformers.initialization import no_init_weights
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ...core.checkpoint_manifest import write_manifest
from ...core.files import whole_folder
from ...core.weight_records import WeightManifest
from ...engine.weights.causal_lm import DTYPES, PreTrainedModel
from ...engine.weights.chunks import WeightPacker, checksum_of, load_into, model_checksum
from ...engine.weights.config_json import write_older_names
from ...engine.weights.generation_settings import as_ids, write_generation_settings
from ..data.chat.end_tokens import turn_end
from .reloaded import Said, refused_kept, require_reloads
from .trainer_core import Trainer


@dataclass(frozen=True, slots=True)
class PublishedForm:
    """Taken from the manifest of a model's first weights; the model itself learns in float32."""

    first: WeightManifest

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The type that each tensor is rounded to."""
        return {spec.name: torch.__dict__[spec.dtype] for spec in self.first.tensors}

    def packer(self, weight_version: int, **how: Any) -> WeightPacker:
        """What packs a version, by default in one buffer that is written over; `how`: see `WeightPacker`."""
        config, name = self.first.hf_config_json, self.first.model
        kept: dict[str, Any] = {"name": name, "hf_config_json": config, "dtypes": self.dtypes, "rooms": 1}
        return WeightPacker(weight_version=weight_version, **(kept | how))

    def checksum(self, weights: Iterable[tuple[str, Tensor]], *, like: str = "") -> str:
        """The checksum that the published weights have, of the kind of `like`; one tensor at a time is rounded."""
        dtypes = self.dtypes
        return checksum_of((tensor.detach().to(dtypes[name]) for name, tensor in weights), like=like)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelForm:
    """From what a checkpoint of a model is built: the config that it came with, before training changed it."""

    hf_config_json: str
    is_classifier: bool
    dtype: str
    generation_json: str | None = None
    "of its generation_config.json, where it generates"

    @classmethod
    def of(cls, model: PreTrainedModel, *, is_classifier: bool, dtype: str) -> ModelForm:
        """The form of a model that was just loaded."""
        said: Any = None if is_classifier else model.generation_config
        return cls(
            hf_config_json=model.config.to_json_string(use_diff=False),
            is_classifier=is_classifier,
            dtype=dtype,
            generation_json=said and said.to_json_string(use_diff=False),
        )

    @property
    def auto_class(self) -> Any:
        """Of transformers, which reads such a model."""
        return AutoModelForSequenceClassification if self.is_classifier else AutoModelForCausalLM

    def build(self) -> PreTrainedModel:
        """An empty module of it."""
        with no_init_weights():
            model = self.auto_class.from_config(
                AutoConfig.for_model(**json.loads(self.hf_config_json)), dtype=DTYPES[self.dtype]
            )
        model.tie_weights()
        return model.eval().requires_grad_(False)

    def generation_settings(self) -> GenerationConfig | None:
        """A copy of what the model came with; None where it does not generate."""
        if self.generation_json is None:
            return None
        return GenerationConfig.from_dict(json.loads(self.generation_json))


def save_model(
    learner: Trainer,
    form: ModelForm,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    said: Said | None = None,
) -> str:
    """Write model and tokenizer as `folder`, whole or not at all; the parameters' checksum.

    By the first trainer, while the others `accompany_weights`. Raises StorageError, NotFiniteError, NotAsLearned.
    """
    model: Any = form.build()
    settings = form.generation_settings()
    if settings is not None:
        _name_end(model.config, settings, tokenizer)
    load_into(model, {name: tensor.cpu() for name, tensor in learner.weights()}, copied=False)
    checksum = model_checksum(model)
    write_model_folder(
        model,
        tokenizer,
        folder,
        name="model",
        weight_version=learner.num_steps,
        checksum=checksum,
        generation=settings,
        said=said,
        auto_class=form.auto_class,
    )
    return checksum


def write_model_folder(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    name: str,
    weight_version: int,
    checksum: str,
    generation: GenerationConfig | None,
    said: Said | None = None,
    auto_class: Any = AutoModelForCausalLM,
) -> None:
    """Write model and tokenizer as `folder`, whole or not at all; an earlier one stays until then.

    `generation` is the generation_config.json that the model came with: end tokens stand there that nothing else names.
    What is written is read again (`require_reloads`); a folder that is another model is kept as `NAME-refused`.
    Raises StorageError, NotAsLearned.
    """
    with whole_folder(folder) as partial:
        model.save_pretrained(partial)
        write_older_names(partial / "config.json")
        write_generation_settings(generation, partial)
        tokenizer.save_pretrained(partial)
        with refused_kept(partial, folder):
            require_reloads(
                partial,
                config=model.config,
                checksum=checksum,
                generation=generation,
                said=said,
                auto_class=auto_class,
            )
        write_manifest(partial, model=name, weight_version=weight_version, parameter_checksum=checksum)


def _name_end(config: Any, settings: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Let generation_config.json name the tokenizer's end token before all others, and what closes a turn behind them.

    config.json names the tokenizer's, where none of the others is it.
    """
    end, closing, known = tokenizer.eos_token_id, turn_end(tokenizer), as_ids(settings.eos_token_id)
    named = [end, *known] if isinstance(end, int) and end not in known else [*known]
    if len(named) > len(known):
        config.eos_token_id = end
    if closing is not None and closing not in named:
        named.append(closing)
    if named != known:
        settings.eos_token_id = named if len(named) > 1 else named[0]


def write_adapter_folder(
    files: Mapping[str, bytes], folder: Path, *, weight_version: int, merged_checksum: str
) -> None:
    """Write an adapter's files, as peft wrote them, as `folder`, whole or not at all.

    Version and checksum are of the model that it is merged into; empty: it is not merged yet. Raises StorageError.
    """
    with whole_folder(folder) as partial:
        for name, content in files.items():
            (partial / name).write_bytes(content)
        write_manifest(
            partial, model="adapter", weight_version=weight_version, parameter_checksum=merged_checksum
        )
