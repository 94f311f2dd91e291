"""Weight files are judged by their headers: cut, missing and misshapen weights are refused, tied ones not."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhfspec.core.errors import ModelError
from rlhfspec.engine.weights.loading import load_causal_lm, load_hf_config, load_tokenizer, meta_model
from rlhfspec.engine.weights.weight_files import check_weight_files
from tests.conftest import TinyPair

Weights = dict[str, Tensor]
ONE = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path: Path, tiny_pair: TinyPair) -> Path:
    return Path(shutil.copytree(tiny_pair.target, tmp_path / "model"))


def check(folder: Path) -> None:
    check_weight_files(str(folder), meta_model(str(folder), load_hf_config(str(folder))))


def change_config(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def change_weights(folder: Path, change: Callable[[Weights], Weights]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def as_pickle(folder: Path) -> Path:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    return folder / "pytorch_model.bin"


def as_shards(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    parts = {"a.safetensors": {ONE: weights.pop(ONE)}, "b.safetensors": weights}
    for name, part in parts.items():
        save_file(part, folder / name, metadata={"format": "pt"})
    index = {"weight_map": {key: name for name, part in parts.items() for key in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def without(*names: str) -> Callable[[Weights], Weights]:
    return lambda weights: {key: value for key, value in weights.items() if key not in names}


def test_whole_files_pass_in_every_form(folder: Path) -> None:
    check(folder)
    as_shards(folder)
    check(folder)


def test_a_pickle_of_tensors_passes(folder: Path) -> None:
    as_pickle(folder)
    check(folder)


def test_weights_under_the_base_model_s_names_and_of_another_dtype_pass(folder: Path) -> None:
    change_weights(folder, lambda ws: {key.removeprefix("model."): w.bfloat16() for key, w in ws.items()})
    check(folder)


def test_a_tied_weight_is_no_missing_one(folder: Path) -> None:
    change_weights(folder, without("lm_head.weight"))
    with pytest.raises(ModelError, match=r"lack weights .*: 1, first 'lm_head.weight'"):
        check(folder)
    change_config(folder, tie_word_embeddings=True)
    check(folder)


@pytest.mark.parametrize("kept", [-1, -10_000, 5, 0])
def test_a_cut_file_is_found(kept: int, folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"model\.safetensors \(\d+ bytes\) is cut or damaged"):
        check(folder)


def test_a_cut_or_missing_shard_is_found(folder: Path) -> None:
    as_shards(folder)
    shard = folder / "a.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"a\.safetensors .* is cut or damaged"):
        check(folder)
    shard.unlink()
    with pytest.raises(ModelError, match=r"names a\.safetensors, which is not in the folder"):
        check(folder)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {"x": 3}}'])
def test_an_index_that_is_none_is_named(text: str, folder: Path) -> None:
    as_shards(folder)
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=r"cannot read the index of the weights .*index\.json"):
        check(folder)


def test_a_cut_pickle_is_found_and_code_in_one_is_not_run(folder: Path, tmp_path: Path) -> None:
    file = as_pickle(folder)
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(ModelError, match=r"pytorch_model\.bin .* is cut or damaged"):
        check(folder)
    touched = tmp_path / "touched"
    file.write_bytes(b"cos\nsystem\n(S'touch " + str(touched).encode() + b"'\ntR.")
    with pytest.raises(ModelError, match="nothing that is code"):
        check(folder)
    assert not touched.exists()


def test_a_folder_without_weights_says_what_it_holds(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"holds no weights: expected model\.safetensors.*got config\.json"):
        check(folder)


def test_a_missing_weight_is_named_by_check_and_load(folder: Path) -> None:
    change_weights(folder, without(ONE))
    with pytest.raises(ModelError, match=ONE):
        check(folder)
    with pytest.raises(ModelError, match=ONE):
        load_causal_lm(str(folder), "float32")


def test_a_wrong_shape_is_said_with_both_shapes(folder: Path) -> None:
    change_weights(folder, lambda weights: weights | {"model.norm.weight": torch.ones(7)})
    with pytest.raises(ModelError, match=r"model\.norm\.weight: expected shape \(32,\), got \(7,\)"):
        check(folder)
    with pytest.raises(ModelError):
        load_causal_lm(str(folder), "float32")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_with_a_weight_that_is_not_finite_is_not_loaded(value: float, folder: Path) -> None:
    def spoil(weights: Weights) -> Weights:
        weights[ONE][3, 2] = value
        return weights

    change_weights(folder, spoil)
    with pytest.raises(ModelError, match=rf"model' cannot be used.*'{ONE}' holds NaN or infinity"):
        load_causal_lm(str(folder), "float32")


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 0},
        {"num_hidden_layers": -1},
        {"num_hidden_layers": 10**12},
        {"vocab_size": "many"},
        {"hidden_size": None},
        {"num_attention_heads": 3},
        {"model_type": "nonsense"},
        {"model_type": "clip"},
        {"model_type": {}},
        {"rope_parameters": {"rope_type": "nonsense"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}},
        {"rms_norm_eps": -5},
        {"quantization_config": "x"},
        {"dtype": 1.5},
    ],
    ids=str,
)
def test_an_odd_config_is_one_model_error_of_one_line(change: dict, folder: Path) -> None:
    change_config(folder, **change)
    with pytest.raises(ModelError) as refused:
        check(folder)
    assert str(folder) in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "{}", "\x00", '{"a":' * 3000])
def test_a_config_that_is_no_json_object_is_a_model_error(text: str, folder: Path) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"cannot load the config\.json of the model"):
        check(folder)


@pytest.mark.parametrize("text", [None, "", "{}", "[]", '{"version": "1.0"'])
def test_a_folder_without_a_readable_tokenizer_says_what_to_do(text: str | None, folder: Path) -> None:
    if text is None:
        (folder / "tokenizer.json").unlink()
    else:
        (folder / "tokenizer.json").write_text(text)
    with pytest.raises(ModelError, match=r"cannot load the tokenizer .*or set models\.tokenizer"):
        load_tokenizer(str(folder))


def test_a_file_instead_of_a_folder_is_said_so(folder: Path) -> None:
    with pytest.raises(ModelError, match="is a file; expected the folder"):
        load_hf_config(str(folder / "model.safetensors"))
