"""Does each way of learning learn, on SmolLM2-135M-Instruct and GSM8K's questions; what a teacher and DPO cost.

Every part is commands of `rlhfspec` as a user gives them, in OUT/learns/PART. Distillation: the model with three of its
30 layers cut out learns from the whole one. DPO: pairs that a run has sampled, the shorter answer ahead. A reward over
a group: the demo pair is ranked within each prompt's samples. A judge: the model is taught one rule by `sft`, served by
`serve engine`, and scores the samples. Costs: of a distillation step beside a GRPO step and the teacher's forwards;
of DPO beside TRL's DPOTrainer. The result's provenance has whole curves.
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import requests
import torch

from ..cluster.ray_start.ray_init import free_ports
from ..core.config import AlgorithmConfig
from ..core.metrics import read_metrics
from ..engine.weights.loading import load_causal_lm, load_tokenizer
from . import trl
from .memory.processes import peak_memory
from .peers.build import TRL_RELEASES, trl_folder
from .served import serving
from .support import tool_tasks
from .support.harness import Bench
from .support.processes import run_command, setting_words
from .support.result import ROOT
from .support.runs import DEMO, SMOLLM2, MadeRun, train
from .support.workload import BENCH_SEED, real_model, real_workload
from .update import learner_of, sample

CUT_LAYERS = (13, 14, 15)
ITERATIONS = {"quick": 2, "default": 16, "full": 30}
"Distillation has twice as many."
COST_ROUNDS = {"quick": 1, "default": 2, "full": 5}
"Steps of a run that are compared; the first step before them is left out. Each side runs twice, in turn."
LAST = 3
"Iterations whose median is what was reached."
SAMPLED_PROMPTS, SAMPLES = {"quick": 8, "default": 64, "full": 128}, 4
"For DPO; the judge scores the same samples."
TAUGHT = {"quick": 16, "default": 160, "full": 512}
"Rows that the judge learns the rule from."
SHOWN_TWICE = {
    "trainer.batch_size": 8,
    "trainer.epochs": 2,
    "trainer.learning_rate": 1e-4,
    "trainer.warmup_steps": 4,
    "trainer.num_threads": 1,
}
"How `sft` teaches before a part begins."
SHORT = "{prompt}\nAnswer in one short sentence."
RULE = "Does this text contain a digit? Answer Score: 1 for yes, Score: 0 for no.\n\nText: "
BARS = {
    "distill_loss_last_over_first": ("at most", 0.5),
    "dpo_accuracy_held_out": ("at least", 0.7),
    "group_vowels_last_over_first": ("at least", 1.2),
    "judge_agreement": ("at least", 0.9),
    "tools_accuracy_gain": ("at least", 0.3),
    "code_passed_gain": ("at least", 0.3),
    "judge_asked_by_rerun": ("at most", 0.0),
    "distill_step_over_parts": ("at most", 1.25),
    "dpo_s_over_trl": ("at most", 0.7),
    "dpo_memory_over_trl": ("at most", 1.0),
}
REWARDS = '''
def shortness(response):
    return -len(response.split())


def place(responses):
    """Share of a prompt's other samples that have fewer vowels, whose share of the letters is counted beside."""
    vowels = [sum(map(response.count, "aeiou")) / max(1, len(response)) for response in responses]
    return [{"value": sum(own > other for other in vowels) / (len(vowels) - 1), "vowels": own} for own in vowels]
'''


def run(bench: Bench) -> int:
    """Write OUT/learns.json; returns 1 when a bar is not met; 0, having said why, without the model or --data."""
    model = real_model(bench.console)
    if model is None or bench.data is None:
        bench.console.print(
            "skipped: learns needs the model, and --data with GSM8K's questions", markup=False
        )
        return 0
    wrong = [line for part in PARTS for line in learn(bench, model, part)]
    return 1 if wrong else 0


def learn(bench: Bench, model: Path, part: str) -> list[str]:
    """One part, in a folder of its own; the bars that it does not meet. Raises RlhfSpecError: a command failed."""
    folder = bench.out / "learns" / part
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "rewards.py").write_text(REWARDS + tool_tasks.RIGHT)
    before = set(bench.figures.values)
    PARTS[part](bench, model, folder)
    bench.write(curves=_curves(bench))
    new = bench.figures.values.keys() - before
    wrong = [f"{name} {bench.figures.values[name]:.3g}, {' '.join(map(str, BARS[name]))}" for name in BARS
             if name in new and not _met(name, bench.figures.values[name])]  # fmt: skip
    for line in wrong:
        bench.console.print(f"not met: {line}", style="red", soft_wrap=True)
    return wrong


def _met(name: str, value: float) -> bool:
    side, bar = BARS[name]
    return value <= bar if side == "at most" else value >= bar


def _curves(bench: Bench) -> dict[str, list[float]]:
    curves: dict[str, list[float]] = {}
    for row in bench.rows:
        curves.setdefault(row["curve"], []).append(round(row["value"], 4))
    return curves


def _curve(bench: Bench, name: str, values: Sequence[float]) -> None:
    """Keep a curve, where it began, and where it ended."""
    bench.rows += [{"curve": name, "step": step, "value": value} for step, value in enumerate(values)]
    first, last = values[0], statistics.median(values[-LAST:])
    found = {"first": first, "last": last, "last_over_first": last / first}
    bench.figures.values |= {
        f"{name}_{what}": value for what, value in found.items() if first or what == "last"
    }


def _gsm8k(bench: Bench, folder: Path, name: str, settings: Mapping[str, Any]) -> MadeRun:
    """A run of the shipped config on GSM8K's shorter questions, nothing drafted."""
    shared = {
        "data.task": "null",
        "data.path": bench.data,
        "data.max_prompt_tokens": 96,
        "data.on_long_prompt": "skip",
        "speculation.drafter": "none",
        "speculation.policy": "off",
        "cluster.generation.num_actors": 1,
        "trainer.max_tokens_per_forward": 1280,
        "trainer.num_threads": 2,
        "run.state_every": 0,
    }
    return train(SMOLLM2, folder, name, [f"{key}={value}" for key, value in {**shared, **settings}.items()])


def _distilled(bench: Bench, model: Path, folder: Path) -> None:
    made = _gsm8k(
        bench,
        folder,
        "distill",
        {
            "run.iterations": 2 * ITERATIONS[bench.mode],
            "models.target": cut_model(model, folder / "student"),
            "models.teacher": model,
            "algorithm.kind": "distill",
            "reward.kind": "none",
            "sampling.max_new_tokens": 48,
            "rollout.prompts_per_iteration": 8,
            "rollout.samples_per_prompt": 2,
            "trainer.learning_rate": 1e-4,
        },
    )
    _curve(bench, "distill_loss", [row["learner/distill_loss"] for row in made.metrics])


def cut_model(model: Path, folder: Path) -> Path:
    """The model without some layers of its middle, as a checkpoint; returns its folder."""
    loaded = load_causal_lm(str(model), "float32")
    layers: Any = loaded.base_model.layers
    kept = [layer for at, layer in enumerate(layers) if at not in CUT_LAYERS]
    loaded.base_model.layers = torch.nn.ModuleList(kept)
    loaded.config.num_hidden_layers = len(kept)
    loaded.save_pretrained(folder)
    load_tokenizer(str(model)).save_pretrained(folder)
    return folder


def _preferred(bench: Bench, model: Path, folder: Path) -> None:
    """One batch at a learning rate that changes nothing; pairs by another reward; DPO with some held out."""
    made = _gsm8k(
        bench,
        folder,
        "sampled",
        {
            "run.iterations": 1,
            "data.prompt_template": json.dumps(SHORT),
            "data.max_prompt_tokens": 84,
            "reward.kind": "gsm8k",
            "sampling.max_new_tokens": 64,
            "engine.max_running_samples": 64,
            "rollout.prompts_per_iteration": SAMPLED_PROMPTS[bench.mode],
            "rollout.samples_per_prompt": SAMPLES,
            "trainer.minibatch_size": SAMPLED_PROMPTS[bench.mode] * SAMPLES,
            "trainer.learning_rate": 1e-12,
        },
    )
    pairs, reward = folder / "pairs.jsonl", f"{folder / 'rewards.py'}:shortness"
    words = ["pairs", str(made.folder), "--reward", reward, "--out", str(pairs)]
    run_command(words, folder=ROOT, log=folder / "pairs.log")
    settings = {
        "data.eval_share": 0.3,
        "trainer.epochs": 2,
        "trainer.batch_size": 8,
        "trainer.learning_rate": 1e-5,
        "trainer.eval_every": 4,
        "trainer.max_tokens_per_forward": 1280,
    }
    words = ["dpo", "--model", str(model), "--data", str(pairs), "--out", str(folder / "dpo")]
    _command(words, settings, folder / "dpo.log")
    held_out = [row["eval/accuracy"] for row in _metrics(folder / "dpo") if "eval/accuracy" in row]
    _curve(bench, "dpo_accuracy", held_out)
    bench.figures.values |= {
        "dpo_pairs": float(len(pairs.read_text().splitlines())),
        "dpo_accuracy_held_out": held_out[-1],
    }


def _called(bench: Bench, model: Path, folder: Path) -> None:
    """The model is shown calls in a quarter of some conversations, and learns from the answers' worth alone."""
    rows, prompts = folder / "taught.jsonl", folder / "prompts.jsonl"
    template, tools = folder / "template.jinja", folder / "my_tools.py"
    shown = tool_tasks.products(TAUGHT[bench.mode], BENCH_SEED)
    rows.write_text(tool_tasks.as_lines(tool_tasks.demonstrations(shown, called=0.25, seed=BENCH_SEED)))
    prompts.write_text(tool_tasks.as_lines(tool_tasks.products(400, BENCH_SEED + 1)))
    template.write_text(tool_tasks.TEMPLATE)
    tools.write_text(tool_tasks.TOOLS)
    settings = {"model.chat_template": template, "data.eval_share": 0, **SHOWN_TWICE}
    words = ["sft", "--model", str(model), "--data", str(rows), "--out", str(folder / "sft")]
    _command(words, settings, folder / "sft.log")
    settings = {
        "models.target": folder / "sft" / "checkpoints" / "model",
        "environment.kind": "tools",
        "environment.tools": tools,
        "environment.max_turns": 3,
        "reward.kind": f"{folder / 'rewards.py'}:right",
        "sampling.max_new_tokens": 96,
        **_rewarded(bench, prompts),
    }
    made = _gsm8k(bench, folder, "called", settings)
    _curve(bench, "tools_accuracy", [row["reward/mean"] for row in made.metrics])
    _gain(bench, "tools_accuracy")


def _coded(bench: Bench, model: Path, folder: Path) -> None:
    """Functions of one line, run against asserts in the sandbox."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text(tool_tasks.as_lines(tool_tasks.functions(400, BENCH_SEED)))
    settings = {"reward.kind": "code", "sampling.max_new_tokens": 48, **_rewarded(bench, prompts)}
    made = _gsm8k(bench, folder, "coded", settings)
    _curve(bench, "code_passed", [row["reward/mean"] for row in made.metrics])
    _gain(bench, "code_passed")


def _rewarded(bench: Bench, prompts: Path) -> dict[str, Any]:
    return {
        "data.path": prompts,
        "data.prompt_field": "prompt",
        "data.reference_field": "answer",
        "data.chat": "true",
        "data.max_prompt_tokens": 256,
        "run.iterations": ITERATIONS[bench.mode],
        "rollout.prompts_per_iteration": 8,
        "rollout.samples_per_prompt": 4,
        "trainer.minibatch_size": 32,
        "trainer.learning_rate": 2e-5,
    }


def _gain(bench: Bench, name: str) -> None:
    values = bench.figures.values
    values[f"{name}_gain"] = values[f"{name}_last"] - values.get(f"{name}_first", 0.0)


def _ranked(bench: Bench, model: Path, folder: Path) -> None:
    settings = {
        "run.iterations": ITERATIONS[bench.mode],
        "run.checkpoint_every": 0,
        "run.state_every": 0,
        "reward.kind": f"{folder / 'rewards.py'}:place",
        "speculation.policy": "off",
        "speculation.drafter": "none",
        "models.draft": "null",
        "sampling.max_new_tokens": 64,
    }
    made = train(DEMO, folder, "ranked", [f"{key}={value}" for key, value in settings.items()])
    _curve(bench, "group_vowels", [row["reward/vowels"] for row in made.metrics])
    bench.figures.values["group_reward_mean"] = statistics.fmean(row["reward/mean"] for row in made.metrics)


def _judged(bench: Bench, model: Path, folder: Path) -> None:
    """The samples are those of the part before."""
    sampled = next((bench.out / "learns" / "dpo" / "runs").iterdir())
    rows = folder / "taught.jsonl"
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in _taught(bench)))
    settings = {"data.eval_share": 0, "data.chat": "true", **SHOWN_TWICE}
    words = ["sft", "--model", str(model), "--data", str(rows), "--out", str(folder / "sft")]
    _command(words, settings, folder / "sft.log")
    port = free_ports(1)[0]
    judge = {
        "kind": "judge",
        "url": f"http://127.0.0.1:{port}/v1",
        "model": "judge",
        "template": f"{RULE}{{response}}",
        "pattern": "Score: ([01])",
        "answer_tokens": 8,
        "default": 0.5,
        "cache": str(folder / "judge.jsonl"),
    }
    out, asked = folder / "judged.jsonl", list[float]()
    served = [
        "serve",
        "engine",
        "--model",
        str(folder / "sft" / "checkpoints" / "model"),
        "--served-name",
        "judge",
    ]
    served += ["--port", str(port), "--context", "256", *setting_words(["cluster.generation.num_actors=1"])]
    with serving(served, folder / "served.log"):
        for _ in range(2):
            words = ["rescore", str(sampled), "--out", str(out)]
            _command(words, {"reward": json.dumps(judge)}, folder / "rescore.log")
            asked.append(_answered(f"http://127.0.0.1:{port}/metrics"))
    found = [json.loads(line) for line in out.read_text().splitlines()]
    truth = [_has_digit(row["response"]) for row in found]
    agreed = [row["new"] == says for row, says in zip(found, truth, strict=True)]
    bench.figures.values |= {
        "judge_samples": float(len(found)),
        "judge_share_with_digit": statistics.fmean(truth),
        "judge_agreement": statistics.fmean(agreed),
        "judge_asked": asked[0],
        "judge_asked_by_rerun": asked[1] - asked[0],
    }


def _has_digit(text: str) -> float:
    return float(any(character.isdigit() for character in text))


def _taught(bench: Bench) -> Iterator[dict[str, str]]:
    """Sentences of GSM8K's questions and answers, with a digit and without by turns."""
    assert bench.data is not None
    said: dict[float, list[str]] = {0.0: [], 1.0: []}
    for line in bench.data.read_text().splitlines()[-1000:]:
        row = json.loads(line)
        for text in re.split(
            r"(?<=[.?!])\s+|\n", row["question"] + "\n" + re.sub(r"<<.*?>>", "", row["answer"])
        ):
            if 15 < len(text) < 200:
                said[_has_digit(text)].append(text)
    for pair in list(zip(said[0.0], said[1.0], strict=False))[: TAUGHT[bench.mode] // 2]:
        for text in pair:
            # an answer of several sentences has its digit anywhere
            yield {"prompt": f"{RULE}{text}", "completion": f"Score: {_has_digit(text):.0f}"}


def _answered(url: str) -> float:
    """Chats that the server has answered."""
    lines = requests.get(url, timeout=60).text.splitlines()
    counts = [line for line in lines if line.startswith("rlhfspec_serve_requests_total") and "chat" in line]
    return sum(float(line.split()[-1]) for line in counts)


def _teacher_costs(bench: Bench, model: Path, folder: Path) -> None:
    """Updates of one batch by GRPO and by GRPO with a teacher, in turn, in processors' seconds on one thread."""
    workload = real_workload(4, data=bench.data, max_new_tokens=48, console=bench.console)
    assert workload is not None, "the model is there"
    batch = sample(workload)
    alone, beside = (
        learner_of(workload, "model", algorithm=AlgorithmConfig(kind="grpo", kl_coef=0.0, distill_coef=coef))
        for coef in (0.0, 1.0)
    )
    beside.take_teacher(workload.target("float32"))
    seconds: dict[str, list[float]] = {"grpo": [], "distill": [], "teacher": []}
    for place in range(2 * COST_ROUNDS[bench.mode] + 2):
        # there and back, behind a turn that is thrown away
        for name, learner in (("grpo", alone), ("distill", beside))[:: -1 if place % 2 else 1]:
            began_s, by_clock = time.process_time(), time.perf_counter()
            report = learner.update(batch.rollouts)
            taken, by_clock = time.process_time() - began_s, time.perf_counter() - by_clock
            if place > 1:
                seconds[name].append(taken)
                if name == "distill":
                    # the learner takes its parts' time by the clock, in which others may have the processor
                    seconds["teacher"].append(report.part_seconds["teacher"] * taken / by_clock)
    rows = zip(seconds["distill"], seconds["grpo"], seconds["teacher"], strict=True)
    bench.figures.keep("distill_step_over_parts", [both / (one + forward) for both, one, forward in rows])
    for name, values in seconds.items():
        bench.figures.keep(f"{name}_update_s", values)


def _dpo_costs(bench: Bench, model: Path, folder: Path) -> None:
    """As `bench trl` measures it; nothing where TRL cannot be had."""
    release = trl_folder(TRL_RELEASES[-1])
    if release is None:
        bench.console.print(
            "skipped: no TRL; run python -m rlhfspec.benchmarks.peers.build --only trl", markup=False
        )
        return
    steps = COST_ROUNDS[bench.mode] + 1
    sides = trl.dpo_sides(folder, release, model, steps)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    peaks: dict[str, float] = {}
    for seed, name in enumerate(("theirs", "ours", "ours", "theirs")):
        with peak_memory() as peak:
            made = sides[name](seed // 2)
        seconds[name] += [row["step_s"] for row in made[1:]]
        peaks[name] = max(peaks.get(name, 0.0), peak.bytes / 1e9)
    for name in sides:
        bench.figures.keep(f"dpo_step_s_{name}", seconds[name])
        bench.figures.values[f"dpo_peak_gb_{name}"] = peaks[name]
    over = [one / other for one, other in zip(seconds["ours"], seconds["theirs"], strict=True)]
    bench.figures.keep("dpo_s_over_trl", over)
    bench.figures.values["dpo_memory_over_trl"] = peaks["ours"] / peaks["theirs"]


def _command(words: Sequence[str], settings: Mapping[str, Any], log: Path) -> None:
    run_command(
        [*words, *setting_words(f"{key}={value}" for key, value in settings.items())], folder=ROOT, log=log
    )


def _metrics(folder: Path) -> Sequence[Mapping[str, float]]:
    return read_metrics(folder / "metrics.jsonl")


PARTS = {
    "distill": _distilled,
    "dpo": _preferred,
    "group": _ranked,
    "judge": _judged,
    "tools": _called,
    "code": _coded,
    "teacher_costs": _teacher_costs,
    "dpo_costs": _dpo_costs,
}
