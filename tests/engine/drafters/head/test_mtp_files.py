"""MTP layers are read from a target's own files; what has none, or one that we would compute otherwise, is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from rlhfspec.core.errors import ModelError
from rlhfspec.engine.drafters.head.head_weights import require_fit
from rlhfspec.engine.drafters.head.mtp_weights import load_mtp, mtp_config
from rlhfspec.engine.weights.loading import load_causal_lm, load_hf_config
from rlhfspec.engine.weights.stored_weights import stored_weights
from tests.helpers.tiny_mimo import index_mtp, stored_mtp, write_tiny_mimo

OWN = "model.mtp_layers.0."


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_mimo(tmp_path)


def read(folder: Path) -> Any:
    return load_mtp(str(folder), load_hf_config(str(folder)))


def configured(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("trust", [False, True])
def test_a_mimo_is_read_as_the_qwen2_that_it_is(folder: Path, trust: bool) -> None:
    """The code that lies beside it is neither needed nor run: there is none in this folder."""
    config = load_hf_config(str(folder), trust_remote_code=trust)
    assert (config.model_type, config.architectures) == ("qwen2", ["Qwen2ForCausalLM"])
    assert config.rope_parameters["rope_theta"] == 20_000.0
    assert not hasattr(config, "auto_map") and not hasattr(config, "num_nextn_predict_layers")
    model = load_causal_lm(str(folder), "float32", trust_remote_code=trust)
    assert model.config.model_type == "qwen2"
    # and its weights go to instances straight from the files, the MTP layer left out
    stored = stored_weights(str(folder), config, "float32")
    assert stored is not None
    own = model.state_dict()
    for name, tensor in stored.tensors():
        assert tensor.float().equal(own.pop(name))
    assert not own


def test_the_first_of_several_layers_is_read(tmp_path: Path) -> None:
    folder = write_tiny_mimo(tmp_path, num_mtp_layers=2)
    found, stored = read(folder), stored_mtp(folder)
    assert found.num_layers == 2
    assert found.head.config.tapped_layers == (3,)
    for name, tensor in found.head.tensors.items():
        assert tensor.equal(stored[OWN + name])


def test_a_layer_of_another_target_does_not_fit(folder: Path) -> None:
    config, target = read(folder).head.config, load_hf_config(str(folder))
    require_fit(config, target)
    target.num_hidden_layers = 4
    with pytest.raises(ModelError, match="expected 4 layers, got 3"):
        require_fit(config, target)


def without(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: {}, r"brings no MTP layer .* expected tensors model\.mtp_layers\.0\.\*.*got none"),
        (
            lambda w: {
                name.replace("model.mtp_layers.0", "mtp.layers.0"): tensor for name, tensor in w.items()
            },
            r"got a layer of another form \(mtp\.layers\.0\.final_layernorm\.weight\)",
        ),
        (
            lambda w: {"model.layers.3.eh_proj.weight": w[OWN + "input_proj.weight"]},
            r"got a layer of another form \(model\.layers\.3\.eh_proj\.weight\)",
        ),
        (
            lambda w: w | {OWN + "mlp.experts.0.up_proj.weight": torch.ones(2, 2)},
            r"expected no tensor model\.mtp_layers\.0\.mlp\.experts\.0\.up_proj\.weight",
        ),
        (
            lambda w: w | {OWN + "self_attn.kv_a_proj_with_mqa.weight": torch.ones(2, 2)},
            r"expected no tensor .*kv_a_proj_with_mqa",
        ),
        (
            lambda w: without(w, OWN + "self_attn.k_proj.bias"),
            r"expected a tensor .*self_attn\.k_proj\.bias, got none",
        ),
        (
            lambda w: w | {OWN + "input_proj.weight": torch.ones(64, 64)},
            r"not of MiMo's form: expected input_proj\.weight to be \[64, 128\], got \[64, 64\]",
        ),
        (
            lambda w: w | {OWN + "input_proj.weight": torch.full((64, 128), torch.nan)},
            r"weights in input_proj\.weight that are not finite",
        ),
    ],
)
def test_what_is_not_of_the_form_is_refused_by_name(folder: Path, change: Any, message: str) -> None:
    index_mtp(folder, change(stored_mtp(folder)))
    with pytest.raises(ModelError, match=message):
        read(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "expected hidden_act silu, got gelu"),
        (
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "expected layers that see a window only: False, got True",
        ),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "rotary positions of a kind that is known, got others",
        ),
    ],
)
def test_a_config_that_computes_otherwise_is_refused(folder: Path, changes: dict, message: str) -> None:
    configured(folder, **changes)
    with pytest.raises(ModelError, match=message):
        read(folder)


def test_other_families_and_absent_files_are_refused(folder: Path) -> None:
    config = load_hf_config(str(folder))
    with pytest.raises(ModelError, match="weight files are not on this machine; download them"):
        load_mtp("somebody/mimo", config)
    with pytest.raises(ModelError, match="expected mlp_bias False, got True"):
        mtp_config(LlamaConfig(mlp_bias=True), "that")
    assert not mtp_config(LlamaConfig(), "that").has_bias
    config.model_type = "gemma2"
    with pytest.raises(ModelError, match=r"expected model_type llama or qwen2 .*, got gemma2"):
        mtp_config(config, "that")
