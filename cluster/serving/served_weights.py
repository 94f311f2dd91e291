"""New weights of the served model, from a folder or a file of safetensors that the server can read."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rlhfspec.cluster.weights.first_weights import load_and_put
from rlhfspec.cluster.weights.publish import PublishedWeights
from rlhfspec.core.errors import ModelError
from rlhfspec.core.outside import user_path
from rlhfspec.core.settings.run import ModelsConfig


def read_version(name: str, models: ModelsConfig, present: PublishedWeights) -> PublishedWeights:
    """The weights in a checkpoint's folder, or in one file of safetensors, as the version after the present one.

    Raises ModelError: they cannot be read, or are none of this model's.
    """
    path = user_path(name).absolute()
    version = present.manifest.weight_version + 1
    if path.is_file():
        with tempfile.TemporaryDirectory(prefix="rlhfspec-weights-") as folder:
            (Path(folder) / "config.json").write_text(present.manifest.hf_config_json)
            (Path(folder) / "model.safetensors").symlink_to(path)
            found = load_and_put(folder, "target", models, weight_version=version)
    elif path.is_dir():
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
