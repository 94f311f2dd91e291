"""Weights that are read from files, where their path is known: those that a run begins with, as version 0."""

from __future__ import annotations

import ray

from ...core.settings.run import ModelsConfig
from ...engine.drafters.head.head_weights import HeadWeights
from ...engine.drafters.head.published_head import pack_head
from ...engine.weights.causal_lm import PreTrainedModel
from ...engine.weights.chunks import PublishedName, WeightPacker, tensors_of
from ...engine.weights.stored_weights import StoredWeights, load_weights
from ..plan.drafts import DraftModel, Drafts
from .publish import PublishedWeights


def load_and_put(
    name: str, model: PublishedName, models: ModelsConfig, *, weight_version: int = 0
) -> PublishedWeights:
    """Read the causal LM `name` here, where its path is known, and publish it as a version of `model`."""
    loaded = load_weights(name, models.dtype, trust_remote_code=models.trust_remote_code)
    return _put(loaded, model, weight_version)


def first_draft(drafts: Drafts | None) -> PublishedWeights | None:
    """Read and publish what drafts; None where nothing with weights of its own does. Raises ModelError."""
    if drafts is None:
        return None
    if not isinstance(drafts, DraftModel):
        return put_head(drafts.read(), weight_version=0)
    return _put(drafts.weights(), "draft")


def put_head(head: HeadWeights, *, weight_version: int) -> PublishedWeights:
    """Put a head into the object store as a version of `draft`. Raises NotFiniteError."""
    manifest, chunks = pack_head(head, weight_version=weight_version)
    return PublishedWeights(manifest=manifest, chunk_refs=tuple(ray.put(chunk) for chunk in chunks))


def _put(
    loaded: StoredWeights | PreTrainedModel, model: PublishedName, weight_version: int = 0
) -> PublishedWeights:
    """A bucket at a time: where the weights are still in files, no model is built."""
    config = loaded.config.to_json_string(use_diff=False)
    packer = WeightPacker(name=model, weight_version=weight_version, hf_config_json=config, rooms=1)
    refs = tuple(ray.put(chunk) for chunk in packer.chunks(tensors_of(loaded)))
    return PublishedWeights(manifest=packer.manifest(), chunk_refs=refs)
