"""The head of the benchmark: made once from other prompts than those it is measured on, and kept in the cache."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from benchmarks.support.workload import Workload, default_cache_dir, job
from rlhfspec.core.files import whole_folder
from rlhfspec.engine.drafters.head.head_weights import HeadWeights, load_head, save_head
from rlhfspec.learning.drafts.make_head import HeadRecipe, make_head

BUDGET_S = 900.0
NUM_TOKENS = {"quick": 2_000, "default": 36_000, "full": 36_000}
FACTS_FILE = "made.json"


def head_folder(workload: Workload, mode: str) -> Path:
    """Where it is kept."""
    return default_cache_dir() / (f"bench-head-{workload.name}" + ("-quick" if mode == "quick" else ""))


def bench_head(workload: Workload, mode: str) -> tuple[HeadWeights, dict[str, float]]:
    """Return a head made from the workload's own prompts, at temperature 1, and what making it took."""
    folder = head_folder(workload, mode)
    target = workload.target("float32")
    if not (folder / "config.json").is_file():
        with job("making a draft head") as tick:
            made = make_head(
                target,
                workload.prompts,
                sampling=replace(workload.sampling, max_new_tokens=256),
                vocab_size=workload.vocab_size,
                budget_s=BUDGET_S,
                recipe=HeadRecipe(num_tokens=NUM_TOKENS[mode]),
                progress=tick,
            )
        facts = {
            "head_make_s": made.seconds,
            "head_own_tokens": float(made.num_tokens),
            "head_weights_m": made.head.num_trained / 1e6,
        }
        with whole_folder(folder) as partial:
            save_head(partial, made.head)
            (partial / FACTS_FILE).write_text(json.dumps(facts))
    layers = int(target.config.get_text_config().num_hidden_layers)
    return load_head(folder, num_target_layers=layers), json.loads((folder / FACTS_FILE).read_text())
