"""What was written is what was learned: a saved model, read again by transformers itself, says what its trainer says.

Weights are compared by the checksum that they were published under, config and end tokens by value, and the model as a
whole by log-probabilities of a few tokens, which the trainer computes by its own forward from its own weights.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig

from ...core.errors import ModelError, NotAsLearned
from ...engine.weights.causal_lm import PreTrainedModel
from ...engine.weights.chunks import model_checksum
from ...engine.weights.generation_settings import FILE, as_ids
from ...engine.weights.left_over import require_taken
from ...engine.weights.loading import load_hf_config
from ...engine.weights.weight_files import first_line, require_all_weights
from .batching import PackedSequences
from .training_forward import response_statistics

SEQUENCES, TOKENS = 2, 96
"How many are asked for, and of how many tokens at most: a forward of a second."
TOLERATED = {torch.float32: 1e-3}
"Mean difference of log-probabilities in nats, up to which two forwards of equal weights differ by rounding."
TOLERATED_OF_HALF = 0.1
"The same where weights are published, or products computed, in 16 bits."
_OF_SAVING = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version")
"Keys of a config that saving sets."


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """Log-probabilities, at temperature 1 over all ids, of all tokens but the first of each sequence."""

    sequences: tuple[tuple[int, ...], ...]
    log_probs: Float[Tensor, " M"]
    compute_dtype: torch.dtype = torch.float32
    weight_version: int | None = None
    "of the weights that they are by"


def few_of(sequences: Iterable[Any]) -> tuple[tuple[int, ...], ...]:
    """The beginnings of some sequences, lists or arrays of ids, to compare by."""
    several = islice((ids for ids in sequences if len(ids) > 1), SEQUENCES)
    return tuple(tuple(int(token) for token in ids[:TOKENS]) for ids in several)


@torch.no_grad()
def said_by(
    model: PreTrainedModel,
    sequences: tuple[tuple[int, ...], ...],
    *,
    compute_dtype: torch.dtype = torch.float32,
    keeps_casts: bool = True,
    weight_version: int | None = None,
) -> Said:
    """What a model in training says, by the forward it learns with. Collective where its weights are in shards."""
    values = []
    for ids in sequences:
        learned = np.arange(len(ids)) > 0
        found = response_statistics(
            model,
            PackedSequences.of([np.array(ids)], [learned]),
            int(model.config.get_text_config().vocab_size),
            1.0,
            entropy=False,
            compute_dtype=compute_dtype,
            keeps_casts=keeps_casts,
        )
        values.append(found.logprobs.float().cpu())
    return Said(
        sequences=sequences,
        log_probs=torch.cat(values) if values else torch.zeros(0),
        compute_dtype=compute_dtype,
        weight_version=weight_version,
    )


@torch.no_grad()
def own_log_probs(model: Any, sequences: Collection[Sequence[int]]) -> Float[Tensor, " M"]:
    """The same by transformers' own forward, in float32."""
    values = []
    with _in_float32(model):
        for ids in sequences:
            row = torch.tensor([list(ids)], device=model.device)
            logits = model(row, use_cache=False).logits[0, :-1].float()
            values.append(logits.log_softmax(-1).gather(1, row[0, 1:, None])[:, 0].cpu())
    return torch.cat(values) if values else torch.zeros(0)


def require_reloads(
    folder: Path,
    *,
    config: Any = None,
    checksum: str = "",
    generation: GenerationConfig | None = None,
    said: Said | None = None,
    auto_class: Any = AutoModelForCausalLM,
) -> None:
    """Read a saved model as any user will, and compare it with what was to be saved; what is not given is not compared.

    Args:
        folder: of the model.
        config: of the model that was saved.
        checksum: of its weights, as published.
        generation: the settings whose end tokens it shall have.
        said: what the trainer says.
        auto_class: that reads it.

    Raises:
        NotAsLearned: it cannot be read, or is another model.
    """
    where = f"the saved model {folder} is not what was learned"
    model = _loaded(folder, auto_class)
    if config is not None:
        _require_config(where, config, model.config)
    if generation is not None:
        _require_ends(where, folder, as_ids(generation.eos_token_id))
    if checksum and (got := model_checksum(model, like=checksum)) != checksum:
        raise NotAsLearned(f"{where}: its weights have checksum {got}, expected {checksum}")
    if said is not None and said.sequences:
        got = own_log_probs(model, said.sequences)
        apart = float((got - said.log_probs).abs().mean())
        dtypes = {model.dtype, said.compute_dtype}
        allowed = max(TOLERATED.get(dtype, TOLERATED_OF_HALF) for dtype in dtypes)
        # a NaN is not within it
        if not apart <= allowed:
            raise NotAsLearned(
                f"{where}: log-probabilities of {len(got)} tokens by transformers' {type(model).__name__} are "
                f"{apart:.2g} nats away from the trainer's in the mean; expected at most {allowed:g}"
            )


@contextmanager
def refused_kept(partial: Path, folder: Path) -> Iterator[None]:
    """Where the block says NotAsLearned of what shall be `folder`, keep it as `NAME-refused`, and say so."""
    try:
        yield
    except NotAsLearned as error:
        refused = folder.with_name(f"{folder.name}-refused")
        shutil.rmtree(refused, ignore_errors=True)
        partial.rename(refused)
        raise NotAsLearned(
            f"{str(error).replace(str(partial), str(folder))}; it was kept as {refused} and is not to be used; what "
            "stood there before, and the run's states, are as they were: resume from the last when this is fixed"
        ) from error


def _loaded(folder: Path, auto_class: Any) -> Any:
    with _refused(folder):
        # as we read it ourselves
        load_hf_config(str(folder))
        # weights are mapped from the files: this takes no memory of its own
        model, info = auto_class.from_pretrained(str(folder), dtype="auto", output_loading_info=True)
        require_all_weights(str(folder), info["missing_keys"], info["unexpected_keys"])
        require_taken(str(folder), model, info["unexpected_keys"])
    return model.eval()


@contextmanager
def _refused(folder: Path) -> Iterator[None]:
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # transformers raises whatever the files lead to
        why = str(error) if isinstance(error, ModelError) else first_line(error)
        raise NotAsLearned(f"the saved model {folder} cannot be read again: {why}") from error


def _require_config(where: str, expected: Any, got: Any) -> None:
    before, after = (_comparable(one.to_dict()) for one in (expected, got))
    odd = sorted(key for key in {*before, *after} if before.get(key) != after.get(key))
    if odd:
        raise NotAsLearned(
            f"{where}: '{odd[0]}' of its config.json is {after.get(odd[0])}, expected {before.get(odd[0])}"
        )


def _comparable(tree: Mapping[Any, Any]) -> dict[Any, Any]:
    """Without what saving sets, at any depth; JSON has no tuples."""
    kept = {key: one for key, one in tree.items() if key not in _OF_SAVING and one is not None}
    lists = {key: list(one) if isinstance(one, tuple) else one for key, one in kept.items()}
    return {key: _comparable(one) if isinstance(one, dict) else one for key, one in lists.items()}


def _require_ends(where: str, folder: Path, expected: Sequence[int]) -> None:
    got = as_ids(GenerationConfig.from_pretrained(str(folder)).eos_token_id)
    if set(got) != set(expected):
        raise NotAsLearned(f"{where}: its {FILE} ends a response at {got}, expected {list(expected)}")


@contextmanager
def _in_float32(model: nn.Module) -> Iterator[None]:
    """Let every module compute in float32, its own weights widened for the moment in which it is called."""

    def widen(module: nn.Module, _: Any) -> None:
        module.__dict__["_narrow"] = [(one, one.data) for one in module.parameters(recurse=False)]
        for one in module.parameters(recurse=False):
            one.data = one.data.float()

    def narrow(module: nn.Module, _: Any, __: Any) -> None:
        for one, data in module.__dict__.pop("_narrow"):
            one.data = data

    with ExitStack() as hooks:
        for module in model.modules():
            if any(one.dtype != torch.float32 for one in module.parameters(recurse=False)):
                hooks.enter_context(module.register_forward_pre_hook(widen))
                hooks.enter_context(module.register_forward_hook(narrow))
        yield
