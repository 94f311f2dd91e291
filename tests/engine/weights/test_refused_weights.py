"""Checkpoints that load and are not what their config says: the check of their files and loading agree in words."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhfspec.cluster.plan.model_files import count_params
from rlhfspec.core.errors import ModelError
from rlhfspec.engine.weights.loading import load_causal_lm, load_hf_config, load_tokenizer
from tests.conftest import TinyPair

Weights = dict[str, Tensor]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def folder(tmp_path: Path, tiny_pair: TinyPair) -> Path:
    return Path(shutil.copytree(tiny_pair.target, tmp_path / "model"))


def change_config(folder: Path, **values: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def change_weights(folder: Path, change: Callable[[Weights], Weights]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def words_of(ask: Callable[[], object]) -> str:
    with pytest.raises(ModelError) as refused:
        ask()
    return str(refused.value)


def refused_alike(folder: Path) -> str:
    """What the check of the files says, which loading says too."""
    name = str(folder)
    checked = words_of(lambda: count_params(load_hf_config(name), AutoModelForCausalLM, name))
    assert words_of(lambda: load_causal_lm(name, "float32")) == checked
    return checked


def test_two_values_of_tied_weights_are_refused_and_a_copy_is_not(folder: Path) -> None:
    change_config(folder, tie_word_embeddings=True)
    change_weights(folder, lambda weights: weights | {HEAD: weights[EMBEDDING].clone()})
    name = str(folder)
    assert count_params(load_hf_config(name), AutoModelForCausalLM, name) > 0
    load_causal_lm(name, "float32")
    change_weights(folder, lambda weights: weights | {HEAD: weights[EMBEDDING] + 0.5})
    said = refused_alike(folder)
    assert f"{HEAD} and {EMBEDDING} are one weight" in said and "tie_word_embeddings to false" in said
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    assert refused_alike(folder) == said


@pytest.mark.parametrize(
    ("prefix", "advice"),
    [
        ("_orig_mod.", "torch.compile"),
        ("module.", "DataParallel"),
        ("base_model.model.", "merge_and_unload"),
        ("inner.policy.", "model.policy.save_pretrained"),
    ],
)
def test_a_prefix_before_every_name_is_told(prefix: str, advice: str, folder: Path) -> None:
    change_weights(folder, lambda weights: {prefix + name: value for name, value in weights.items()})
    said = refused_alike(folder)
    assert f"name their weights '{prefix}...'" in said and advice in said


def test_a_weight_that_lacks_is_no_prefix(folder: Path) -> None:
    change_weights(folder, lambda weights: {name: weights[name] for name in weights if name != EMBEDDING})
    assert f"lack weights of the model its config.json describes: 1, first '{EMBEDDING}'" in refused_alike(
        folder
    )


@pytest.mark.parametrize(
    ("quantization", "method"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}, "awq"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes, load_in_4bit"),
        ({"quant_method": "of-tomorrow"}, "of-tomorrow"),
    ],
)
def test_quantized_weights_are_refused_by_their_method(quantization: dict, method: str, folder: Path) -> None:
    change_config(folder, quantization_config=quantization)
    assert f"are quantized (quantization_config of its config.json: {method})" in refused_alike(folder)


def test_fp8_weights_become_the_plain_weights_that_they_stand_for(folder: Path) -> None:
    before = load_causal_lm(str(folder), "float32").state_dict()
    scales = {}

    def quantize(weights: Weights) -> Weights:
        small: Weights = {}
        for name, value in weights.items():
            if name.endswith("_proj.weight"):
                scale = scales[name] = value.abs().max() / 448.0
                small[name] = (value / scale).to(torch.float8_e4m3fn)
                small[f"{name}_scale_inv"] = torch.full((1, 1), float(scale))
            else:
                small[name] = value
        return small

    change_weights(folder, quantize)
    method = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    change_config(folder, quantization_config=method)
    loaded = load_causal_lm(str(folder), "float32")
    assert getattr(loaded.config, "quantization_config", None) is None
    assert len(scales) == 14
    for name, value in loaded.state_dict().items():
        assert value.dtype == torch.float32
        if name in scales:
            stored = (before[name] / scales[name]).to(torch.float8_e4m3fn).float() * scales[name]
            torch.testing.assert_close(value, stored)
        else:
            assert torch.equal(value, before[name])


def added(name: str, *shape: int) -> Callable[[Weights], Weights]:
    return lambda weights: weights | {name: torch.ones(shape)}


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.7.input_layernorm.weight",
        "model.norm.bias",
        "lm_head.bias",
    ],
)
def test_weights_of_the_model_that_its_config_has_no_place_for_are_refused(name: str, folder: Path) -> None:
    change_weights(folder, added(name, 4))
    assert f"has no place for, and would compute something else without: 1, first '{name}'" in refused_alike(
        folder
    )


@pytest.mark.parametrize(
    "name",
    [
        "v_head.summary.weight",
        "model.mtp_layers.0.input_proj.weight",
        "model.layers.2.eh_proj.weight",
        "model.vision_tower.layers.0.norm.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.0.self_attn.masked_bias",
    ],
)
def test_what_stands_beside_a_model_is_left_where_it_is(name: str, folder: Path) -> None:
    change_weights(folder, added(name, 4))
    assert count_params(load_hf_config(str(folder)), AutoModelForCausalLM, str(folder)) > 0
    load_causal_lm(str(folder), "float32")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_weights_that_need_a_scale_are_refused_without_a_word_on_it(dtype: torch.dtype, folder: Path) -> None:
    change_weights(folder, lambda weights: {name: value.to(dtype) for name, value in weights.items()})
    name = str(folder)
    said = words_of(lambda: count_params(load_hf_config(name), AutoModelForCausalLM, name))
    assert "no quantization_config" in said and "save it dequantized" in said
    change_weights(folder, lambda weights: {name: value.to(torch.float16) for name, value in weights.items()})
    assert count_params(load_hf_config(name), AutoModelForCausalLM, name) > 0


def test_a_classifier_is_no_model_that_writes(folder: Path) -> None:
    change_config(folder, architectures=["LlamaForSequenceClassification"], tie_word_embeddings=True)
    change_weights(
        folder,
        lambda weights: {k: v for k, v in weights.items() if k != HEAD} | {"score.weight": weights[HEAD][:1]},
    )
    assert "is a LlamaForSequenceClassification" in refused_alike(folder)


def test_files_that_git_lfs_has_not_fetched_are_named(folder: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12\n"
    name = str(folder)
    (folder / "tokenizer.json").write_text(pointer)
    assert "tokenizer.json is a pointer of Git LFS" in words_of(lambda: load_tokenizer(name))
    (folder / "model.safetensors").write_text(pointer)
    said = words_of(lambda: count_params(load_hf_config(name), AutoModelForCausalLM, name))
    assert "model.safetensors is a pointer of Git LFS" in said and "git lfs pull" in said


def test_a_link_to_weights_that_are_gone_is_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("../blobs/ab")
    name = str(folder)
    said = words_of(lambda: count_params(load_hf_config(name), AutoModelForCausalLM, name))
    assert "is a link to ../blobs/ab, which is not there" in said


def test_code_of_a_model_and_a_folder_of_the_hub_s_cache_are_told(folder: Path) -> None:
    snapshot = folder / "snapshots" / "ab12"
    shutil.copytree(folder, snapshot)
    change_config(folder, model_type="its_own", auto_map={"AutoConfig": "its_own.Config"})
    assert "set models.trust_remote_code to true" in words_of(lambda: load_hf_config(str(folder)))
    (folder / "config.json").unlink()
    assert f"name {snapshot}" in words_of(lambda: load_hf_config(str(folder)))


@pytest.mark.parametrize("dtype", ["auto", "torch.bfloat16"])
def test_a_type_that_torch_does_not_have_is_named(dtype: str, folder: Path) -> None:
    change_config(folder, dtype=dtype)
    said = words_of(lambda: load_hf_config(str(folder)))
    assert f"dtype (or torch_dtype) '{dtype}'; expected a type of torch" in said
