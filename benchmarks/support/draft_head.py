"""A draft head for the benchmarks, made once from other prompts than those it is measured on, kept in the cache."""

from __future__ import annotations

from dataclasses import replace

from ...core.files import whole_folder
from ...engine.drafters.head.head_weights import HeadWeights, load_head, save_head
from ...learning.drafts.make_head import HeadRecipe, make_head
from .workload import Workload, default_cache_dir, job

BUDGET_S = 900.0
NUM_TOKENS = 2_000


def bench_head(workload: Workload) -> HeadWeights:
    """Return a head made from the workload's own prompts, at temperature 1, in some seconds."""
    folder = default_cache_dir() / f"bench-head-{workload.name}-quick"
    target = workload.target("float32")
    if not (folder / "config.json").is_file():
        with job("making a draft head") as tick:
            made = make_head(
                target,
                workload.prompts,
                sampling=replace(workload.sampling, max_new_tokens=256),
                vocab_size=workload.vocab_size,
                budget_s=BUDGET_S,
                recipe=HeadRecipe(num_tokens=NUM_TOKENS),
                progress=tick,
            )
        with whole_folder(folder) as partial:
            save_head(partial, made.head)
    layers = int(target.config.get_text_config().num_hidden_layers)
    return load_head(folder, num_target_layers=layers)
