"""A pair whose target is large enough for caches to weigh: the demo target grown to 29M parameters, with its draft.

Twice as wide and ten layers deep it computes the same function (`net2net`), so drafts are accepted as ever.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from transformers import LlamaForCausalLM

from benchmarks.support.workload import Workload, default_cache_dir, demo_workload
from rlhfspec.core.records import Prompt
from rlhfspec.engine.weights.loading import load_causal_lm
from rlhfspec.learning.models.make import PairPaths
from rlhfspec.learning.models.net2net import deepen, widen

LAYERS = 10
MAX_POSITIONS = 4096
"Beyond what it was trained on it writes nonsense, at the same speed."


def wide_workload(num_prompts: int, *, prompt_tokens: int, new_tokens: int) -> Workload:
    """Prompts of exactly `prompt_tokens` tokens, several of the chain task behind one another; no stop tokens."""
    per_prompt = max(1, prompt_tokens // 4)
    workload = demo_workload(num_prompts + per_prompt)
    rows = [prompt.token_ids for prompt in workload.prompts]
    prompts = [
        Prompt(prompt_id=number, token_ids=np.concatenate(rows[number : number + per_prompt])[:prompt_tokens])
        for number in range(num_prompts)
    ]
    return replace(
        workload,
        name="wide",
        paths=wide_pair(workload.paths),
        prompts=prompts,
        sampling=replace(workload.sampling, max_new_tokens=new_tokens, stop_token_ids=()),
    )


def wide_pair(small: PairPaths) -> PairPaths:
    """Return the larger pair, made on the first call and found in the cache on later ones."""
    folder = default_cache_dir() / f"wide-{small.target.parent.name}"
    if not (folder / "config.json").is_file():
        target = load_causal_lm(str(small.target), "float32")
        assert isinstance(target, LlamaForCausalLM)
        grown = deepen(widen(target, factor=2), num_layers=LAYERS)
        grown.config.max_position_embeddings = MAX_POSITIONS
        grown.save_pretrained(folder)
        for path in small.target.glob("*token*"):
            (folder / path.name).write_bytes(path.read_bytes())
    return PairPaths(target=folder, draft=small.draft)
