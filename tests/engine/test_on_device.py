"""An engine on a device: the same bodies run on the CPU, and with `-m gpu` on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from rlhfspec.core.config import EngineConfig
from rlhfspec.core.records import SampleKey, SampleRequest, SamplingParams
from rlhfspec.engine.attention.by_length import Marks, split_attention
from rlhfspec.engine.build import build_engine
from rlhfspec.engine.cache.kv_pool import KVPool, KVShape
from rlhfspec.engine.cuda.cuda_backend import CudaBackend
from rlhfspec.engine.decoding.noise import HashedNoise, gumbel_noise, key_words, noise_source, row_words
from rlhfspec.engine.decoding.sampling_rule import RowSampling, choose
from rlhfspec.engine.engine import Engine
from rlhfspec.engine.model.linears import Rows
from rlhfspec.engine.model.llama_model import LlamaModel
from rlhfspec.engine.upload import ALIGNMENT, pack, unpack, upload
from rlhfspec.engine.weights.chunks import pack_weights, unpack_weights
from tests.engine.conftest import PLANS, Pair, disturbed, tiny_llama
from tests.helpers.devices import DEVICES, NO_GPU

Requests = Callable[..., list[SampleRequest]]
SAMPLING = SamplingParams(max_new_tokens=40, temperature=0.8, top_p=0.95)


def engine_on(device: str, plan: str, **changes: object) -> Engine:
    pair = Pair(target=tiny_llama(1, "float32"), draft=disturbed(tiny_llama(1, "float32")))
    settings = {"device": device, "max_running_samples": 6, "probe": False} | changes
    return build_engine(
        pair.target,
        pair.draft,
        engine=EngineConfig.model_validate(settings),
        speculation=PLANS[plan],
        max_total_tokens=192,
    )


@pytest.mark.parametrize("plan", ["off", "chain4", "tree8", "suffix"])
@pytest.mark.parametrize("device", DEVICES)
def test_emitted_log_probabilities_are_the_models(
    device: str, plan: str, make_requests: Requests, dense_logits: Callable[..., torch.Tensor]
) -> None:
    engine = engine_on(device, plan)
    requests = make_requests((5, 40, 17, 3, 60, 9, 33, 12), SAMPLING)
    plain = tiny_llama(1, "float32")
    for request, done in zip(requests, engine.generate(requests), strict=True):
        prompt = request.prompt.token_ids
        logits = dense_logits(plain, np.concatenate([prompt, done.token_ids]))[len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits / SAMPLING.temperature, -1)
        expected = expected.gather(1, torch.from_numpy(done.token_ids)[:, None])[:, 0]
        np.testing.assert_allclose(done.policy_logprobs, expected.numpy(), atol=2e-4)
    assert plan == "off" or engine.stats.num_accepted_tokens > 0
    recorded = getattr(engine._decode, "shapes", []) or (engine.runner.graphs and engine.runner.graphs.shapes)
    assert device == "cpu" or recorded, "decode steps were recorded, or their forwards"


@pytest.mark.parametrize("device", DEVICES)
def test_published_weights_decode_and_are_confirmed(device: str, make_requests: Requests) -> None:
    """Recordings stay right: weights are copied in place."""
    engine, requests = engine_on(device, "tree8"), make_requests((5, 40, 17), SAMPLING)
    engine.generate(requests)
    newer = tiny_llama(9, "float32")
    manifest, chunks = pack_weights(newer, name="target", weight_version=1)
    tensors = unpack_weights(manifest, chunks)
    engine.load_weights(manifest, tensors)
    assert isinstance(engine.runner.model, LlamaModel)
    assert engine.runner.model.altered_copy(tensors) is None
    fresh = build_engine(
        newer,
        disturbed(tiny_llama(1, "float32")),
        engine=EngineConfig.model_validate({"device": device, "max_running_samples": 6, "probe": False}),
        speculation=PLANS["tree8"],
        max_total_tokens=192,
    )
    for ours, theirs in zip(engine.generate(requests), fresh.generate(requests), strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        np.testing.assert_allclose(ours.policy_logprobs, theirs.policy_logprobs, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_paged_caches_hold_what_whole_ones_hold(device: str, make_requests: Requests) -> None:
    requests = make_requests((5, 40, 17, 3, 60, 9, 33, 12), SAMPLING)
    megabytes = 64 if device == "cuda" else 1
    paged = engine_on(device, "tree8", kv_cache_mb=megabytes).generate(requests)
    whole = engine_on(device, "tree8").generate(requests)
    for ours, theirs in zip(paged, whole, strict=True):
        np.testing.assert_allclose(ours.policy_logprobs[:8], theirs.policy_logprobs[:8], atol=1e-4)
        assert ours.token_ids[:8].tolist() == theirs.token_ids[:8].tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_noise_and_choice_are_the_hosts(device: str) -> None:
    where = torch.device(device)
    words = np.stack(
        [key_words(SampleKey(run_seed=3, sample_index=i), np.array([9])) for i in (0, 7, 1 << 40)]
    )
    positions = np.array([[0, 1], [5, 6], [100_000, 100_001]])
    (on_device,) = upload([row_words(words, positions)], where)
    noise = noise_source(where).of_words(on_device, 5000)
    expected = gumbel_noise(words, positions, 5000)
    torch.testing.assert_close(noise.values.cpu(), expected, rtol=1e-5, atol=1e-6)
    rows = [SamplingParams(max_new_tokens=1, temperature=t) for t in (1.0, 0.0, 0.7)]
    logits = torch.randn(3, 2, 5000, generator=torch.Generator().manual_seed(0))
    levels = torch.tensor([[0, 1]] * 3)
    chosen = choose(logits.to(where), noise, levels.to(where), RowSampling.of(rows, where)).cpu()
    on_host = noise_source(torch.device("cpu")).of_words(torch.from_numpy(row_words(words, positions)), 5000)
    assert torch.equal(chosen, choose(logits, on_host, levels, RowSampling.of(rows, torch.device("cpu"))))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("samples", [2, 40])
def test_attention_by_lengths_is_the_hosts(device: str, window: int | None, samples: int) -> None:
    """Of a tree of 5 behind unlike numbers of cached tokens, in bfloat16: in parts for few samples, in one for many."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(samples * 4, 5 * 3, 64, generator=generator).bfloat16()
    keys, values = torch.randn(2, samples * 4, 700, 64, generator=generator).bfloat16()
    seen = torch.eye(5, dtype=torch.bool).repeat(samples, 1, 1)
    seen[:, :, 0] = seen[:, 4, 2] = True
    marks = Marks(
        base=torch.arange(samples) * 15 + 70,
        seen=seen,
        column_depth=torch.tensor([[0, 1, 1, 1, 2]]).repeat(samples, 1),
        token_depth=torch.tensor([[0, 1, 1, 1, 2]]).repeat(samples, 1),
    )

    def attended(where: str, dtype: torch.dtype) -> torch.Tensor:
        at = Marks(**{one.name: getattr(marks, one.name).to(where) for one in fields(Marks)})
        cells = (each.to(where, dtype) for each in (q, keys, values))
        how = {"tokens": 5, "window": window, "scaling": 0.125, "softcap": None}
        return split_attention.by_length(*cells, at, **how).float().cpu()

    expected = attended("cpu", torch.float32)
    torch.testing.assert_close(attended(device, torch.bfloat16), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_weights_are_laid_out_and_read_back_as_on_the_host(device: str) -> None:
    parts, order = (torch.randn(200, 96).bfloat16(), torch.randn(41, 96).bfloat16()), torch.randperm(241)
    rows = Rows(tuple(part.to(device) for part in parts), order.to(device))
    linear = CudaBackend(torch.device(device)).linear(torch.zeros_like(rows.dense()), None, torch.bfloat16)
    linear.take(rows, None)
    assert torch.equal(linear.unpacked()[0].cpu(), torch.cat(parts)[order]) and linear.holds(rows, None)
    linear.unpacked()[0][240, 95] *= -1.0
    assert not linear.holds(rows, None)


@pytest.mark.gpu
@NO_GPU
def test_triton_makes_the_noise_where_it_is_there() -> None:
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    words = torch.zeros(2, 1, 1, dtype=torch.int32, device="cuda")
    assert isinstance(noise_source(torch.device("cuda")).of_words(words, 64), HashedNoise)


@pytest.mark.parametrize("device", DEVICES)
def test_a_leased_prefix_is_read_while_slots_move(device: str, make_requests: Requests) -> None:
    """Bytes read through a lease are the cells', after the sample has changed its slot."""
    engine = engine_on(device, "chain4")
    requests = make_requests((50, 40, 30), SAMPLING)
    for request in requests:
        engine.submit(request)
    engine.step()
    exchange, last = engine.exchange, requests[2].key
    pool: KVPool = engine.runner.pool
    lease = exchange.lease(last)
    before = pool.range_of(2, 0, 24).cpu().clone()
    exchange.drop(requests[0].key)
    assert lease.slot == 0, "the last sample moved"
    frame = np.empty(24 * pool.token_bytes, dtype=np.uint8)
    lease.read("target", 0, 24, frame)
    assert torch.equal(torch.from_numpy(frame).view(pool.cells.dtype).view(before.shape), before)
    exchange.end_lease(lease)


@pytest.mark.parametrize("device", DEVICES)
def test_uploaded_parts_arrive_whole(device: str) -> None:
    parts = [
        np.arange(5),
        np.float32([[1.5, -2.0, 3.0]]),
        np.int32([[7], [8], [9]]),
        np.zeros((2, 0), np.int32),
    ]
    for sent, got in zip(parts, upload(parts, torch.device(device)), strict=True):
        assert got.device.type == device and got.shape == sent.shape
        assert np.array_equal(got.cpu().numpy(), sent) and got.cpu().numpy().dtype == sent.dtype


def test_packed_parts_are_unpacked_in_place_and_aligned() -> None:
    """What a GPU is sent; the CPU takes the arrays as they lie."""
    parts = [np.arange(5), np.float32([[1.5, -2.0, 3.0]]), np.arange(12, dtype=np.int32).reshape(3, 4).T]
    packed = pack(parts, pinned=False)
    found = unpack(packed, parts)
    for sent, got in zip(parts, found, strict=True):
        assert np.array_equal(got.numpy(), sent) and got.numpy().dtype == sent.dtype
        assert (got.data_ptr() - packed.data_ptr()) % ALIGNMENT == 0
    packed.zero_()
    assert not any(part.any() for part in found), "views, no copies"


@pytest.mark.parametrize("device", DEVICES)
def test_a_pool_moves_tokens_on_its_device(device: str) -> None:
    where = torch.device(device)
    shape = KVShape(num_layers=2, num_kv_heads=2, num_heads=2, head_size=8)
    pool = KVPool(shape, num_slots=2, capacity=64, dtype=torch.float32, device=where)
    filled = torch.randn(pool.cells.shape, generator=torch.Generator().manual_seed(0))
    pool.cells.copy_(filled)
    root, path = torch.tensor([10, 4], device=where), torch.tensor([[0, 2, 5], [0, 1, 3]], device=where)
    moved = torch.tensor([[False, True, True], [False, False, True]], device=where)
    pool.make_dense(root, path, moved)
    cells = pool.cells.cpu()
    assert torch.equal(cells[:, :, 0, :, 11], filled[:, :, 0, :, 12])
    assert torch.equal(cells[:, :, 0, :, 12], filled[:, :, 0, :, 15])
    assert torch.equal(cells[:, :, 1, :, 5], filled[:, :, 1, :, 5])
    assert torch.equal(cells[:, :, 1, :, 6], filled[:, :, 1, :, 7])
