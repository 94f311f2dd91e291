"""How much a draft head gains from more of its target's own tokens: SmolLM2-135M-Instruct, GSM8K.

Heads are made by `drafter make`'s recipe from more and more responses, up to four times what its 15 minutes take on
two cores, and their drafts are counted on the target's responses to prompts that none of them has seen. It depends on
tokens and not on the machine's speed; what is known is written after every head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.support.harness import Bench
from benchmarks.support.workload import Workload, real_workload
from rlhfspec.learning.drafts.evaluate_head import OwnResponse, Responder
from rlhfspec.learning.drafts.head import TargetParts
from rlhfspec.learning.drafts.make_head import HeadRecipe, learn_head

POINTS = {
    "quick": (500, 1_000),
    "default": (4_500, 9_000, 18_000),
    "full": (9_000, 18_000, 36_000, 72_000, 144_000),
}
"Own tokens of each head."
HELD_OUT = {"quick": 2, "default": 16, "full": 32}
"Prompts that no head learns from."
PROMPTS = {"quick": 24, "default": 600, "full": 3000}
"To learn from, at most."
MAX_NEW_TOKENS = {"quick": 64, "default": 256, "full": 256}
TREE_NODES = 8
SEED = 0


def run(*, out: Path, mode: str, data: Path | None) -> int:
    """Write OUT/learning_curve.json; returns 0, also when there is no model or no data."""
    bench = Bench("learning_curve", out=out, mode=mode, data=data)
    if data is None:
        bench.console.print("skipped: a head learns from real prompts; give --data")
        return 0
    held_out = HELD_OUT[mode]
    workload = real_workload(
        held_out + PROMPTS[mode], data=data, max_new_tokens=MAX_NEW_TOKENS[mode], console=bench.console
    )
    if workload is None:
        return 0
    target = workload.target("float32")
    responder = Responder(
        target,
        TargetParts.of(target).taps,
        vocab_size=workload.vocab_size,
        max_total_tokens=workload.max_total_tokens,
    )
    unseen = list(_responses(responder, replace(workload, prompts=workload.prompts[:held_out]), SEED + 1))
    more = _responses(responder, replace(workload, prompts=workload.prompts[held_out:]), SEED)
    figures, seen, have = bench.figures, list[OwnResponse](), 0
    figures.values["unseen_tokens"] = float(sum(each.num_tokens for each in unseen))
    for wanted in POINTS[mode]:
        while have < wanted:
            response = next(more, None)
            if response is None:
                break
            seen.append(response)
            have += response.num_tokens
        made = learn_head(
            target,
            seen,
            unseen,
            sampling=workload.sampling,
            vocab_size=workload.vocab_size,
            seed=SEED,
            recipe=HeadRecipe(num_levels=4),
        )
        found = made.acceptance
        figures.values |= {
            f"tree_length_{wanted}": found.tree_length(TREE_NODES),
            f"chain_length_{wanted}": found.mean_length(),
            f"accepted_at_1_{wanted}": found.by_level()[0],
            f"own_tokens_{wanted}": float(made.num_tokens),
            f"learned_tokens_{wanted}": float(made.num_learned_tokens),
        }
        bench.write()
        bench.console.print(
            f"{made.num_tokens:,} tokens: tree {found.tree_length(TREE_NODES):.3f}, chain {found.mean_length():.3f}; "
            f"learned in {made.train_s:.0f} s"
        )
    return 0


def _responses(responder: Responder, workload: Workload, seed: int) -> Iterator[OwnResponse]:
    return responder.responses(workload.prompts, workload.sampling, seed=seed)
