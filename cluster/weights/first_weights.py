"""Weights that are read from files, where their path is known: those that a run begins with, as version 0."""

from __future__ import annotations

import ray
from transformers import PreTrainedModel

from ...core.settings.run import ModelsConfig
from ...engine.drafters.head.head_weights import HeadWeights
from ...engine.drafters.head.published_head import pack_head
from ...engine.weights.causal_lm import DTYPES
from ...engine.weights.chunks import PublishedName, WeightPacker, pack_weights
from ...engine.weights.loading import load_causal_lm, load_hf_config, require_finite
from ...engine.weights.stored_weights import stored_weights
from ..plan.drafts import DraftModel, Drafts
from .publish import PublishedWeights


def load_and_put(
    name: str, model: PublishedName, models: ModelsConfig, *, weight_version: int = 0
) -> PublishedWeights:
    """Read the causal LM `name` here, where its path is known, and publish it as a version of `model`.

    Where its files name every weight as the model does, no model is built: a bucket at a time passes through.
    """
    trust = models.trust_remote_code
    stored = stored_weights(name, load_hf_config(name, trust_remote_code=trust), models.dtype)
    if stored is None:
        return _put_model(load_causal_lm(name, models.dtype, trust_remote_code=trust), model, weight_version)
    dtype = DTYPES[models.dtype]
    # as published: what is finite in its file may not be when it is rounded
    require_finite(name, ((key, tensor.to(dtype)) for key, tensor in stored.tensors()))
    packer = WeightPacker(
        name=model,
        weight_version=weight_version,
        hf_config_json=stored.hf_config_json,
        dtypes=dict.fromkeys(stored.tensor_names, dtype),
        rooms=1,
    )
    refs = tuple(ray.put(chunk) for chunk in packer.chunks(stored.tensors()))
    return PublishedWeights(manifest=packer.manifest(), chunk_refs=refs)


def first_draft(drafts: Drafts | None) -> PublishedWeights | None:
    """Read and publish what drafts; None where nothing with weights of its own does. Raises ModelError."""
    if drafts is None:
        return None
    if not isinstance(drafts, DraftModel):
        return put_head(drafts.read(), weight_version=0)
    if drafts.foreign_ids()[0]:
        return _put_model(drafts.read(), "draft")
    return load_and_put(drafts.place, "draft", drafts.models)


def put_head(head: HeadWeights, *, weight_version: int) -> PublishedWeights:
    """Put a head into the object store as a version of `draft`. Raises NotFiniteError."""
    manifest, chunks = pack_head(head, weight_version=weight_version)
    return PublishedWeights(manifest=manifest, chunk_refs=tuple(ray.put(chunk) for chunk in chunks))


def _put_model(loaded: PreTrainedModel, model: PublishedName, weight_version: int = 0) -> PublishedWeights:
    manifest, chunks = pack_weights(loaded, name=model, weight_version=weight_version)
    return PublishedWeights(manifest=manifest, chunk_refs=tuple(ray.put(chunk) for chunk in chunks))
