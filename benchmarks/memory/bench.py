"""What each process of a GRPO run of SmolLM2-135M-Instruct holds when all hold most: all weights, LoRA, and TRL.

The runs of `bench trl`: the same prompts, samples and tokens, float32, two trainer threads, two instances, two steps.
Shared pages are counted once (PSS). `memory_over_trl` is ours over TRL's, which is one process; `lora_over_full` LoRA's
over that of all weights.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

from .. import trl
from ..peers.build import TRL_RELEASES, trl_folder
from ..support.harness import Bench
from ..support.workload import real_model
from .processes import PARTS, Peak, peak_memory

ROUNDS = {"quick": 1, "default": 3, "full": 5}
STEPS = 2
"The second begins with the optimizer's moments."
LORA = ("trainer.lora.rank=16", "trainer.learning_rate=2e-4")


def run(bench: Bench) -> int:
    """Write OUT/memory.json; returns 0. Nothing where the model cannot be had, no TRL beside it where that cannot."""
    model, folder = real_model(bench.console), trl_folder(TRL_RELEASES[-1])
    if model is None:
        return 0
    out, prompts = bench.out, trl.write_prompts(bench.out / "prompts.jsonl", STEPS)
    sides: dict[str, Callable[[int], object]] = {
        "full": lambda seed: trl.by_us(out, prompts, STEPS, seed),
        "lora": lambda seed: trl.by_us(out, prompts, STEPS, seed, LORA),
    }
    if folder is not None:
        order = {"model": str(model), "out": str(out / "trl"), "steps": STEPS, "threads": trl.THREADS}
        order |= {"task": "grpo", "rows": str(prompts), "rollouts": "own"}
        sides["trl"] = lambda seed: trl.by_trl(folder, order | {"seed": seed})
    peaks: dict[str, list[Peak]] = {name: [] for name in sides}
    for seed in range(ROUNDS[bench.mode]):
        for name, make in sides.items():
            with peak_memory() as peak:
                make(seed)
            peaks[name].append(peak)
            bench.console.print(f"{name}, seed {seed}: {peak}", markup=False)
    for name, found in peaks.items():
        bench.figures.keep(f"peak_gb_{name}", [peak.bytes / 1e9 for peak in found])
        bench.figures.keep(f"resident_gb_{name}", [peak.resident_bytes / 1e9 for peak in found])
    for ratio, ours, theirs in (("memory_over_trl", "full", "trl"), ("lora_over_full", "lora", "full")):
        if theirs in peaks:
            over = [a.bytes / b.bytes for a, b in zip(peaks[ours], peaks[theirs], strict=True)]
            bench.figures.keep(ratio, over)
    bench.write(num_threads=trl.THREADS, trl=TRL_RELEASES[-1], processes=table(peaks["full"], peaks["lora"]))
    return 0


def table(full: list[Peak], lora: list[Peak]) -> list[dict[str, str | int]]:
    """A row a kind of process, those that hold most first: MB by part, their sum, and the sum with LoRA."""
    kinds = dict.fromkeys(kind for peak in (*full, *lora) for kind in peak.kinds)

    def mb(bytes_: list[int]) -> int:
        return round(fmean(bytes_) / 1e6)

    return [
        {
            "process": kind,
            "number": max(peak.processes[kind] for peak in (*full, *lora)),
            **{part: mb([peak.held[kind, part] for peak in full]) for part in PARTS},
            "all": mb([peak.of(kind) for peak in full]),
            "with LoRA": mb([peak.of(kind) for peak in lora]),
        }
        for kind in kinds
    ]
