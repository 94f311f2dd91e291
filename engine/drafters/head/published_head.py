"""A draft head as published weights: the manifest carries its config.json and its tensors, `d2t` and `t2d` too.

A target's own MTP layer goes the same way, with a config that no file has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from ....core.errors import WeightsError
from ....core.weight_records import WeightManifest
from ...weights.chunks import WeightPacker, checksum_of
from .head_weights import (
    ARCHITECTURE,
    HeadWeights,
    config_of_tree,
    config_tree,
    require_whole,
)
from .mtp_weights import ARCHITECTURE as MTP_ARCHITECTURE
from .mtp_weights import MtpConfig, config_of_mtp_tree, mtp_tree


def pack_head(head: HeadWeights, *, weight_version: int) -> tuple[WeightManifest, list[np.ndarray]]:
    """Copy a head, in the types it has, into chunks as `draft`; see `WeightPacker.pack`."""
    tree = mtp_tree(head.config) if isinstance(head.config, MtpConfig) else config_tree(head)
    packer = WeightPacker(name="draft", weight_version=weight_version, hf_config_json=json.dumps(tree))
    return packer.pack(sorted(head.tensors.items()))


def is_head(manifest: WeightManifest) -> bool:
    """Whether a draft model's manifest is of a head that is made for a target, and may be trained."""
    return manifest.model == "draft" and ARCHITECTURE in manifest.hf_config_json


def is_mtp(manifest: WeightManifest) -> bool:
    """Whether a draft model's manifest is of an MTP layer, which stays as its checkpoint has it."""
    return manifest.model == "draft" and MTP_ARCHITECTURE in manifest.hf_config_json


def published_head(manifest: WeightManifest, tensors: Mapping[str, Tensor]) -> HeadWeights:
    """Return the head or MTP layer that was packed, as copies.

    Raises WeightsError: it is neither; ModelError: another's tensors.
    """
    if not (is_head(manifest) or is_mtp(manifest)):
        raise WeightsError(
            f"{manifest.model} weights version {manifest.weight_version}: expected a draft head, got a model of its "
            "own; set speculation.drafter to model"
        )
    tree = json.loads(manifest.hf_config_json)
    # taps stand in every config that we write
    config = config_of_mtp_tree(tree) if is_mtp(manifest) else config_of_tree(tree, num_target_layers=1)
    head = HeadWeights(config=config, tensors={name: tensor.clone() for name, tensor in tensors.items()})
    require_whole(head, f"version {manifest.weight_version}")
    return head


def head_checksum(head: HeadWeights) -> str:
    """Return the checksum that `pack_head` would put into the manifest."""
    return checksum_of(tensor for _, tensor in sorted(head.tensors.items()))


def rounded(head: HeadWeights, dtype: torch.dtype) -> HeadWeights:
    """Return the head with its floats in another type."""
    return head.with_trained({name: tensor.to(dtype) for name, tensor in head.trained.items()})
