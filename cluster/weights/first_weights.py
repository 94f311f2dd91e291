"""The weights that a run begins with, read where their path is known and published as version 0."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import ray
from transformers import PreTrainedModel

from rlhfspec.cluster.weights.publish import PublishedWeights
from rlhfspec.core.config import Config
from rlhfspec.engine.drafters.head.head_weights import HeadWeights, load_head, require_fit
from rlhfspec.engine.drafters.head.mtp_weights import FoundMtp, load_mtp
from rlhfspec.engine.drafters.head.published_head import pack_head, rounded
from rlhfspec.engine.weights.causal_lm import DTYPES
from rlhfspec.engine.weights.chunks import WeightPacker, pack_weights
from rlhfspec.engine.weights.draft_vocabulary import fit_draft, foreign_ids
from rlhfspec.engine.weights.loading import (
    load_causal_lm,
    load_hf_config,
    load_tokenizer,
    num_token_ids,
    require_finite,
)
from rlhfspec.engine.weights.stored_weights import stored_weights


def load_and_put(config: Config, name: str, model: Literal["target", "draft"]) -> PublishedWeights:
    """Read a model here, where its path is known, and publish it as version 0 of `model`.

    Where its files name every weight as the model does, no model is built: a bucket at a time passes through.
    """
    models = config.models
    hf_config = load_hf_config(name, trust_remote_code=models.trust_remote_code)
    stored = stored_weights(name, hf_config, models.dtype)
    is_foreign = model == "draft" and bool(_draft_ids(config, name)[0])
    if stored is None or is_foreign:
        if is_foreign:
            loaded = load_draft_model(config, name)
        else:
            loaded = load_causal_lm(name, models.dtype, trust_remote_code=models.trust_remote_code)
        manifest, chunks = pack_weights(loaded, name=model, weight_version=0)
        return PublishedWeights(manifest=manifest, chunk_refs=tuple(ray.put(chunk) for chunk in chunks))
    dtype = DTYPES[models.dtype]
    # as published: what is finite in its file may not be when it is rounded
    require_finite(name, ((key, tensor.to(dtype)) for key, tensor in stored.tensors()))
    packer = WeightPacker(
        name=model,
        weight_version=0,
        hf_config_json=stored.hf_config_json,
        dtypes=dict.fromkeys(stored.tensor_names, dtype),
        rooms=1,
    )
    refs = tuple(ray.put(chunk) for chunk in packer.chunks(stored.tensors()))
    return PublishedWeights(manifest=packer.manifest(), chunk_refs=refs)


def load_draft_model(config: Config, name: str) -> PreTrainedModel:
    """Load a draft model as it is published: with rows for the target's tokens, its own ones marked.

    Raises ModelError: it cannot be loaded, or its tokenizer has other tokens at the target's ids.
    """
    models = config.models
    foreign, num_ids = _draft_ids(config, name)
    loaded = load_causal_lm(name, models.dtype, trust_remote_code=models.trust_remote_code)
    return fit_draft(loaded, foreign, num_ids=num_ids)


def _draft_ids(config: Config, name: str) -> tuple[list[int], int]:
    """The ids that only one of draft and target has, and how many the target has."""
    models, trust = config.models, config.models.trust_remote_code
    tokenizer = load_tokenizer(models.tokenizer or models.target, trust_remote_code=trust)
    return foreign_ids(tokenizer, load_tokenizer(name, trust_remote_code=trust)), num_token_ids(tokenizer)


def first_draft(config: Config) -> PublishedWeights | None:
    """Read and publish what drafts: a model of its own, a head or an MTP layer; None: none does. Raises ModelError."""
    drafter, name = config.speculation.drafter, config.models.draft
    if drafter == "mtp":
        return put_head(read_mtp(config).head, weight_version=0)
    if drafter == "head" and name is not None:
        return put_head(read_head(config, Path(name)), weight_version=0)
    return load_and_put(config, name, "draft") if drafter == "model" and name is not None else None


def read_head(config: Config, folder: Path) -> HeadWeights:
    """Read a draft head in the type it is published in. Raises ModelError."""
    models = config.models
    target = load_hf_config(models.target, trust_remote_code=models.trust_remote_code).get_text_config()
    head = load_head(folder.expanduser(), num_target_layers=int(target.num_hidden_layers))
    # what is trained is published as it is trained
    return rounded(head, DTYPES["float32" if config.trains_head else models.dtype])


def read_mtp(config: Config) -> FoundMtp:
    """Read the MTP layer of the target's checkpoint, or of the one that models.draft names, as it is published.

    Raises ModelError: it has none, or one that does not fit the target.
    """
    models = config.models
    name, trust = mtp_checkpoint(config), models.trust_remote_code
    found = load_mtp(name, load_hf_config(name, trust_remote_code=trust))
    require_fit(found.head.config, load_hf_config(models.target, trust_remote_code=trust))
    return replace(found, head=rounded(found.head, DTYPES[models.dtype]))


def mtp_checkpoint(config: Config) -> str:
    """Return where the MTP layer stands."""
    return config.models.draft or config.models.target


def put_head(head: HeadWeights, *, weight_version: int) -> PublishedWeights:
    """Put a head into the object store as a version of `draft`. Raises NotFiniteError."""
    manifest, chunks = pack_head(head, weight_version=weight_version)
    return PublishedWeights(manifest=manifest, chunk_refs=tuple(ray.put(chunk) for chunk in chunks))
