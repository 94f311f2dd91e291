"""New weights of the served model, from a folder or a file of safetensors that the server can read.

Where the last ones came from is kept in Ray's store: a replica that takes the place of a lost one reads them again.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ray.experimental import internal_kv

from ...core.errors import ModelError, RlhfSpecError
from ...core.outside import quote, user_path
from ...core.settings.run import ModelsConfig
from ...core.surfaces.surface import surface
from ...engine.weights.loading import load_hf_config
from ..weights.first_weights import load_and_put
from ..weights.publish import PublishedWeights

_STORE = b"rlhfspec-served-weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class LastPublished:
    """Where a server's newest version was read."""

    path: str
    version: int
    checksum: str

    @classmethod
    def of(cls, server: str) -> LastPublished | None:
        """Of a server by its namespace; None: it has the weights that it began with."""
        kept = internal_kv._internal_kv_get(server.encode(), namespace=_STORE)
        return None if kept is None else cls(**json.loads(kept))

    def keep(self, server: str) -> None:
        """Note it for the replica that may come after this one."""
        text = json.dumps(asdict(self)).encode()
        internal_kv._internal_kv_put(server.encode(), text, namespace=_STORE)

    def read_again(self, models: ModelsConfig, present: PublishedWeights) -> PublishedWeights:
        """The same version. Raises ModelError: they cannot be read, or are others by now."""
        found = read_version(self.path, models, present, version=self.version)
        if found.manifest.checksum != self.checksum:
            raise ModelError(f"the weights at {self.path} are not those that were published from there")
        return found


def forget_published(server: str) -> None:
    """A server that has ended."""
    internal_kv._internal_kv_del(server.encode(), namespace=_STORE)


def read_version(
    name: str, models: ModelsConfig, present: PublishedWeights, *, version: int
) -> PublishedWeights:
    """The weights in a checkpoint's folder, or in one file of safetensors, as a version of the present model.

    Raises ModelError: they cannot be read, or are none of this model's.
    """
    path = user_path(name).absolute()
    if path.is_file():
        with tempfile.TemporaryDirectory(prefix="rlhfspec-weights-") as folder:
            (Path(folder) / "config.json").write_text(present.manifest.hf_config_json)
            (Path(folder) / "model.safetensors").symlink_to(path)
            try:
                found = load_and_put(folder, "target", models, weight_version=version)
            except RlhfSpecError as error:
                # a client knows its own path
                text = str(error).replace(f"{folder}/model.safetensors", str(path))
                error.args = (text.replace(folder, str(path)),)
                raise
    elif path.is_dir():
        config = load_hf_config(str(path), trust_remote_code=models.trust_remote_code)
        given = json.loads(config.to_json_string(use_diff=False))
        require_same_model(json.loads(present.manifest.hf_config_json), given, str(path))
        found = load_and_put(str(path), "target", models, weight_version=version)
    else:
        raise ModelError(
            f"no folder or file of weights is at {path} on the server's machine; name one that is"
        )
    own, its = ({one.name: one.shape for one in w.manifest.tensors} for w in (present, found))
    if own != its:
        odd = next(key for key in sorted({*own, *its}) if own.get(key) != its.get(key))
        raise ModelError(
            f"the weights at {path} are none of the served model's: tensor {odd} is expected of shape "
            f"{own.get(odd, 'none')}, got {its.get(odd, 'none')}; name weights of the same architecture"
        )
    return found


def require_same_model(served: Mapping[str, Any], given: Mapping[str, Any], path: str) -> None:
    """Raise ModelError for the first value of a config that the same weights compute something else by."""
    config = surface("request.updated_config")
    for key in sorted({*served, *given}):
        own, its = served.get(key), given.get(key)
        if key.endswith("_config") and isinstance(own, dict) and isinstance(its, dict):
            require_same_model(own, its, path)
        elif own != its and config.fault(key, its) is not None:
            raise ModelError(
                f"the config.json of the weights at {path} has {key} {quote(its)}, expected {quote(own)}; "
                f"{config.advice}"
            )
