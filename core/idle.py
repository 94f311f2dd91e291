"""Keys that were set and change nothing: told by `check` and when a run begins, refused where nothing is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .errors import ConfigError
from .settings.algorithm import ALGORITHMS, AlgorithmConfig
from .settings.section import Section

if TYPE_CHECKING:
    from .config import Config
    from .settings.supervised import SupervisedConfig

_Row = tuple[str, Callable[[Any, Any], object], str]
"Section and names in it (`*`: all but those behind it), whether they are idle (of config, section), why."


def _one_step(config: Any) -> bool:
    """Of a run's Config."""
    num_samples = config.rollout.prompts_per_iteration * config.rollout.samples_per_prompt
    is_one = config.trainer.epochs == 1 and num_samples <= config.trainer.minibatch_size
    return is_one and not config.rollout.max_staleness


_RATIOS = "a batch is learned from in one step of the policy that sampled it: ratios are 1"
_KL = "in the only step the policy is the reference model: the KL and its gradient are 0"
_RUN: tuple[_Row, ...] = (
    ("algorithm.kl_estimator kl_placement", lambda c, s: not s.kl_coef, "algorithm.kl_coef is 0"),
    ("algorithm.kl_coef kl_estimator kl_placement kl_target",
     lambda c, s: c.run.iterations == 1 and s.kl_coef > 0 and _one_step(c), _KL),
    ("algorithm.clip_ratio clip_ratio_high dual_clip", lambda c, s: _one_step(c), _RATIOS),
    ("trainer.value_learning_rate value_epochs", lambda c, s: not c.algorithm.has_critic, "there is no critic"),
    ("trainer.strategy", lambda c, s: c.cluster.trainer.num_actors == 1, "there is one trainer"),
    ("evaluation.* every", lambda c, s: not s.every, "evaluation.every is 0"),
    ("evaluation.top_p", lambda c, s: not s.temperature, "evaluation.temperature is 0: greedy"),
    ("evaluation.holdout", lambda c, s: s.data is not None, "evaluation.data has its own prompts"),
    ("environment.* kind", lambda c, s: s.kind is None, "environment.kind is null"),
    ("reward.kind", lambda c, s: c.algorithm.advantage == "none" and s.kind != "none",
     "algorithm.advantage is none: rewards are reported, and not learned from"),
    ("models.draft", lambda c, s: not c.speculation.has_draft,
     "speculation takes none: it does with drafter model, head or mtp, and a policy that is not off"),
    ("speculation.policy", lambda c, s: s.drafter == "none" and s.policy != "off", "drafter is none"),
    ("speculation.drafter look_up", lambda c, s: s.drafter != "none" and s.policy == "off", "policy is off"),
    ("speculation.num_nodes depth branching", lambda c, s: not (s.drafts and s.policy == "fixed"),
     "nothing drafts by policy fixed"),
    ("speculation.profile", lambda c, s: not s.needs_profile, "the policy goes by no profile"),
    ("speculation.max_nodes max_depth", lambda c, s: not (s.drafts and s.policy != "fixed") and not c.takes_drafts,
     "nothing drafts by an adaptive policy"),
    ("speculation.suffix_min suffix_memory_mb", lambda c, s: not s.remembers, "nothing is looked up"),
    ("drafter_training.* refit spot", lambda c, s: not (c.refits_draft or c.trains_head), "no drafter learns"),
    ("drafter_training.buffer_mb head_learning_rate", lambda c, s: not c.trains_head, "no draft head learns"),
    ("drafter_training.budget_share max_tokens_per_step max_passes", lambda c, s: s.mode == "cotrain", "it cotrains"),
    ("engine.turn_cache_mb", lambda c, s: c.environment.kind is None, "environment.kind is null"),
    ("engine.graph_memory_mb kernels", lambda c, s: not c.decodes_on_gpu, "instances have no GPUs"),
    ("reallocation.* policy", lambda c, s: s.policy in ("pull", "static") or c.cluster.generation.most == 1,
     "nothing moves between instances"),
    ("reward.dtype max_tokens", lambda c, s: not s.models, "no reward model scores"),
    ("reward.timeout_s", lambda c, s: not s.calls_functions, "no function is called"),
    ("reward.server", lambda c, s: not any(one.app or one.url for one in s.scorers), "no server is asked"),
    ("reward.cache", lambda c, s: all(one.kind != "judge" for one in s.scorers), "no judge is asked"),
    ("cluster.environment", lambda c, s: c.environment.kind is None, "environment.kind is null"),
    ("data.weight_of stopping", lambda c, s: len(s.sources) < 2, "there is one source"),
    ("cluster.dashboard_port", lambda c, s: not s.dashboard, "cluster.dashboard is false"),
    ("rollout.weight_load", lambda c, s: not s.max_staleness, "rollout.max_staleness is 0"),
    ("run.keep_checkpoints", lambda c, s: not s.checkpoint_every, "run.checkpoint_every is 0"),
    ("run.keep_states", lambda c, s: not s.state_every, "run.state_every is 0"),
)  # fmt: skip
_SUPERVISED: tuple[_Row, ...] = (
    ("trainer.eval_every", lambda c, s: not (c.data.eval_path or c.data.eval_share), "nothing is held out"),
    ("trainer.epochs", lambda c, s: s.max_steps is not None, "trainer.max_steps is set"),
    ("trainer.strategy", lambda c, s: c.cluster.trainer.num_actors == 1, "there is one trainer"),
    ("data.weight_of stopping", lambda c, s: not getattr(s, "sources", ()), "there is one source"),
    ("data.eval_share", lambda c, s: s.eval_path is not None, "data.eval_path names the held-out rows"),
)
_DECODES = """speculation engine run.cache_dir run.template_time models.draft models.tokenizer models.dtype
models.trust_remote_code"""
READ = {
    "rlhfspec.Engine": f"{_DECODES} cluster.generation.num_gpus",
    "the server": f"{_DECODES} cluster reallocation drafter_training.mode",
    "the evaluation": f"{_DECODES} cluster reallocation drafter_training.mode data reward environment run.seed "
    "algorithm.combine algorithm.kind rollout.samples_per_prompt evaluation.data evaluation.every evaluation.holdout "
    "evaluation.limit evaluation.max_new_tokens evaluation.samples_per_prompt evaluation.temperature evaluation.top_p "
    "sampling.max_new_tokens sampling.stop sampling.end_token_ids sampling.stop_token_ids",
}
"Sections and keys that are read where nothing is trained, some by checks of what goes together."


def require_read(said: dict[str, Any], by: str) -> None:
    """Raise ConfigError for the first key of nested mappings that one of `READ` does not read."""
    reads = READ[by].split()
    for key in _leaves(said):
        if not any(f"{key}.".startswith(f"{one}.") for one in reads):
            raise ConfigError(f"{key} has no effect on {by}, which reads {', '.join(reads)}; take it out")


def require_effect(idle: list[tuple[str, str]], said: dict[str, Any]) -> None:
    """Raise ConfigError for the first key of nested mappings that, of `idle_keys`, is one of what drafts."""
    for key, why in idle:
        # `max_`: of drafts that another model's responses bring, too
        if key.startswith(("models.", "speculation.")) and "max_" not in key and key in _leaves(said):
            raise ConfigError(f"{key} has no effect: {why}; take it out")


def _leaves(tree: dict[str, Any], above: str = "") -> Iterator[str]:
    for name, held in tree.items():
        is_section = isinstance(held, dict) and held
        yield from _leaves(held, f"{above}{name}.") if is_section else (f"{above}{name}",)


def idle_keys(config: Config | SupervisedConfig) -> list[tuple[str, str]]:
    """Each key that is set to another value than its default and changes nothing, and why; the first reason of each."""
    table = _RUN if "algorithm" in type(config).model_fields else _SUPERVISED
    usual = getattr(config, "device_defaults", {})
    found = {
        key: why
        for names, is_idle, why in reversed(table)
        if is_idle(config, getattr(config, names.partition(".")[0]))
        for key in _set(config, names)
        if key not in usual
    }
    return sorted(found.items())


def _set(config: Any, keys: str) -> Iterator[str]:
    first, _, rest = keys.partition(".")
    section: Section = getattr(config, first)
    usual = ALGORITHMS[section.kind] if isinstance(section, AlgorithmConfig) else {}
    names = rest.split()
    for name, field in type(section).model_fields.items():
        default = usual.get(name, field.get_default(call_default_factory=True))
        if (name in names) != (names[0] == "*") and getattr(section, name) != default:
            yield f"{first}.{name}"
