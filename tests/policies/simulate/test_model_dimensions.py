"""Parameters and caches of models, counted by hand, and against what their makers say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhfspec.core.errors import ConfigError
from rlhfspec.core.settings.simulated_cluster import QWEN_7B
from rlhfspec.policies.simulate.model_dimensions import dimensions_of, head_dimensions, read_dimensions

QWEN3_235B: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
TINY: dict[str, Any] = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 100,
}


def test_a_small_model_counted_by_hand() -> None:
    tiny = dimensions_of(TINY, origin="tiny")
    assert tiny.head_size == 2
    # q and o: 8 x 8 each; k and v: 8 x 4 each
    assert tiny.attention == 2 * 64 + 2 * 32
    assert tiny.dense == 2 * 3 * 8 * 16
    assert tiny.always_read == 2 * 192 + 768 + 800
    assert tiny.total == tiny.always_read + 800
    assert dimensions_of(TINY | {"tie_word_embeddings": True}, origin="tiny").total == tiny.always_read
    # keys and values, 2 layers, 2 heads of 2, 2 bytes
    assert tiny.kv_bytes_per_token(2.0) == 2 * 2 * 2 * 2 * 2


def test_grouped_queries_shrink_the_caches_only_by_their_group() -> None:
    whole = dimensions_of(TINY | {"num_key_value_heads": 4}, origin="tiny")
    assert whole.kv_bytes_per_token(2.0) == 2 * dimensions_of(TINY, origin="tiny").kv_bytes_per_token(2.0)


@pytest.mark.parametrize(
    ("config", "total", "active", "kv_bytes"),
    [
        # 28 layers, 4 heads of 128
        (QWEN_7B, 7.61e9, 7.61e9 - 152064 * 3584, 28 * 4 * 128 * 2 * 2),
        (QWEN3_235B, 235e9, 22e9, 94 * 4 * 128 * 2 * 2),
    ],
)
def test_known_models_have_the_size_that_their_name_says(
    config: dict[str, Any], total: float, active: float, kv_bytes: float
) -> None:
    model = dimensions_of(config, origin="known")
    assert model.total == pytest.approx(total, rel=0.01)
    assert model.active == pytest.approx(active, rel=0.03)
    assert model.kv_bytes_per_token(2.0) == kv_bytes


def test_experts_read_by_a_batch() -> None:
    experts = TINY | {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 5,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    }
    model = dimensions_of(experts, origin="experts")
    assert model.expert == 3 * 8 * 5
    assert model.all_experts == 4 * 120
    # a dense layer, a shared expert, a router of 4 x 8
    assert model.dense == 3 * 8 * 16 + 3 * 8 * 5 + 32
    assert model.active == model.always_read + 2 * 120
    # one token: exactly its two; two tokens: each expert is missed with (1/2)^2; many: all
    assert model.experts_read(1) == pytest.approx(2 * 120)
    assert model.experts_read(2) == pytest.approx(4 * 120 * 0.75)
    assert model.experts_read(1000) == pytest.approx(480)


def test_a_head_reads_twice_the_width_and_has_a_vocabulary_of_its_own() -> None:
    target = dimensions_of(TINY, origin="tiny")
    head = head_dimensions(target, layers=1, vocabulary=10)
    # q, k, v read 16 wide: 16 x (8 + 4 + 4); o 8 x 8; three states into one: 3 x 64
    assert head.attention == 16 * 16 + 64 + 192
    assert head.dense == 3 * 8 * 16
    assert head.total == head.attention + head.dense + 10 * 8


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": None}, "hidden_size expects a count"),
        ({"num_hidden_layers": 0}, "num_hidden_layers expects a count from 1 to 100,000,000, got 0"),
        ({"vocab_size": 10**30}, "vocab_size expects a count"),
        ({"num_key_value_heads": 3}, "must be a multiple"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"hybrid_override_pattern": "M-M*-"}, "layers of several kinds"),
        ({"interleave_moe_layer_step": 2}, "expected none or 0 or 1, got 2; experts in some layers only"),
        ({"type_vocab_size": 2}, "an encoder's form"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "a count from 1 to 4, got 5"),
    ],
)
def test_what_cannot_be_read_is_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        dimensions_of(TINY | change, origin="a file")


def test_a_config_is_read_from_a_file_or_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": TINY, "model_type": "x"}))
    assert read_dimensions(tmp_path) == read_dimensions(tmp_path / "config.json")
    assert read_dimensions(tmp_path) == dimensions_of(TINY, origin="tiny")
    (tmp_path / "list.json").write_text("[1]")
    for name, said in (("list.json", "holds list"), ("none.json", "cannot read")):
        with pytest.raises(ConfigError, match=said):
            read_dimensions(tmp_path / name)
