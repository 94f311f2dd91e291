"""Weights travel bit by bit, or not at all."""

import hashlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from rlhfspec.core.errors import ModelError, NotFiniteError, NumericsError, WeightsError
from rlhfspec.engine.weights.chunks import (
    WeightPacker,
    load_into,
    model_checksum,
    not_finite,
    pack_weights,
    require_loadable,
    unique_tensors,
    unpack_weights,
)
from rlhfspec.engine.weights.loading import build_causal_lm

CHUNK_BYTES = 10_000


@pytest.fixture(params=["float32", "bfloat16", "tied"])
def model(request: pytest.FixtureRequest, new_model: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    if request.param == "tied":
        return new_model(1, "float32", tie_word_embeddings=True)
    return new_model(1, request.param)


def dtype_of(model: PreTrainedModel) -> str:
    return str(model.dtype).removeprefix("torch.")


def test_what_is_packed_comes_back_bitwise(model: PreTrainedModel) -> None:
    manifest, chunks = pack_weights(model, name="target", weight_version=3, chunk_bytes=CHUNK_BYTES)
    assert len(chunks) > 3
    assert sum(len(chunk) for chunk in chunks) == manifest.num_bytes
    assert (manifest.model, manifest.weight_version) == ("target", 3)
    own = model.state_dict()
    tensors = unpack_weights(manifest, chunks)
    for name, tensor in tensors.items():
        assert tensor.dtype == own[name].dtype
        assert torch.equal(tensor, own[name])
    addresses = {own[name].data_ptr() for name in tensors}
    assert addresses == {tensor.data_ptr() for tensor in own.values()}, "every storage, each once"


def test_a_model_built_from_the_manifest_gives_the_same_logits(model: PreTrainedModel) -> None:
    manifest, chunks = pack_weights(model, name="target", weight_version=0, chunk_bytes=CHUNK_BYTES)
    built = build_causal_lm(manifest.hf_config_json, dtype_of(model))
    assert model_checksum(built) != manifest.checksum
    load_into(built, unpack_weights(manifest, chunks))
    assert model_checksum(built) == manifest.checksum
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        assert torch.equal(built(ids).logits, model(ids).logits)


def test_the_checksum_is_the_manifests_and_follows_every_weight(model: PreTrainedModel) -> None:
    manifest, _ = pack_weights(model, name="draft", weight_version=0)
    assert model_checksum(model) == manifest.checksum
    other, _ = pack_weights(model, name="target", weight_version=9, chunk_bytes=CHUNK_BYTES)
    assert other.checksum == manifest.checksum, "neither version nor chunking is content"
    next(iter(model.parameters())).data[0, 0] += 1.0
    assert model_checksum(model) != manifest.checksum


def test_tied_weights_travel_once_and_stay_tied(new_model: Callable[..., PreTrainedModel]) -> None:
    tied = new_model(1, "float32", tie_word_embeddings=True)
    manifest, chunks = pack_weights(tied, name="target", weight_version=0)
    names = [spec.name for spec in manifest.tensors]
    assert sum("embed_tokens" in name or "lm_head" in name for name in names) == 1
    built = build_causal_lm(manifest.hf_config_json, "float32")
    load_into(built, unpack_weights(manifest, chunks))
    assert built.get_output_embeddings().weight.data_ptr() == built.get_input_embeddings().weight.data_ptr()


def test_a_tampered_chunk_is_refused_by_number(model: PreTrainedModel) -> None:
    manifest, chunks = pack_weights(model, name="target", weight_version=5, chunk_bytes=CHUNK_BYTES)
    chunks[2] = chunks[2].copy()
    chunks[2][17] ^= 1
    with pytest.raises(WeightsError, match=r"target weights version 5: chunk 2 of"):
        unpack_weights(manifest, chunks)


@pytest.mark.parametrize("kept", [0, 7, -1])
def test_a_chunk_of_any_other_length_is_refused_by_number(model: PreTrainedModel, kept: int) -> None:
    manifest, chunks = pack_weights(model, name="target", weight_version=5, chunk_bytes=CHUNK_BYTES)
    chunks[1] = chunks[1][:kept]
    with pytest.raises(WeightsError, match=r"target weights version 5: chunk 1 of"):
        unpack_weights(manifest, chunks)


def test_the_packed_bytes_are_those_that_earlier_versions_packed() -> None:
    """The checksum was BLAKE2b before; the value is that of the release before XXH3."""
    tensors = [
        ("a", torch.arange(5000, dtype=torch.float32).sub(2500).div(7).view(50, 100)),
        ("b", torch.arange(33, dtype=torch.float32).div(3).to(torch.bfloat16)),
        ("c", torch.tensor([-0.0, 0.0, 1.5]).to(torch.float16)),
    ]
    packer = WeightPacker(hf_config_json="{}", name="target", weight_version=0, chunk_bytes=64)
    manifest, chunks = packer.pack(tensors)
    assert (len(chunks), manifest.num_bytes) == (3, 20096), "a tensor is never cut"
    old = hashlib.blake2b(b"".join(chunk.tobytes() for chunk in chunks), digest_size=16).hexdigest()
    assert old == "2b60151004d8cb9987a306250537bb0c"


@pytest.mark.parametrize("rooms", [1, 2])
def test_chunks_written_over_earlier_ones_are_packed_and_rounded_alike(
    model: PreTrainedModel, rooms: int
) -> None:
    tensors = [(name, tensor.double()) for name, tensor in unique_tensors(model)]
    want, chunks = pack_weights(model, name="target", weight_version=1, chunk_bytes=CHUNK_BYTES)
    packer = WeightPacker(
        name="target",
        weight_version=1,
        hf_config_json=want.hf_config_json,
        dtypes={name: tensor.dtype for name, tensor in unique_tensors(model)},
        chunk_bytes=CHUNK_BYTES,
        rooms=rooms,
    )
    taken = [(chunk.ctypes.data, chunk.tobytes()) for chunk in packer.chunks(tensors)]
    assert [data for _, data in taken] == [chunk.tobytes() for chunk in chunks]
    assert len({address for address, _ in taken}) < len(taken)
    assert packer.manifest() == want


def test_missing_and_exchanged_chunks_are_refused(model: PreTrainedModel) -> None:
    manifest, chunks = pack_weights(model, name="target", weight_version=5, chunk_bytes=CHUNK_BYTES)
    with pytest.raises(WeightsError, match="chunks, got"):
        unpack_weights(manifest, chunks[:-1])
    with pytest.raises(WeightsError, match="chunk 0"):
        unpack_weights(manifest, [chunks[1], chunks[0], *chunks[2:]])


def test_unpacked_tensors_are_copies(model: PreTrainedModel) -> None:
    manifest, chunks = pack_weights(model, name="target", weight_version=0, chunk_bytes=CHUNK_BYTES)
    before = [chunk.copy() for chunk in chunks]
    for tensor in unpack_weights(manifest, chunks).values():
        tensor.zero_()
    assert all(np.array_equal(a, b) for a, b in zip(before, chunks, strict=True))


def test_weights_of_another_shape_or_architecture_are_refused(
    new_model: Callable[..., PreTrainedModel],
) -> None:
    model = new_model(1, "float32")
    wider, chunks = pack_weights(new_model(1, "float32", vocab_size=80), name="target", weight_version=1)
    with pytest.raises(WeightsError, match=r"expected shape \(64, 64\), got \(80, 64\)"):
        load_into(model, unpack_weights(wider, chunks))
    deeper, chunks = pack_weights(new_model(1, "float32", num_layers=3), name="target", weight_version=1)
    with pytest.raises(WeightsError, match="names differ"):
        load_into(model, unpack_weights(deeper, chunks))


def test_a_manifest_of_an_unknown_architecture_is_refused(new_model: Callable[..., PreTrainedModel]) -> None:
    manifest, _ = pack_weights(new_model(1, "float32"), name="target", weight_version=1)
    odd = replace(manifest, hf_config_json=manifest.hf_config_json.replace('"llama"', '"nonesuch"'))
    with pytest.raises(ModelError, match="nonesuch"):
        build_causal_lm(odd.hf_config_json, "float32")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_is_refused_before_it_is_published(
    value: float, model: PreTrainedModel
) -> None:
    with torch.no_grad():
        dict(model.named_parameters())["model.norm.weight"][3] = value
    with pytest.raises(NumericsError, match=r"target weights of version 4 .*'model\.norm\.weight' holds NaN"):
        pack_weights(model, name="target", weight_version=4)


def test_finite_weights_whose_sum_is_not_are_published() -> None:
    large = torch.full((8,), 3e38)
    assert not large.sum().isfinite()
    assert not_finite([("large", large), ("ids", torch.arange(3))]) == []
    both = torch.tensor([float("inf"), -float("inf")], dtype=torch.bfloat16)
    assert not_finite([("large", large), ("both", both)]) == ["both"]


@pytest.mark.parametrize("cut", [torch.int32, torch.bool, torch.complex64])
def test_weights_of_another_kind_of_number_are_refused_and_none_is_copied(
    model: PreTrainedModel, cut: torch.dtype
) -> None:
    manifest, chunks = pack_weights(model, name="target", weight_version=1)
    tensors = {name: tensor + 1 for name, tensor in unpack_weights(manifest, chunks).items()}
    last = list(tensors)[-1]
    tensors[last] = tensors[last].to(cut)
    before = model_checksum(model)
    with pytest.raises(WeightsError, match=r"expected torch\.\w+, got"):
        load_into(model, tensors)
    assert model_checksum(model) == before


@pytest.mark.parametrize(("field", "value"), [("offset_bytes", 10**9), ("num_bytes", 3), ("shape", (1, 1))])
def test_a_tensor_that_the_chunks_do_not_hold_is_refused(
    model: PreTrainedModel, field: str, value: object
) -> None:
    manifest, chunks = pack_weights(model, name="target", weight_version=1)
    first, *others = manifest.tensors
    wrong = replace(manifest, tensors=(replace(first, **{field: value}), *others))
    with pytest.raises(WeightsError, match=f"'{first.name}' of shape"):
        unpack_weights(wrong, chunks)


def test_weights_are_loaded_for_a_known_model_and_finite_or_not_at_all(model: PreTrainedModel) -> None:
    manifest, chunks = pack_weights(model, name="target", weight_version=1)
    tensors = unpack_weights(manifest, chunks)
    require_loadable(manifest, tensors)
    for wrong in (replace(manifest, model="foo"), replace(manifest, weight_version=-1)):
        with pytest.raises(WeightsError, match="expected those of target, draft"):
            require_loadable(wrong, tensors)
        with pytest.raises(WeightsError, match="expected those of target, draft"):
            unpack_weights(wrong, chunks)
    next(iter(tensors.values())).view(-1)[0] = float("nan")
    with pytest.raises(NotFiniteError, match="are not loaded"):
        require_loadable(manifest, tensors)
