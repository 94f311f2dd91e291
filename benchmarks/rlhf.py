"""What RLHF runs reach and where their time goes: one short run an algorithm, on the demo's letter chains.

Every run is `rlhfspec train` with a shipped config, in a process of its own; figures come from its `metrics.jsonl`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers import AutoModelForSequenceClassification

from benchmarks import chain
from benchmarks.oracles.trl_comparison import OURS, differences, frozen
from benchmarks.support.harness import Bench
from benchmarks.support.processes import run_command, setting_words
from benchmarks.support.result import ROOT
from benchmarks.support.workload import demo_workload
from rlhfspec.cluster.observe.summary import summarise
from rlhfspec.core.metrics import read_metrics

CONFIGS: Mapping[str, Path] = {"ppo": ROOT / "configs" / "demo.yaml"} | {
    kind: ROOT / "configs" / "algorithms" / f"{kind}.yaml"
    for kind in ("grpo", "dr_grpo", "rloo", "reinforce_pp", "dapo", "gspo", "cispo")
}
ITERATIONS = {"quick": 2, "default": 15, "full": 30}
QUICK = ("ppo", "grpo")
STEP_ITERATIONS = {"quick": 1, "default": 4, "full": 8}
REWARD_ACTORS = 2
"With a reward model of the target's size: both cores are free when generation has ended."
PLAIN_STATIC = ("speculation.policy=off", "speculation.drafter=none", "reallocation.policy=static")

Metrics = Sequence[Mapping[str, float]]


def run(*, out: Path, mode: str, data: Path | None) -> int:
    """Run the benchmark, and `bench chain` where OUT has no result of it; returns 0."""
    bench = Bench("rlhf", out=out, mode=mode)
    out, figures = bench.out, bench.figures.values
    for kind, config in CONFIGS.items():
        if mode == "quick" and kind not in QUICK:
            continue
        metrics = train(config, out, kind, [f"run.iterations={ITERATIONS[mode]}"])
        summary = summarise(metrics)
        assert summary is not None, "a run that ended well has iterations"
        figures[f"reward_gain_{kind}"] = summary.reward_gain
        bench.console.print(f"reward_gain_{kind}: {figures[f'reward_gain_{kind}']:.3f}")
        if kind == "ppo":
            figures["amdahl_bound"] = summary.amdahl_bound
    figures |= _scoring(out, mode)
    figures |= _steps(out, mode)
    figures["gold_gain_reward_model"] = _gold_gain(out, mode)
    numbers = frozen()
    figures["trl_max_abs_difference"] = max(differences(case, numbers) for case in OURS)
    bench.write(iterations=ITERATIONS[mode])
    return 0


def _gold_gain(out: Path, mode: str) -> float:
    """The least of the chain's seeds: what PPO on a trained reward model adds to the gold score."""
    result = out / "chain.json"
    if not result.exists():
        chain.run(out=out, mode=mode, data=None)
    return json.loads(result.read_text())["figures"]["gold_gain_reward_model"]


def train(config: Path, out: Path, name: str, settings: Sequence[str]) -> Metrics:
    """The metrics of one run. Raises RlhfSpecError with the end of its output when it fails."""
    runs = out / "runs"
    before = set(runs.glob("*")) if runs.is_dir() else set()
    words = [f"run.output_dir={runs}", f"run.name={name}", "cluster.dashboard=false", *settings]
    run_command(
        ["train", "--config", str(config), *setting_words(words)], folder=ROOT, log=out / f"{name}.log"
    )
    (folder,) = set(runs.glob("*")) - before
    return read_metrics(folder / "metrics.jsonl")


def _scoring(out: Path, mode: str) -> dict[str, float]:
    """Share of a step between the last sample's end and the update, with a reward model of the target's size."""
    folder = out / "reward_model"
    workload = demo_workload(1)
    model = AutoModelForSequenceClassification.from_pretrained(workload.paths.target, num_labels=1)
    model.save_pretrained(folder)
    workload.tokenizer.save_pretrained(folder)
    metrics = train(
        CONFIGS["ppo"],
        out,
        "scoring",
        [
            f"run.iterations={STEP_ITERATIONS[mode]}",
            "reward.kind=model",
            f"reward.model={folder}",
            f"cluster.reward.num_actors={REWARD_ACTORS}",
        ],
    )
    return {
        "scoring_wait_share": sum(row["time/score_s"] for row in metrics)
        / sum(row["time/iteration_s"] for row in metrics)
    }


def _steps(out: Path, mode: str) -> dict[str, float]:
    """Seconds of a whole step with plain decoding and no moves, over ours; interleaved, the first step left out."""
    seconds: dict[str, list[float]] = {"plain": [], "ours": []}
    length = [f"run.iterations={STEP_ITERATIONS[mode] + 1}"]
    for name in ("plain", "ours", "ours", "plain"):
        metrics = train(CONFIGS["ppo"], out, name, length + list(PLAIN_STATIC if name == "plain" else ()))
        seconds[name] += [row["time/iteration_s"] for row in metrics[1:]]
    mean = {name: sum(values) / len(values) for name, values in seconds.items()}
    return {"step_over_plain_static": mean["plain"] / mean["ours"]}
