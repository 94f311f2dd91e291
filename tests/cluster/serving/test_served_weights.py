"""New weights are computed as the served ones: a config that says otherwise is refused by its key."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from byte_chat import save_byte_pair

from rlhfspec.cluster.serving.served_weights import read_version, require_same_model
from rlhfspec.core.errors import ModelError
from rlhfspec.core.settings.run import ModelsConfig
from rlhfspec.engine.weights.chunks import pack_weights
from rlhfspec.engine.weights.loading import load_causal_lm


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_parameters", {"rope_theta": 500.0, "rope_type": "default"}),
        ("rms_norm_eps", 0.1),
        ("num_attention_heads", 4),
        ("hidden_act", "gelu"),
        ("tie_word_embeddings", True),
        ("head_dim", 4),
    ],
)
def test_what_weights_are_computed_by_is_compared(tmp_path: Path, key: str, value: Any):
    save_byte_pair(tmp_path)
    folder = tmp_path / "target"
    manifest, _ = pack_weights(load_causal_lm(str(folder), "float32"), name="target", weight_version=0)
    present: Any = SimpleNamespace(manifest=manifest)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(ModelError, match=f"has {key} .*, expected .*fix that config.json"):
        read_version(str(folder), ModelsConfig(target=str(folder)), present, version=1)


@pytest.mark.parametrize("content", [b"no tensors", None])
def test_errors_of_a_file_name_the_file_that_was_sent(tmp_path: Path, content: bytes | None):
    save_byte_pair(tmp_path)
    manifest, _ = pack_weights(
        load_causal_lm(str(tmp_path / "target"), "float32"), name="target", weight_version=0
    )
    present: Any = SimpleNamespace(manifest=manifest)
    file = tmp_path / "new.safetensors"
    # the draft has other layers
    file.write_bytes(content or (tmp_path / "draft" / "model.safetensors").read_bytes())
    with pytest.raises(ModelError, match=r"new\.safetensors") as refused:
        read_version(str(file), ModelsConfig(target=str(tmp_path / "target")), present, version=1)
    assert "rlhfspec-weights-" not in str(refused.value)


def test_what_computes_nothing_may_differ():
    served = {"use_cache": True, "dtype": "float32", "text_config": {"hidden_size": 8, "_name_or_path": "a"}}
    given = {"use_cache": False, "eos_token_id": 3, "text_config": {"hidden_size": 8, "_name_or_path": "b"}}
    require_same_model(served, given, "weights")
    with pytest.raises(ModelError, match="has hidden_size 9, expected 8"):
        require_same_model(served, given | {"text_config": {"hidden_size": 9}}, "weights")
