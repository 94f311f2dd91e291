"""Choosing a back end by its name in the config."""

from __future__ import annotations

from typing import Literal

from ...core.errors import ConfigError
from ..remote.remote import Handle
from .channels import Transport

TransportName = Literal["auto", "gloo", "object_store", "nccl"]


def make_transport(
    name: TransportName, *, host: str, timeout_s: float = 5.0, handle: Handle = None
) -> Transport:
    """The back end `name`, bound to the address `host` of this node; "auto" is gloo where torch has it.

    `handle` is the calling actor's own handle, needed by the object store to listen. Back ends are
    imported when chosen: the object store does without torch.

    Raises PlacementError for nccl without a GPU, ConfigError for gloo where torch lacks it.
    """
    if name in ("auto", "gloo"):
        import torch.distributed

        if torch.distributed.is_available() and torch.distributed.is_gloo_available():
            from .gloo import GlooTransport

            return GlooTransport(host=host, timeout_s=timeout_s)
        if name == "gloo":
            raise ConfigError("the transport gloo needs a torch built with it; use auto or object_store")
    if name == "nccl":
        from .nccl import NcclTransport

        return NcclTransport(host=host, timeout_s=timeout_s)
    from .object_store import ObjectStoreTransport

    return ObjectStoreTransport(handle=handle, timeout_s=timeout_s)
