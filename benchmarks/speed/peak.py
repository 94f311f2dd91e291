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
from ...engine.build import backend_for, build_engine
from ...engine.model.llama_model import LlamaModel
from ...engine.weights.llama_config import LlamaConfig
from ...engine.weights.loading import load_hf_config
from ...engine.weights.stored_weights import stored_weights
from ..support.processes import begin_peak, peak_bytes

NEW_TOKENS = 8


def main(folder: str, slots: int, tokens: int) -> None:
    """Fill every slot with prompts of random ids, and decode the last tokens."""
    torch.set_num_threads(1)
    importlib.import_module("ray")  # a generation actor has it loaded
    settings, random = EngineConfig(max_running_samples=slots), np.random.default_rng(0)
    stored = stored_weights(folder, load_hf_config(folder), "float32")
    assert stored is not None, "its files name every weight as the model does"
    model = LlamaModel(
        LlamaConfig.of(stored.config.to_json_string(use_diff=False)), torch.float32, backend_for(settings)
    )
    altered = model.load(stored.stored_names, ({name: tensor} for name, tensor in stored.tensors()))
    assert altered is None, altered
    # pages of the files: an instance gets its weights otherwise
    begin_peak()
    engine = build_engine(
        model,
        None,
        engine=settings,
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
