"""Keys that somebody set and that change nothing beside the others: told by `check` and when a run begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rlhfspec.core.settings.algorithm import ALGORITHMS, AlgorithmConfig
from rlhfspec.core.settings.section import Section

if TYPE_CHECKING:
    from rlhfspec.core.config import Config
    from rlhfspec.core.settings.supervised import SupervisedConfig

_Row = tuple[str, str, Callable[[Any], bool], str]
"Section, names in it (`*`: all but those behind it), whether they are idle, and why."


def _one_step(config: Config) -> bool:
    num_samples = config.rollout.prompts_per_iteration * config.rollout.samples_per_prompt
    is_one = config.trainer.epochs == 1 and num_samples <= config.trainer.minibatch_size
    return is_one and not config.rollout.max_staleness


_RUN: tuple[_Row, ...] = (
    ("algorithm", "kl_estimator kl_placement", lambda c: not c.algorithm.kl_coef, "algorithm.kl_coef is 0"),
    (
        "algorithm",
        "kl_coef kl_estimator kl_placement kl_target",
        lambda c: _one_step(c) and c.run.iterations == 1 and c.algorithm.kl_coef,
        "in the only step the policy is the reference model: the KL is 0, and its gradient",
    ),
    (
        "algorithm",
        "clip_ratio clip_ratio_high dual_clip",
        _one_step,
        "each batch is learned from in one step, of the policy that sampled it: ratios are 1 but for rounding",
    ),
    (
        "trainer",
        "value_learning_rate value_epochs",
        lambda c: not c.algorithm.has_critic,
        "there is no critic",
    ),
    ("trainer", "strategy", lambda c: c.cluster.trainer.num_actors == 1, "there is one trainer"),
    ("evaluation", "* every", lambda c: not c.evaluation.every, "evaluation.every is 0"),
    (
        "evaluation",
        "top_p",
        lambda c: not c.evaluation.temperature,
        "evaluation.temperature is 0, which is greedy",
    ),
    (
        "evaluation",
        "holdout",
        lambda c: c.evaluation.data is not None,
        "evaluation.data has prompts of its own",
    ),
    ("environment", "* kind", lambda c: c.environment.kind is None, "environment.kind is null"),
    ("models", "draft", lambda c: not c.speculation.names_draft, "speculation.drafter takes none"),
    (
        "speculation",
        "num_nodes depth branching",
        lambda c: c.speculation.policy != "fixed",
        "the policy is not fixed",
    ),
    ("speculation", "profile", lambda c: not c.speculation.goes_by_profile, "the policy goes by no profile"),
    (
        "speculation",
        "max_nodes max_depth",
        lambda c: c.speculation.policy in ("fixed", "off"),
        "it does not adapt",
    ),
    (
        "speculation",
        "suffix_min suffix_memory_mb",
        lambda c: not c.speculation.remembers,
        "nothing is looked up",
    ),
    ("drafter_training", "* refit", lambda c: not (c.refits_draft or c.trains_head), "no drafter learns"),
    ("rollout", "weight_load", lambda c: not c.rollout.max_staleness, "rollout.max_staleness is 0"),
    ("run", "keep_checkpoints", lambda c: not c.run.checkpoint_every, "run.checkpoint_every is 0"),
    ("run", "keep_states", lambda c: not c.run.state_every, "run.state_every is 0"),
)
_SUPERVISED: tuple[_Row, ...] = (
    ("trainer", "eval_every", lambda c: not (c.data.eval_path or c.data.eval_share), "nothing is held out"),
    (
        "trainer",
        "epochs",
        lambda c: c.trainer.max_steps is not None,
        "trainer.max_steps says how long it trains",
    ),
    ("trainer", "strategy", lambda c: c.cluster.trainer.num_actors == 1, "there is one trainer"),
    ("data", "eval_share", lambda c: c.data.eval_path is not None, "data.eval_path names the held-out rows"),
)


def idle_keys(config: Config | SupervisedConfig) -> list[tuple[str, str]]:
    """Each key that is set to another value than its default and changes nothing, and why; the first reason of each."""
    table = _RUN if "algorithm" in type(config).model_fields else _SUPERVISED
    found = {key: why for row in reversed(table) if row[2](config) for key, why in _set_keys(config, row)}
    return sorted(found.items())


def _set_keys(config: Any, row: _Row) -> Iterator[tuple[str, str]]:
    section: Section = getattr(config, row[0])
    usual = ALGORITHMS[section.kind] if isinstance(section, AlgorithmConfig) else {}
    names = row[1].split()
    for name, field in type(section).model_fields.items():
        default = usual.get(name, field.get_default(call_default_factory=True))
        if (name in names) != (names[0] == "*") and getattr(section, name) != default:
            yield f"{row[0]}.{name}", row[3]
