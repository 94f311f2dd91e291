"""What a head's `config.json` says is understood as its makers mean it, and written as its readers take it."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.drafters.head.head_weights import HeadConfig, load_head_config, save_head
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
