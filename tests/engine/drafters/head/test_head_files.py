"""A head's files: vocabulary tables that lack or are damaged, and the target that they are for."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhfspec.core.errors import ModelError
from rlhfspec.engine.drafters.head.head_weights import (
    ORIGIN_FILE,
    HeadOrigin,
    HeadWeights,
    load_head,
    read_origin,
    require_fit,
    save_head,
)
from rlhfspec.learning.drafts.head import fresh_head
from tests.helpers.random_heads import random_head
from tests.helpers.tiny_llama import tiny_llama

IDS = torch.tensor([1, 4, 5, 9, 18])


@pytest.fixture
def head(tmp_path: Path) -> HeadWeights:
    head = fresh_head(tiny_llama(), IDS)
    save_head(tmp_path, head)
    return head


def changed(folder: Path, **tensors: torch.Tensor | None) -> Path:
    file = folder / "model.safetensors"
    kept = {name: value for name, value in (load_file(file) | tensors).items() if value is not None}
    save_file(kept, file)
    return folder


@pytest.mark.parametrize("lacking", ["t2d", "d2t"])
def test_a_table_that_lacks_is_made_from_the_other(tmp_path: Path, head: HeadWeights, lacking: str) -> None:
    again = load_head(changed(tmp_path, **{lacking: None}), num_target_layers=2)
    assert again.token_ids.tolist() == IDS.tolist()
    assert torch.equal(again.tensors[lacking], head.tensors[lacking])


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 4, 4, 9, 18], r"ids that rise from one to the next, got 4 behind 4"),
        ([1, 5, 4, 9, 18], r"ids that rise from one to the next, got 4 behind 5"),
        ([1, 4, 5, 9, 19], r"token ids from 1 to 19, its target has 19"),
        ([1, 4, 5, 9, 17], r"t2d .*expected the 5 ids of d2t, got 5 of which 1 differ"),
    ],
)
def test_a_vocabulary_that_is_none_is_refused(tmp_path: Path, head: HeadWeights, ids: list, message) -> None:
    d2t = torch.tensor(ids) - torch.arange(len(ids))
    with pytest.raises(ModelError, match=message):
        load_head(changed(tmp_path, d2t=d2t), num_target_layers=2)


def test_a_head_says_how_many_layers_its_target_has(tmp_path: Path, head: HeadWeights) -> None:
    assert json.loads((tmp_path / "config.json").read_text())["target_num_hidden_layers"] == 2
    assert load_head(tmp_path, num_target_layers=2).config == head.config
    require_fit(head.config, tiny_llama().config)
    with pytest.raises(ModelError, match="does not fit the target: expected 3 layers, got 2; take the head"):
        require_fit(head.config, tiny_llama(num_hidden_layers=3).config)
    # those of others do not say it
    require_fit(random_head(tiny_llama()).config, tiny_llama(num_hidden_layers=3).config)


def test_all_that_does_not_fit_is_said_at_once(head: HeadWeights) -> None:
    other = tiny_llama(hidden_size=16, head_dim=4, vocab_size=23, num_hidden_layers=1)
    with pytest.raises(ModelError) as raised:
        require_fit(head.config, other.config)
    assert "expected hidden size 16, got 32; vocabulary 23, got 19; 1 layers, got 2;" in str(raised.value)
    with pytest.raises(ModelError, match="layer 1, the target has 1 layers"):
        require_fit(random_head(tiny_llama()).config, tiny_llama(num_hidden_layers=1).config)


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("norm.weight", torch.int32, "norm.weight in int32"),
        ("norm.weight", torch.float8_e4m3fn, "norm.weight in float8_e4m3fn"),
        ("d2t", torch.float32, "d2t in float32: expected whole numbers"),
    ],
)
def test_types_that_are_not_computed_with_are_refused(
    tmp_path: Path, head: HeadWeights, name: str, dtype: torch.dtype, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load_head(changed(tmp_path, **{name: head.tensors[name].to(dtype)}), num_target_layers=2)


def test_what_a_head_was_made_for_is_read_whole_or_refused_by_the_key(
    tmp_path: Path, head: HeadWeights
) -> None:
    origin = HeadOrigin(target="a model", target_weights=None, chat=True)
    save_head(tmp_path, head, origin)
    assert read_origin(tmp_path) == origin
    file = tmp_path / ORIGIN_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), "zzz_new": 1}))
    with pytest.raises(ModelError, match="zzz_new"):
        read_origin(tmp_path)
    file.unlink()
    assert read_origin(tmp_path) is None
