"""What a head's `config.json` says is understood as its makers mean it, and written as its readers take it."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhfspec.core.errors import ModelError
from rlhfspec.engine.drafters.head.head_forward import _rotations
from rlhfspec.engine.drafters.head.head_weights import (
    HeadConfig,
    HeadWeights,
    load_head,
    load_head_config,
    save_head,
)
from rlhfspec.learning.drafts.head import Rotation
from tests.helpers.random_heads import random_head
from tests.helpers.tiny_llama import tiny_llama

QWEN3_235B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 46, 90], "use_aux_hidden_state": True},
    "attention_bias": False,
    "draft_vocab_size": 32000,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 24576,
    "max_position_embeddings": 40960,
    "model_type": "llama",
    "num_attention_heads": 64,
    "num_hidden_layers": 1,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
"SpecForge's for a target of 94 layers."
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def read(folder: Path, tree: dict[str, Any]) -> HeadConfig:
    (folder / "config.json").write_text(json.dumps(tree))
    return load_head_config(folder, num_target_layers=94)


@pytest.mark.parametrize(
    ("changes", "taps"),
    [
        # by outputs of layers in `eagle_config`, by inputs beside it
        ({}, (2, 47, 91)),
        ({LAYER_IDS: [2, 47, 91]}, (2, 47, 91)),
        ({"eagle_config": None, LAYER_IDS: [3, 40, 80]}, (3, 40, 80)),
        ({"eagle_config": None}, (2, 47, 91)),
        ({"eagle_config": {LAYER_IDS: [-1, 0, 1]}}, (0, 1, 2)),
    ],
)
def test_tapped_layers_are_numbered_as_their_key_has_it(tmp_path: Path, changes, taps) -> None:
    assert read(tmp_path, QWEN3_235B | changes).tapped_layers == taps


@pytest.mark.parametrize("num_layers", [2, 4, 9])
def test_written_taps_name_the_same_layers_to_every_reader(tmp_path: Path, num_layers: int) -> None:
    head = random_head(tiny_llama(num_hidden_layers=num_layers))
    save_head(tmp_path, head)
    tree = json.loads((tmp_path / "config.json").read_text())
    taps = list(head.config.tapped_layers)
    assert tree[LAYER_IDS] == taps
    assert [layer + 1 for layer in tree["eagle_config"][LAYER_IDS]] == taps
    for key in (LAYER_IDS, "eagle_config"):
        left = {name: value for name, value in tree.items() if name != key}
        assert read(tmp_path, left).tapped_layers == head.config.tapped_layers


def test_a_config_as_specforge_ships_it_is_read(tmp_path: Path) -> None:
    config = read(tmp_path, QWEN3_235B)
    assert (config.head_size, config.draft_vocab_size, config.rms_norm_eps) == (128, 32000, 1e-6)
    assert config.rope_parameters == {"rope_theta": 1_000_000.0}


def test_a_norm_without_its_epsilon_has_that_of_a_llama(tmp_path: Path) -> None:
    assert read(tmp_path, QWEN3_235B | {"rms_norm_eps": None}).rms_norm_eps == 1e-6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_output": True}, "norm_output: expected False, got True"),
        ({"norm_before_residual": True}, "norm_before_residual: expected False, got True"),
        ({"norm_before_fc": True}, "norm_before_fc: expected False, got True"),
        ({"fc_norm": True}, "fc_norm: expected False, got True"),
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu', got 'gelu'"),
        ({"attention_bias": True}, "attention_bias: expected False, got True"),
        ({"mlp_bias": True}, "mlp_bias: expected False, got True"),
        ({"num_hidden_layers": 2}, "num_hidden_layers: expected 1, got 2"),
        ({"target_hidden_size": 2048}, "target_hidden_size: expected 4096, got 2048"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state: expected True, got False"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1, got 0.5"),
        ({"rope_scaling": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor: expected 1, got 0.5"),
        ({LAYER_IDS: [2, 47]}, r"3 layers' inputs from 0, ascending, got \[2, 47\]"),
        ({LAYER_IDS: [47, 2, 91]}, r"3 layers' inputs from 0, ascending, got \[47, 2, 91\]"),
        ({LAYER_IDS: [-1, 2, 91]}, r"3 layers' inputs from 0, ascending, got \[-1, 2, 91\]"),
        (
            {"rope_scaling": {"type": "mrope"}},
            "rope_type: expected default, linear, llama3 or yarn, got 'mrope'",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "got 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_type linear: expected factor beside it"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps: expected a number above 0, got nan"),
        ({"rms_norm_eps": -1}, "rms_norm_eps: expected a number above 0, got -1"),
        ({"rope_theta": -1}, "rope_theta: expected a number above 0, got -1"),
        ({"head_dim": 1}, "head_dim: expected an even number above 0, got 1"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}},
            "rope_type llama3: expected high_freq_factor, original_max_position_embeddings beside it",
        ),
    ],
)
def test_a_head_that_computes_otherwise_is_refused(tmp_path: Path, changes, message: str) -> None:
    with pytest.raises(ModelError, match=message) as raised:
        read(tmp_path, QWEN3_235B | changes)
    assert str(raised.value).startswith(f"the draft head {tmp_path} computes otherwise than EAGLE-3")


LINEAR = {"type": "linear", "factor": 4.0}
LLAMA3 = {
    "type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize("scaling", [LINEAR, LLAMA3])
def test_a_legacy_type_of_rotary_positions_is_the_rope_type(tmp_path: Path, scaling) -> None:
    head = random_head(tiny_llama())
    save_head(tmp_path, head)
    tree = json.loads((tmp_path / "config.json").read_text())
    named = {key: value for key, value in scaling.items() if key != "type"} | {"rope_type": scaling["type"]}
    config = read(tmp_path, tree | {"rope_scaling": scaling})
    assert config == read(tmp_path, tree | {"rope_scaling": named})
    assert config == read(tmp_path, tree | {"rope_parameters": named, "rope_theta": None})
    assert config.rope_parameters == {"rope_theta": 10_000.0, **named}
    # where it drafts and where it is trained; a config that was not read from a file, too
    for each in (config, replace(config, rope_parameters={"rope_theta": 10_000.0, **scaling})):
        expected = _angles(scaling, config.head_size)
        assert torch.allclose(
            _rotations(each, 40, torch.device("cpu")).angle(), _wrapped(expected), atol=1e-5
        )
        assert torch.allclose(Rotation(each).table(torch.arange(40))[0][:, 0, :4], expected.cos(), atol=1e-5)
    save_head(tmp_path, HeadWeights(config=config, tensors=head.tensors))
    assert load_head(tmp_path, num_target_layers=2).config == config


def _angles(scaling: dict[str, Any], size: int) -> torch.Tensor:
    """Of 40 positions: by 10000 ** (-2 i / size); long waves turn slower by the factor."""
    frequencies = 10_000.0 ** -(torch.arange(0, size, 2) / size)
    if scaling["type"] == "linear":
        slowed = frequencies / scaling["factor"]
    else:
        turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        slowed = kept * frequencies + (1 - kept) * frequencies / scaling["factor"]
    return torch.arange(40)[:, None] * slowed


def _wrapped(angles: torch.Tensor) -> torch.Tensor:
    return torch.complex(angles.cos(), angles.sin()).angle()


@pytest.mark.parametrize(
    "changes",
    [{"architectures": 5}, {"architectures": {"a": 1}}, {"rope_scaling": [1]}, {"eagle_config": [1]}],
)
def test_a_config_of_another_form_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="draft head"):
        read(tmp_path, QWEN3_235B | changes)
