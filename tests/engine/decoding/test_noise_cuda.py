"""The fused noise and choice against torch's in Triton's interpreter, and compiled for a GPU that is not there.

Which calls take them, and that a rollout stays what it is, is tested everywhere, with torch in the kernels' place.
"""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from core.records import SamplingParams
from engine.decoding.noise import HashedNoise, HashedNoiseSource
from tests.helpers.backends import CPU, own_backend

SCRIPT = """
import numpy as np, torch
from core.records import (SampleKey, Stream)
from engine.decoding.noise import row_words, gumbel_noise, key_words
from engine.decoding.noise_cuda import BLOCK, fused_choice, fused_gumbel
from engine.decoding.sampling_rule import RowSampling, perturb, scale
from core.records import (SamplingParams)

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


COMPILE = """
import json, subprocess, sys, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from engine.decoding import noise_cuda

def built(kernel, types):
    names = kernel.arg_names
    constant = {(names.index("block"),): noise_cuda.BLOCK}
    source = ASTSource(fn=kernel, signature=dict(zip(names, types, strict=True)), constexprs=constant)
    return compile(source, target=GPUTarget("cuda", 90, 32)).asm

tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
gumbel = ["*i32", "*i32", "*fp32", "i32", "constexpr"]
kernels = {"gumbel": built(noise_cuda._gumbel, gumbel)}
for dtype in ("fp32", "bf16", "fp16"):
    arrays = ["*" + dtype, "*i32", "*i32", "*i64", "*fp32", "*fp32", "*fp32", "*i64"]
    choices = [*arrays, "i32", "i32", "i32", "i64", "i64", "i32", "constexpr"]
    kernels["choices " + dtype] = built(noise_cuda._choices, choices)
found = {}
for name, made in kernels.items():
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made["cubin"])
        file.flush()
        used = subprocess.run(
            [str(tools / "cuobjdump"), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    words = made["ptx"].split()
    found[name] = {"shifts": sorted({word for word in words if word.startswith("shr.")}), "used": used}
print(json.dumps(found))
"""
MOST_REGISTERS = 64
"A thread's; with more, fewer than 1024 threads run on one multiprocessor."
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: extra dev")


def output_of(script: str, **environment: str) -> str:
    """Run in a process of its own: type checks of test runs are put into functions, which Triton cannot read then."""
    root = Path(__file__).resolve().parents[3]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@needs_triton
def test_kernels_equal_torch() -> None:
    assert output_of(SCRIPT, TRITON_INTERPRET="1") == "equal"


@needs_triton
def test_kernels_compile_for_an_h100_without_one(tmp_path: Path) -> None:
    found = json.loads(output_of(COMPILE, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0"))
    assert list(found) == ["gumbel", "choices fp32", "choices bf16", "choices fp16"]
    for name, kernel in found.items():
        assert kernel["shifts"] == ["shr.u32"], f"{name}: the hash shifts unsigned words"
        (registers,) = re.findall(r"REG:(\d+)", kernel["used"])
        assert int(registers) <= MOST_REGISTERS, name
        assert re.findall(r"(?:STACK|LOCAL):(\d+)", kernel["used"]) == ["0", "0"], f"{name} spills registers"


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
@pytest.mark.parametrize("plan", ["off", "chain4", "tree8", "ngram"])
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
