"""`python -m rlhfspec.benchmarks.speed.peak FOLDER SLOTS TOKENS`: decodes to the full context; its peak in bytes.

It loads what a generation actor loads and no more: the rest of the benchmarks would count.
"""

from __future__ import annotations

import importlib
import sys

import numpy as np
import torch

from ...core.config import EngineConfig, SpeculationConfig
from ...core.records import Prompt, SampleKey, SampleRequest, SamplingParams, Stream
from ...engine.build import build_engine
from ...engine.weights.loading import load_causal_lm
from ..support.processes import peak_bytes

NEW_TOKENS = 8


def main(folder: str, slots: int, tokens: int) -> None:
    """Fill every slot with prompts of random ids, and decode the last tokens."""
    torch.set_num_threads(1)
    importlib.import_module("ray")  # a generation actor has it loaded
    model, random = load_causal_lm(folder, "float32"), np.random.default_rng(0)
    engine = build_engine(
        model,
        None,
        engine=EngineConfig(max_running_samples=slots),
        speculation=SpeculationConfig(policy="off"),
        max_total_tokens=tokens,
    )
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.0)
    engine.generate(
        SampleRequest(
            key=SampleKey(run_seed=0, stream=Stream.BENCH, sample_index=number),
            prompt=Prompt(
                prompt_id=number, token_ids=random.integers(1, model.config.vocab_size, tokens - NEW_TOKENS)
            ),
            sampling=sampling,
        )
        for number in range(slots)
    )
    print(peak_bytes())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
