"""OpenVINO GenAI as a peer: its continuous batching pipeline on the CPU.

Weights, arithmetic and KV cache all have the dtype that was asked for (the default KV cache is 8 bit), no
weight compression, prefix caching off, the KV cache reserved up front; all else as it comes. The checkpoint is
exported once by optimum-intel. No tokenizer is needed: token ids go in and come out.
bfloat16 needs a processor with instructions for it; elsewhere the pipeline refuses to be built.
Checked in float32 on a random 2-layer Llama: 512 of 512 greedy tokens are those of Hugging Face `generate`.
"""

from __future__ import annotations

import itertools
from importlib.metadata import version
from pathlib import Path

from serving import Generate, ModelOrder, converted, serve

BLOCK_TOKENS = 32
"Tokens in a KV block of the CPU plugin."
PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}


def load(order: ModelOrder) -> tuple[str, Generate]:
    """Compile the model; one pipeline serves all batch sizes."""
    import numpy as np
    import openvino  # pyright: ignore[reportMissingImports]
    import openvino_genai  # pyright: ignore[reportMissingImports]

    release = version("openvino-genai")
    model = converted(order.model, f"openvino-{release}", lambda folder: export(order.model, folder))
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.max_num_seqs = order.max_batch
    scheduler.num_kv_blocks = order.max_batch * (order.max_total_tokens // BLOCK_TOKENS + 2)
    precision = PRECISIONS[order.dtype]
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        str(model),
        scheduler,
        "CPU",
        {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            "INFERENCE_NUM_THREADS": order.threads,
        },
    )

    seeds = itertools.count()

    def generate(prompts: list[list[int]], max_new_tokens: int, temperature: float) -> list[list[int]]:
        configs = [openvino_genai.GenerationConfig() for _ in prompts]
        for config in configs:
            config.max_new_tokens = max_new_tokens
            config.ignore_eos = True
            config.set_eos_token_id(0)  # a model without one fails validation; ignore_eos makes it void
            config.do_sample = temperature > 0
            config.temperature = temperature or 1.0
            config.rng_seed = next(seeds)
        inputs = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        return [list(result.m_generation_ids[0]) for result in pipeline.generate(inputs, configs)]

    return release, generate


def export(model: Path, folder: Path) -> None:
    """Write the OpenVINO form of a checkpoint, weights uncompressed."""
    from optimum.intel import OVModelForCausalLM  # pyright: ignore[reportMissingImports]

    exported = OVModelForCausalLM.from_pretrained(str(model), export=True, compile=False, load_in_8bit=False)
    exported.save_pretrained(str(folder))


if __name__ == "__main__":
    serve(load)
