"""A whole step of RLHF: with speculation and moves beside plain and static, and with a reward model.

Every run is `rlhfspec train` with a shipped config, in a process of its own; figures come from its `metrics.jsonl`.
The demo is `configs/demo.yaml`, the real model `configs/smollm2_grpo.yaml`, both in the shape that they have there.
With --full one short run an algorithm beside: what each shipped config reaches on the demo's letter chains.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path

from transformers import AutoModelForSequenceClassification

from ..cluster.observe.summary import amdahl_bound, summarise
from .support.harness import Bench
from .support.result import ROOT
from .support.runs import DEMO, PPO, SMOLLM2, train
from .support.workload import demo_workload, real_model

CONFIGS: Mapping[str, Path] = {"ppo": PPO} | {
    kind: ROOT / "configs" / "algorithms" / f"{kind}.yaml"
    for kind in ("grpo", "dr_grpo", "rloo", "reinforce_pp", "dapo", "gspo", "cispo")
}
ITERATIONS = 30
"Of a run that is to learn."
STEPS = {"quick": 1, "default": 3, "full": 8}
"Measured in a run; the first step before them is left out: it waits for whatever is made once."
ORDER = ("plain", "ours", "ours", "plain")
"Forwards and backwards: a drift of the machine falls on both alike."
REWARD_ACTORS = 2
"With a reward model of the target's size: both cores are free when generation has ended."
PLAIN_STATIC = ("speculation.policy=off", "speculation.drafter=none", "reallocation.policy=static")


def run(bench: Bench) -> int:
    """Write OUT/rlhf.json or OUT/rlhf_real.json; returns 1 where plain and ours learned other weights."""
    mode = bench.mode
    if bench.is_real and real_model(bench.console) is None:
        return 0
    _steps(bench, SMOLLM2 if bench.is_real else DEMO)
    bench.write(steps=STEPS[mode])
    if not bench.is_real and not bench.is_quick:
        bench.figures.values["scoring_wait_share"] = _scoring(bench.out, mode)
        bench.write(steps=STEPS[mode])
        if bench.is_full:
            _algorithms(bench)
            bench.write(steps=STEPS[mode], iterations=ITERATIONS)
    return 1 if bench.figures.values["differing_weights"] else 0


def _steps(bench: Bench, config: Path) -> None:
    """Seconds of a step and of its rollout, plain and without moves, over ours; and whether both learn the same."""
    steps: dict[str, list[Mapping[str, float]]] = {name: [] for name in ORDER}
    weights: list[list[str]] = []
    for name in ORDER:
        settings = [f"run.iterations={STEPS[bench.mode] + 1}", *(PLAIN_STATIC if name == "plain" else ())]
        made = train(config, bench.out, name, settings)
        steps[name] += made.metrics[1:]
        weights.append(_versions(made.folder))
        bench.console.print(f"{name}: {[round(row['time/iteration_s'], 2) for row in steps[name]]} s a step")
    for figure, part in {"step": "iteration", "rollout": "generate"}.items():
        plain, ours = ([row[f"time/{part}_s"] for row in steps[name]] for name in ("plain", "ours"))
        # step by step of the same prompts, whose lengths differ between steps
        bench.figures.keep(f"{figure}_over_plain_static", [a / b for a, b in zip(plain, ours, strict=True)])
        bench.figures.values[f"{figure}_s_plain_static"] = statistics.fmean(plain)
        bench.figures.values[f"{figure}_s"] = statistics.fmean(ours)
    values = bench.figures.values
    values["generate_share_plain_static"] = values["rollout_s_plain_static"] / values["step_s_plain_static"]
    values["amdahl_bound"] = amdahl_bound(values["step_s"], values["rollout_s"])
    values["differing_weights"] = float(sum(one != weights[0] for one in weights))


def _versions(run: Path) -> list[str]:
    """Checksums of the target's versions."""
    rows = [json.loads(line) for line in (run / "weights.jsonl").read_text().splitlines()]
    return [row["parameter_checksum"] for row in rows if row["model"] == "target"]


def _scoring(out: Path, mode: str) -> float:
    """Share of a step between the last sample's end and the update, with a reward model of the target's size."""
    folder = out / "reward_model"
    workload = demo_workload(1)
    model = AutoModelForSequenceClassification.from_pretrained(workload.paths.target, num_labels=1)
    model.save_pretrained(folder)
    workload.tokenizer.save_pretrained(folder)
    settings = [
        f"run.iterations={STEPS[mode]}",
        "reward.kind=model",
        f"reward.model={folder}",
        f"cluster.reward.num_actors={REWARD_ACTORS}",
    ]
    metrics = train(DEMO, out, "scoring", settings).metrics
    return sum(row["time/score_s"] for row in metrics) / sum(row["time/iteration_s"] for row in metrics)


def _algorithms(bench: Bench) -> None:
    for kind, config in CONFIGS.items():
        summary = summarise(train(config, bench.out, kind, [f"run.iterations={ITERATIONS}"]).metrics)
        assert summary is not None, "a run that ended well has iterations"
        bench.figures.values[f"reward_gain_{kind}"] = summary.reward_gain
        bench.console.print(f"reward_gain_{kind}: {summary.reward_gain:.3f}")
