"""What `rlhfspec drafter` does: a draft head for a target from prompts, and what a head's drafts are worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from transformers import PreTrainedTokenizerBase
from transformers.configuration_utils import PretrainedConfig

from ...core.config import Config
from ...core.config_io import apply_overrides, config_from_dict
from ...core.errors import ConfigError, DataError
from ...core.records import Prompt, SamplingParams
from ...engine.drafters.head.head_weights import HeadOrigin, HeadWeights, load_head, require_fit, save_head
from ...engine.weights.causal_lm import PreTrainedModel, max_context_tokens
from ...engine.weights.loading import load_causal_lm, load_hf_config, num_token_ids
from ...engine.weights.weight_files import weights_digest
from ...learning.data.prompts import load_prompts, sampling_params
from ...learning.drafts.evaluate_head import Acceptance, evaluate_head
from ...learning.drafts.make_head import HeadRecipe, MadeHead, make_head
from ..observe.console import Reporter
from ..plan.inputs import end_tokens, read_tokenizer
from ..plan.names import resolve_models

TREES = (4, 8, 16)
"Nodes of the fixed trees whose mean acceptance length is told beside the chain's."
FEW_POSITIONS = 200
WORTH_LENGTH = 1.1
"Tokens a decode step. A level of a head costs 6 to 9% of a plain step."


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterInputs:
    """Target, tokenizer and prompts that both commands take."""

    config: Config
    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    prompts: list[Prompt]
    head: HeadWeights | None
    "that is evaluated"

    @property
    def vocab_size(self) -> int:
        """Token ids that may be sampled: the tokenizer's, as far as the model has them."""
        return min(num_token_ids(self.tokenizer), self.target.config.get_text_config().vocab_size)

    def sampling(self, temperature: float, max_new_tokens: int) -> SamplingParams:
        """With the stop tokens that a run would have; behind a stop string there is more to learn from."""
        wished = self.config.sampling.model_copy(
            update={"temperature": temperature, "max_new_tokens": max_new_tokens, "stop": ()}
        )
        return sampling_params(wished, self.tokenizer, model=self.config.models.target)


def read_inputs(
    report: Reporter,
    *,
    target: str,
    data: str,
    overrides: Sequence[str],
    max_new_tokens: int,
    category_field: str | None = None,
    head: Path | None = None,
) -> DrafterInputs:
    """Load what both commands need. Prompts are chat turns where the tokenizer has a template, unless data.chat says.

    A head that is evaluated is read before anything that takes long.
    Raises ModelError, DataError and ConfigError for what cannot be used.
    """
    fields = {"reward_fields": [category_field]} if category_field else {}
    tree: dict[str, Any] = {
        "models": {"target": target, "draft": None},
        "speculation": {"drafter": "none", "policy": "off"},
        "data": {"path": data, "on_long_prompt": "skip", "reference_field": None, **fields},
    }
    config = config_from_dict(apply_overrides(tree, overrides), origin="the command")
    config = resolve_models(config, report)
    name = config.models.target
    trust = config.models.trust_remote_code
    read = None if head is None else read_head(head, load_hf_config(name, trust_remote_code=trust))
    tokenizer = read_tokenizer(config.models, config.run.template_time)
    says_chat = any(one.startswith("data.chat=") for one in overrides)
    if tokenizer.chat_template is not None and not says_chat:
        config = config.model_copy(update={"data": config.data.model_copy(update={"chat": True})})
    report.stage("reading model and prompts")
    dataset = load_prompts(config.data, tokenizer, seed=config.run.seed)
    ends = end_tokens(config.data, config.sampling, name, dataset, tokenizer)
    sampling = config.sampling.model_copy(update={"end_token_ids": ends.token_ids})
    config = config.model_copy(update={"sampling": sampling})
    model = load_causal_lm(name, "float32", trust_remote_code=trust)
    report.stop()
    form = "chat template of the tokenizer" if config.data.chat else "as they stand"
    chat_line = f"prompts: {form} (data.chat={str(config.data.chat).lower()}); a run must have the same"
    for line in (chat_line, *dataset.notes(), ends.line):
        if line is not None:
            report.note(line)
    limit = max_context_tokens(model.config)
    prompts = [
        prompt
        for prompt in dataset.prompts
        if limit is None or len(prompt.token_ids) + max_new_tokens <= limit
    ]
    if not prompts:
        raise DataError(
            f"no prompt of {data} leaves room for {max_new_tokens} tokens in the target's context of {limit}; lower "
            "--max-new-tokens"
        )
    return DrafterInputs(config=config, target=model, tokenizer=tokenizer, prompts=prompts, head=read)


def make_drafter(
    inputs: DrafterInputs,
    report: Reporter,
    *,
    out: Path,
    budget_s: float,
    temperature: float,
    max_new_tokens: int,
    recipe: HeadRecipe,
    seed: int,
) -> MadeHead:
    """Make a head and write it into a folder. Raises as `make_head`, and StorageError."""
    with report.job("making the draft head") as tick:
        made = make_head(
            inputs.target,
            inputs.prompts,
            sampling=inputs.sampling(temperature, max_new_tokens),
            vocab_size=inputs.vocab_size,
            budget_s=budget_s,
            seed=seed,
            recipe=recipe,
            progress=tick,
        )
    name = inputs.config.models.target
    origin = HeadOrigin(target=name, target_weights=weights_digest(name), chat=inputs.config.data.chat)
    save_head(out, made.head, origin)
    report.note(
        f"draft head {out}: {made.head.num_trained / 1e6:.1f}M weights, {made.num_tokens:,} own tokens in "
        f"{made.generate_s:.0f} s, {made.num_learned_tokens:,} learned from in {made.num_steps} steps and "
        f"{made.train_s:.0f} s, {made.seconds:.0f} s in all"
    )
    print_acceptance([(f"held out, temperature {temperature:g}", made.acceptance)], report)
    _say_worth("held out", made.acceptance, report)
    return made


def evaluate_drafter(
    inputs: DrafterInputs,
    report: Reporter,
    *,
    temperatures: Sequence[float],
    max_new_tokens: int,
    num_levels: int,
    seed: int,
    category_field: str | None,
) -> list[Acceptance]:
    """Evaluate a head and print tables. Raises ConfigError: the inputs have none."""
    if inputs.head is None:
        raise ConfigError("a draft head is evaluated: expected its folder, got none; give --drafter")
    with report.job("drafting along own responses") as tick:
        found = evaluate_head(
            inputs.target,
            inputs.head,
            inputs.prompts,
            samplings=[inputs.sampling(one, max_new_tokens) for one in temperatures],
            vocab_size=inputs.vocab_size,
            num_levels=num_levels,
            seed=seed,
            category_field=category_field,
            progress=tick,
        )
    named = [(f"temperature {t:g}", one) for t, one in zip(temperatures, found, strict=True)]
    print_acceptance(named, report)
    for name, acceptance in named:
        _say_worth(name, acceptance, report)
        _print_positions(name, acceptance, report)
        if category_field is not None:
            print_acceptance(
                list(acceptance.by_category().items()), report, title=f"by {category_field}, {name}"
            )
    return found


def read_head(folder: Path, target: PretrainedConfig) -> HeadWeights:
    """A head for a target of this config. Raises ModelError."""
    head = load_head(folder, num_target_layers=target.get_text_config().num_hidden_layers)
    require_fit(head.config, target)
    return head


def say_fit(found: Sequence[Acceptance], report: Reporter, *, target: str, drafter: Path, data: str) -> None:
    """Close an evaluation: whether the head fits, and what comes next."""
    length = max(one.tree_length(TREES[-1]) for one in found)
    reached = f"{length:.2f} tokens a decode step with the best fixed tree of {TREES[-1]}, 1 without drafts"
    if length < WORTH_LENGTH:
        report.note(
            f"the head does not fit this target and these prompts: {reached}; make one: rlhfspec drafter make "
            f"--target {target} --data {data} --out NEW"
        )
    else:
        report.note(
            f"the head fits this target: {reached}; next: set models.draft={drafter} and speculation.drafter=head, and "
            "`rlhfspec profile --config FILE --out profile` tells what it gains on this machine"
        )


def print_acceptance(
    named: Sequence[tuple[str, Acceptance]], report: Reporter, *, title: str = "acceptance of chains"
) -> None:
    """A table: each level's acceptance where the levels before it were right, and mean tokens of a decode step."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name, _ in named:
        table.add_column(name, justify="right", overflow="fold")
    levels = [acceptance.by_level() for _, acceptance in named]
    for level in range(max((len(one) for one in levels), default=0)):
        cells = [f"{one[level]:.3f}" if level < len(one) else "-" for one in levels]
        table.add_row(f"level {level + 1}", *cells)
    table.add_row("mean acceptance length", *(f"{one.mean_length():.3f}" for _, one in named))
    for nodes in TREES:
        cells = [f"{one.tree_length(nodes):.3f}" for _, one in named]
        table.add_row(f"the same, best fixed tree of {nodes}", *cells)
    table.add_row("positions", *(f"{one.num_anchors:,}" for _, one in named))
    report.console.print(table)


def _say_worth(name: str, acceptance: Acceptance, report: Reporter) -> None:
    """Say where the counts are too few, and where the drafts cannot pay for themselves."""
    if acceptance.num_anchors < FEW_POSITIONS:
        report.note(
            f"{name}: {acceptance.num_anchors} positions are too few to judge a head by; give more prompts, a larger "
            "--max-new-tokens, or more time"
        )
    length = acceptance.tree_length(TREES[-1])
    if length < WORTH_LENGTH:
        report.note(
            f"{name}: {length:.2f} tokens a decode step at best, 1 without drafts: this head is worth nothing to a "
            "run; make one that learns longer (--budget, --tokens) or drafts more ids (--draft-vocab)"
        )


def _print_positions(name: str, acceptance: Acceptance, report: Reporter) -> None:
    table = Table(title=f"by position in the response, {name}", title_justify="left")
    for column in ("from token", "level 1", "mean acceptance length"):
        table.add_column(column, justify="right")
    for first, rate, length in acceptance.by_position():
        table.add_row(f"{first:,}", f"{rate:.3f}", f"{length:.3f}")
    report.console.print(table)
