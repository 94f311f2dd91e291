"""`rlhfspec eval` and `rlhfspec profile`: what a model scores, and what decoding costs, without training."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from .arguments import SECONDS, ConfigFile, Overrides, folder, set_flag
from .declare import Arg

if TYPE_CHECKING:
    from ..jobs.evaluate_models import ModelResult
    from ..observe.console import Reporter


def evaluate(
    *,
    model: Annotated[Sequence[str], Arg("MODEL", "folder or name; several are compared")],
    data: Annotated[
        str,
        Arg(
            "FILE",
            "prompts, all rows: JSONL, Parquet or a data set's name; by default what the config's run evaluates "
            "on, else its data",
        ),
    ]
    | None = None,
    config: Annotated[Path, Arg("FILE", "a run's config: its data, reward, cluster")] | None = None,
    overrides: Annotated[list[str], set_flag("override one key")],
    reward: Annotated[str, Arg("KIND", "gsm8k, file.py:function or another, in place of the config's reward")]
    | None = None,
    samples_per_prompt: Annotated[int, Arg("K", "k of mean@k and pass@k; 1 by default")] | None = None,
    temperature: Annotated[float, Arg("T", "0, the default, is greedy")] | None = None,
    max_new_tokens: Annotated[int, Arg("N", "longest response")] | None = None,
    limit: Annotated[int, Arg("N", "use only the first prompts")] | None = None,
    out: Annotated[Path, Arg("DIR", "write results.json and the samples there", parse=folder)] | None = None,
) -> int:
    r"""Evaluate a model on a file of prompts.

    Generate and score a model's responses to a file of prompts, as evaluations within a run do. Several are compared
    over common noise: they draft from the first one's responses, and what changed is told with its standard error.

      rlhfspec eval --model runs/a/checkpoints/best --data test.jsonl --reward gsm8k
      rlhfspec eval --model base runs/a/checkpoints/target --config configs/gsm8k_ppo.yaml --data test.jsonl \
          --samples-per-prompt 8 --temperature 0.7 --out results
    """
    from ...core.config_io import read_sections
    from ..observe.console import START_UP_STAGES, Reporter

    tree = read_sections(config)
    if reward is not None:
        tree["reward"] = {"kind": reward}
    wishes = {
        "samples_per_prompt": samples_per_prompt,
        "temperature": temperature,
        "max_new_tokens": max_new_tokens,
        "limit": limit,
    }
    sampling = {key: value for key, value in wishes.items() if value is not None}
    with Reporter() as report:
        report.stage(START_UP_STAGES["imports"])
        from ..folder.run_time import with_time
        from ..jobs.evaluate_models import (
            evaluate_model,
            evaluation_config,
            plan_evaluation,
            write_results,
        )
        from ..plan.names import resolve_models

        now = datetime.now()
        configs = [
            evaluation_config(tree, model=name, data=data, overrides=overrides, sampling=sampling)
            for name in model
        ]
        configs = [with_time(resolve_models(one, report), now) for one in configs]
        # all, before the first is loaded
        plans = [plan_evaluation(one) for one in configs]
        results: list[ModelResult] = []
        for name, plan in zip(model, plans, strict=True):
            report.stage(f"evaluating {name}")
            results.append(evaluate_model(plan, report, next(iter(results), None)))
        report.stop()
        _print(model, results, report)
        if out is not None:
            write_results(out, results, configs[0].model_dump(mode="json"))
            report.note(f"results in {out}")
    return 0


def _print(names: Sequence[str], results: list[ModelResult], report: Reporter) -> None:
    from rich.table import Table

    table = Table(title="evaluation", title_justify="left")
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right", overflow="fold")
    for metric in dict.fromkeys(name for one in results for name in one.metrics):
        values = [f"{one.metrics[metric]:.4g}" if metric in one.metrics else "-" for one in results]
        table.add_row(metric.removeprefix("eval/"), *values)
    table.add_row("seconds", *(f"{one.seconds:.1f}" for one in results))
    report.console.print(table)


def profile(
    *,
    config: ConfigFile,
    overrides: Overrides,
    out: Annotated[Path, Arg("DIR", "gets tables and models", parse=folder)],
    budget: Annotated[float, Arg("SECONDS", "about how long (%(default)g)", parse=SECONDS)] = 75.0,
) -> int:
    """Measure costs and acceptance of a pair on this machine.

    Measure a profile of the configured pair on this machine: the time of decode steps over samples, context and tokens
    verified; the acceptance of drafted tokens on the configured prompts. The policy `goodput` goes by it.

      rlhfspec profile --config configs/demo.yaml --out profile
      rlhfspec train --config configs/demo.yaml --set speculation.profile=profile

    Without this, `speculation.profile: auto` measures one at the start of a run and keeps it in the cache.
    """
    from ...core.config_io import load_config
    from ...profiles.profile import save_profile
    from ..observe.console import START_UP_STAGES, Reporter
    from ..plan.inputs import read_inputs
    from ..plan.names import resolve_models
    from ..plan.run_profile import RunProfile

    with Reporter() as report:
        report.stage(START_UP_STAGES["imports"])
        loaded = resolve_models(load_config(config, overrides), report)
        inputs = read_inputs(loaded)
        run_profile = RunProfile(loaded.ending_at(inputs.end_token_ids), inputs)
        described = run_profile.described()
        report.stop()
        made = run_profile.measure(described, report, budget_s=budget)
    save_profile(made.profile, out, made.costs, made.drafts)
    for name, value in made.profile.quality.items():
        report.note(f"{name:<45}{value:.4f}")
    report.note(f"profile {out}")
    return 0
