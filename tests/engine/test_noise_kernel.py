"""The fused noise against torch's, in Triton's interpreter: skipped where Triton is not installed (CPU builds)."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = """
import numpy as np, torch
from core.records import SampleKey, Stream
from engine.noise import _row_words, gumbel_noise, key_words
from engine.noise_kernel import BLOCK, fused_gumbel

words = np.stack([key_words(SampleKey(run_seed=3, stream=Stream.TRAIN, sample_index=i)) for i in (0, 7, 1 << 40)])
positions = np.array([[0, 1], [5, 6], [100_000, 100_001]])
for vocab_size in (64, BLOCK, 5000):
    expected = gumbel_noise(words, positions, vocab_size)
    noise = fused_gumbel(torch.from_numpy(_row_words(words, positions)), vocab_size)
    torch.testing.assert_close(noise, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(noise.argmax(-1), expected.argmax(-1))
print("equal")
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton comes with CUDA builds of torch: not run")
def test_it_is_the_noise() -> None:
    """In a process of its own: type checks of test runs are put into functions, which Triton cannot read then."""
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "equal", done.stderr
