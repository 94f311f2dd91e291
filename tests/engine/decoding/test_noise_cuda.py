"""The fused noise and choice against torch's in Triton's interpreter, and compiled for a GPU that is not there.

Which calls take them, and that a rollout stays what it is, is tested everywhere, with torch in the kernels' place.
"""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from rlhfspec.core.records import SamplingParams
from rlhfspec.engine.decoding.noise import HashedNoise, HashedNoiseSource
from tests.helpers.backends import CPU, own_backend
from tests.helpers.forked_script import output_of
from tests.helpers.triton_scripts import COMPILE, MOST_REGISTERS, NEEDS_TRITON, interpreted

SCRIPT = """
import numpy as np, torch
from rlhfspec.core.records import (SampleKey, Stream)
from rlhfspec.engine.decoding.noise import row_words, gumbel_noise, key_words
from rlhfspec.engine.decoding.noise_cuda import BLOCK, fused_choice, fused_gumbel
from rlhfspec.engine.decoding.sampling_rule import RowSampling, perturb, scale
from rlhfspec.core.records import (SamplingParams)

keys = [SampleKey(run_seed=3, stream=Stream.TRAIN, sample_index=index) for index in (0, 7, 1 << 40)]
words = np.stack([key_words(key, np.array([9])) for key in keys])
positions = np.array([[0, 1], [5, 6], [100_000, 100_001]])
for vocab_size in (64, BLOCK, 5000):
    expected = gumbel_noise(words, positions, vocab_size)
    noise = fused_gumbel(torch.from_numpy(row_words(words, positions)), vocab_size)
    torch.testing.assert_close(noise, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(noise.argmax(-1), expected.argmax(-1))

rows = RowSampling.of([SamplingParams(max_new_tokens=1, temperature=t) for t in (1.0, 0.0, 0.7)], torch.device("cpu"))
levels = torch.tensor([[0, 1, 1, 0, 1]] * 3)
for vocab_size in (64, BLOCK, 5000):
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.randn(3, 5, vocab_size + 8, dtype=dtype)[:, :, :vocab_size]
        noise = gumbel_noise(words, positions, vocab_size)
        expected = noise.gather(1, levels[..., None].expand(-1, -1, vocab_size))
        expected = perturb(scale(logits, rows), expected, rows).argmax(-1)
        hashed = torch.from_numpy(row_words(words, positions))
        assert torch.equal(fused_choice(logits, hashed, levels, rows.divisor, rows.noise_factor), expected)
level = torch.zeros(3, 1, dtype=torch.int64)
for ties in ([7, 9], [BLOCK + 3, 12], [4000, 2 * BLOCK]):
    logits = torch.zeros(3, 1, 5000)
    logits[:, :, ties] = 50.0
    chosen = fused_choice(logits, hashed, level, rows.divisor, torch.zeros(3))
    assert chosen.tolist() == [[min(ties)]] * 3
print("equal")
"""


BUILD = """
from rlhfspec.engine.decoding import noise_cuda

block = {"block": noise_cuda.BLOCK}
built("gumbel", noise_cuda._gumbel, ["*i32", "*i32", "*fp32", "i32"], block)
for dtype in ("fp32", "bf16", "fp16"):
    arrays = ["*" + dtype, "*i32", "*i32", "*i64", "*fp32", "*fp32", "*fp32", "*i64"]
    built("choices " + dtype, noise_cuda._choices, [*arrays, "i32", "i32", "i32", "i64", "i64", "i32"], block)
print(json.dumps(found))
"""


@NEEDS_TRITON
def test_kernels_equal_torch() -> None:
    assert interpreted(SCRIPT) == "equal"


@NEEDS_TRITON
def test_kernels_compile_for_an_h100_without_one(tmp_path: Path) -> None:
    found = json.loads(output_of(COMPILE + BUILD, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0"))
    assert list(found) == ["gumbel", "choices fp32", "choices bf16", "choices fp16"]
    for name, kernel in found.items():
        assert kernel["shifts"] == ["shr.u32"], f"{name}: the hash shifts unsigned words"
        assert kernel["registers"] <= MOST_REGISTERS, name
        assert kernel["spilled"] == [0, 0], f"{name} spills registers"


class HashedByTorch(HashedNoise):
    """The kernels' results by functions that make all values."""

    def __init__(self, made: torch.Tensor, count: Counter[str]) -> None:
        self._values_made, self._count = made, count

    @property
    def values(self) -> torch.Tensor:
        self._count["looked at"] += 1
        return self._values_made

    def choose(self, logits, levels, divisors, factors):
        self._count["chosen"] += 1
        mine = self._values_made.gather(1, levels[..., None].expand(-1, -1, logits.shape[-1]))
        return (logits.float() / divisors[:, None, None] + mine * factors[:, None, None]).argmax(-1)


class FusedSource(HashedNoiseSource):
    """Where a GPU would hash as it chooses."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.count: Counter[str] = Counter()
        self._make = own_backend().noise

    def of_words(self, words: torch.Tensor, vocab_size: int) -> HashedNoise:
        return HashedByTorch(self._make.of_words(words, vocab_size).values, self.count)


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.0}, {"temperature": 0.7}, {"top_p": 0.8}], ids=str
)
@pytest.mark.parametrize("plan", ["off", "chain4", "tree8", "suffix"])
def test_a_rollout_that_hashes_as_it_chooses_is_the_same(
    make_engine, make_requests, plan: str, sampling: dict
) -> None:
    requests = make_requests((5, 40, 17), SamplingParams(max_new_tokens=24, **sampling))
    expected = make_engine("off").generate(requests)
    backend = own_backend()
    backend.noise = source = FusedSource()
    got = make_engine(plan, backend=backend).generate(requests)
    assert [c.token_ids.tolist() for c in got] == [c.token_ids.tolist() for c in expected]
    assert [c.policy_logprobs.tobytes() for c in got] == [c.policy_logprobs.tobytes() for c in expected]
    if "top_p" in sampling:
        assert source.count["looked at"] and not source.count["chosen"], "filters look at every token"
    else:
        assert source.count["chosen"]
        # a fused chain takes values
        looks = ("tree8", "chain4") if backend.name == "cpu" else ("tree8",)
        assert bool(source.count["looked at"]) == (plan in looks), "target rows are chosen without a look"


def test_a_part_of_hashed_noise_is_the_part_of_its_values() -> None:
    values = torch.randn(3, 4, 9)
    part = HashedByTorch(values, Counter())[:, 1:3]
    assert torch.equal(part.values, values[:, 1:3])
