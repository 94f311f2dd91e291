"""Evaluates models that are not being trained: what generates and scores in a run, without a trainer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ...core.config import Config
from ...core.config_io import apply_overrides, config_from_dict, section_keys
from ...core.errors import ConfigError
from ...core.files import storage_errors, write_whole
from ...core.idle import idle_keys, require_effect, require_read
from ...core.records import Rollout
from ...learning.data.prompts import PromptDataset, load_prompts
from ...learning.environments.tools import require_tools, tool_schemas
from ..folder.rollouts import write_rollouts
from ..folder.sample_table import SampleRow, as_markdown, choose_samples
from ..observe.console import Reporter
from ..plan.evaluation_prompts import EvaluationPrompts, evaluation_of, notes_of, split_evaluation
from ..plan.inputs import Inputs, longest_sample, require_cores
from ..plan.memory_plan import MemoryNeeds
from ..plan.model_check import check_models
from ..plan.reward_plan import check_reward, reward_columns
from ..plan.run_check import plan_untrained, require_room_for
from ..plan.run_plan import RunPlan
from ..plan.topology import plan_topology
from ..ray_start.ray_session import ray_session
from ..run.evaluate import by_key, evaluate, evaluation_requests
from ..run.stream import RolloutStream
from ..system.system import running_generation
from ..verify.choice import RecordedRun

_OF_THE_RUN_S_ROWS = (
    "task", "path", "sources", "weight_of", "stopping", "skip_rows", "filter", "limit", "deduplicate"
)  # fmt: skip
"Keys of `data` that say which rows a run trains on, and nothing of another file."


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelResult:
    """What one model scored."""

    model: str
    metrics: dict[str, float]
    seconds: float
    rollouts: list[Rollout]


def evaluation_config(
    tree: dict[str, Any], *, model: str, data: str | None, overrides: Sequence[str], sampling: dict[str, Any]
) -> Config:
    """The config of one evaluation, from that of a run or from nothing.

    Args:
        tree: a run's config as nested mappings, or an empty one; it stays as it is.
        model: to be evaluated, in the place of the run's target.
        data: a file of prompts, of which all rows count; None for `evaluation.data` of the config, else its `data`,
            of which `evaluate_model` takes the holdout.
        overrides: `section.key=value`, which go before all else.
        sampling: keys of the section `evaluation`.

    Raises ConfigError: nothing names prompts, or as `untrained_config`.
    """
    made = {name: dict(section or {}) for name, section in tree.items()}
    evaluation = {**made.get("evaluation", {}), **sampling, "every": 0}
    evaluation.pop("metric", None)  # of a run's best checkpoint; nothing is kept here
    own = evaluation.pop("data", None)
    holds_out = data is None and not own and made.get("evaluation", {}).get("every")
    prompts = own or made.get("data", {})
    if data is not None:
        prompts = {key: value for key, value in prompts.items() if key not in _OF_THE_RUN_S_ROWS}
        prompts["path"] = data
    if not prompts:
        raise ConfigError("nothing says which prompts to evaluate: expected --data FILE, or data in --config")
    # a holdout is of a run that evaluates; any count above 0 says so here
    evaluation["every"] = 1 if holds_out else 0
    sections = {"data": prompts, "evaluation": evaluation}
    return untrained_config(made | sections, model=model, overrides=overrides, by="the evaluation")


def untrained_config(tree: dict[str, Any], *, model: str, overrides: Sequence[str], by: str) -> Config:
    """The config of what trains nothing, one of `core.idle.READ`, with what drafts for `model` without a profile.

    Raises ConfigError: an override has no effect, and what the config's classes refuse.
    """
    said = apply_overrides({}, overrides)
    require_read(said, by)
    held = apply_overrides(dict(tree), overrides)
    models, drafting = (section_keys(by, name, held.get(name)) for name in ("models", "speculation"))
    wished = said.get("speculation") or {}
    # checkpoints of a run do not hold the layer that it drafted by
    has_lost_mtp = drafting.get("drafter") == "mtp" and not wished
    if not models.get("draft") and (not drafting or has_lost_mtp):
        drafting = {"drafter": "none", "policy": "off"}
    elif drafting.get("policy", "goodput") == "goodput":
        if "policy" in wished:
            raise ConfigError(
                f"speculation.policy goodput goes by a profile of one target, and {by} has none; set it to fixed, "
                "bandit or off"
            )
        drafting = {**drafting, "policy": "fixed"}
    made = tree | {"models": {**models, "target": model}, "speculation": drafting}
    config = config_from_dict(apply_overrides(made, overrides), origin=by)
    require_effect(idle_keys(config), said)
    return config


def evaluate_model(plan: RunPlan, report: Reporter, first: ModelResult | None = None) -> ModelResult:
    """Evaluate the target of a plan on Ray; of the `first` model's responses it drafts, and is compared with them.

    Raises what the stream raises.
    """
    evaluation, plan = plan.inputs.evaluation, replace(plan, brings_drafts=first is not None)
    assert evaluation is not None
    store = plan.memory.object_store_bytes
    for line in evaluation.lines:
        report.note(line)
    if plan.config.reward.kind == "none" and not plan.config.reward.parts:
        report.note(
            "  reward.kind is none: every reward is 0; --reward gsm8k, or another, scores the samples"
        )
    with (
        ray_session(plan.config.cluster, "evaluation", store_bytes=store, note=report.note) as session,
        running_generation(plan, session, note=report.note) as system,
    ):
        report.start(1)
        earlier = by_key(first.rollouts) if first is not None else {}
        requests = evaluation_requests(evaluation, round_number=0, earlier=earlier)
        done = evaluate(RolloutStream(system, report), requests, earlier)
        report.stop()
    return ModelResult(
        model=plan.config.models.target,
        metrics=done.metrics,
        seconds=done.seconds,
        rollouts=done.collected.rollouts,
    )


def plan_sampling(run: RecordedRun, model: str, *, samples_per_prompt: int, limit: int | None) -> RunPlan:
    """The plan that samples the prompts a run learns from anew, as it samples them, from another model.

    Raises as `plan_evaluation`.
    """
    own, tree = run.config.sampling, run.config.model_dump(mode="json")
    if run.config.evaluation.data is not None:
        tree["evaluation"] |= {"data": None, "every": 0}  # nothing is held out of the run's data
    sampling = {"temperature": own.temperature, "top_p": own.top_p, "max_new_tokens": None, "limit": limit}
    sampling |= {"samples_per_prompt": samples_per_prompt}
    asked = evaluation_config(tree, model=model, data=None, overrides=(), sampling=sampling)
    plan = plan_evaluation(asked, held_out=False)
    evaluation = plan.inputs.evaluation
    assert evaluation is not None
    as_the_run = replace(evaluation.sampling, top_k=own.top_k, min_p=own.min_p)
    return replace(plan, inputs=replace(plan.inputs, evaluation=replace(evaluation, sampling=as_the_run)))


def plan_evaluation(config: Config, *, held_out: bool = True) -> RunPlan:
    """The plan of a run that evaluates its target once and trains nothing.

    On what the run held out of `data`, where it evaluates, else on all of it; of these at most `evaluation.limit`.
    Without `held_out` on the rest, which the run learns from.
    Raises InputError for model, data or reward that cannot be used, PlacementError where there is no room for them.
    """
    require_cores(config.cluster, engine=config.engine.num_threads)
    # nothing learns
    frozen = config.trainer.model_copy(update={"lora": None})
    models = check_models(config.model_copy(update={"trainer": frozen}))
    tokenizer = models.tokenizer
    require_tools(config.environment, config.data, tokenizer)
    tools = tool_schemas(config.environment)
    dataset = load_prompts(config.data, tokenizer, seed=config.run.seed, tools=tools)
    config, evaluation = prompts_of(config, dataset, tokenizer, held_out=held_out)
    evaluation.require_context(models.context_tokens)
    # nothing longer than an evaluation's samples is generated
    most_new = evaluation.sampling.max_new_tokens
    sampling = config.sampling.model_copy(update={"max_new_tokens": most_new})
    config = config.model_copy(update={"sampling": sampling})
    longest = longest_sample(dataset, evaluation, max_new_tokens=most_new)
    models.require_served(
        config.speculation,
        max_total_tokens=evaluation.max_total_tokens + config.max_first_words_tokens,
        takes_drafts=True,
        ranks=config.cluster.generation.tensor_parallel,
    )
    reward = check_reward(config.reward, reward_columns(config.data, config.evaluation))
    total = longest + config.max_first_words_tokens
    inputs = Inputs(tokenizer=tokenizer, dataset=dataset, evaluation=evaluation, max_total_tokens=total)
    needs = MemoryNeeds(config, models.shapes(reward.num_params), max_total_tokens=total)
    memory = plan_untrained(needs, config.cluster)
    require_room_for("the evaluation", memory, config.cluster, advice="engine.kv_cache_mb, --max-new-tokens")
    return RunPlan(
        config=config,
        topology=plan_topology(config),
        models=models,
        inputs=inputs,
        memory=memory,
        scores_groups=reward.in_groups,
    )


def prompts_of(
    config: Config, dataset: PromptDataset, tokenizer: PreTrainedTokenizerBase, *, held_out: bool = True
) -> tuple[Config, EvaluationPrompts]:
    """The prompts that are evaluated; where the config's own evaluations hold some out, those, or the rest.

    Lines say so. Raises DataError: the holdout leaves nothing to train on.
    """
    rest, apart = split_evaluation(config, dataset, tokenizer)
    once = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"every": 0})})
    line = "  the prompts that the run held out of its data (evaluation.holdout)"
    if not held_out:
        line = "  the prompts that the run learns from"
    elif apart is None:
        line = f"  all {len(dataset):,} prompts of data, whether a run was trained on them or not"
    prompts = rest.prompts if apart is None or not held_out else apart.prompts
    return once, evaluation_of(once, prompts, tokenizer, lines=(line, *notes_of(dataset)))


def write_results(folder: Path, results: Sequence[ModelResult], config: dict[str, Any]) -> None:
    """Write `results.json`, and of each model `samples-N.parquet` with all samples and `samples-N.md` with a few.

    Raises StorageError.
    """
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    models = [
        {
            "model": one.model,
            "figures": one.metrics,
            "seconds": one.seconds,
            "samples": f"samples-{n}.parquet",
        }
        for n, one in enumerate(results)
    ]
    text = json.dumps({"models": models, "config": config}, indent=2)
    write_whole(folder / "results.json", f"{text}\n")
    for number, one in enumerate(results):
        write_rollouts(folder / f"samples-{number}.parquet", one.rollouts)
        chosen = choose_samples([SampleRow.of(rollout, None) for rollout in one.rollouts], 12, seed=0)
        write_whole(folder / f"samples-{number}.md", as_markdown(one.model, chosen))
