"""The fused noise against torch's, in Triton's interpreter: skipped where Triton is not installed (CPU builds)."""

import os

import numpy as np
import pytest
import torch

from core.records import SampleKey, Stream
from engine.noise import _row_words, gumbel_noise, key_words

os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch: not run")
from engine.noise_kernel import BLOCK, fused_gumbel


@pytest.mark.parametrize("vocab_size", [64, BLOCK, 5000])
def test_it_is_the_noise(vocab_size: int) -> None:
    keys = [SampleKey(run_seed=3, stream=Stream.TRAIN, sample_index=index) for index in (0, 7, 1 << 40)]
    words = np.stack([key_words(key) for key in keys])
    positions = np.array([[0, 1], [5, 6], [100_000, 100_001]])
    expected = gumbel_noise(words, positions, vocab_size)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    noise = fused_gumbel(torch.from_numpy(_row_words(words, positions)).to(device), vocab_size)
    torch.testing.assert_close(noise.cpu(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(noise.cpu().argmax(-1), expected.argmax(-1))
