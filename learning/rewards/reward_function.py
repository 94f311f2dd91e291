"""The one place that builds a reward from the config."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from ...core.config import RewardConfig
from ...core.errors import ConfigError
from ...core.records import Reward
from ...core.settings.reward import Scorer
from .reward_stage import RewardStage
from .score_request import RewardSource, RuleSource

ServedSource = Callable[[Scorer], RewardSource]
"Makes what asks a reward server: only processes with Ray can."


def build_reward(
    config: RewardConfig,
    *,
    device: str = "cpu",
    served: ServedSource | None = None,
    fields: Sequence[str] | None = (),
    template_time: str | None = None,
) -> RewardStage:
    """Build the reward that the config describes; models work on `device`, as torch names it.

    `fields` are the columns (data.reward_fields) that a function may ask for by name; None: whatever it asks for.
    `template_time` (run.template_time) is what chat templates of reward models are told; None: the clock's.

    Raises ConfigError for an unknown kind or a function that cannot be imported, ModelError for a
    reward model that cannot be loaded.
    """
    sources = [_source(scorer, config, device, served, fields) for scorer in config.scorers]
    time = None if template_time is None else datetime.fromisoformat(template_time)
    return RewardStage(config, sources, template_time=time)


def _source(
    scorer: Scorer,
    config: RewardConfig,
    device: str,
    served: ServedSource | None,
    fields: Sequence[str] | None,
) -> RewardSource:
    # imported here so that a rule reward does not wait for what it never uses
    if scorer.kind == "none":
        return RuleSource(lambda prompt, response: Reward(value=0.0))
    if scorer.kind == "chain":
        from ..tasks.chain_task import chain_reward

        return RuleSource(chain_reward)
    if scorer.kind == "one_sentence":
        from ..tasks.one_sentence import one_sentence_reward

        return RuleSource(one_sentence_reward)
    if scorer.kind == "gsm8k":
        from ..tasks.gsm8k import gsm8k_reward

        return RuleSource(gsm8k_reward)
    if scorer.kind == "model" and scorer.model is not None:
        from .reward_model import ModelReward

        return ModelReward(scorer.model, config, device=device)
    if scorer.kind == "judge":
        from .judge import Judge

        return Judge(scorer, config.server, Path(config.cache))
    if scorer.kind == "code":
        from .code_reward import CodeReward

        return CodeReward(scorer, config)
    if scorer.kind == "serve":
        if served is None:
            raise ConfigError("reward.kind serve is asked by the reward pool of a run; it is not built here")
        return served(scorer)
    if scorer.kind == "environment":
        raise ConfigError(
            "reward.kind 'environment' is what an environment gives, and no part of a mixture; there is no function "
            "to build"
        )
    if ":" in scorer.kind or scorer.kind == "format":
        from .timed_function import UserReward

        return UserReward(
            scorer.kind,
            timeout_s=config.timeout_s,
            pattern=scorer.pattern if scorer.kind == "format" else None,
            fields=fields,
            scope=scorer.scope,
        )
    raise ConfigError(
        f"unknown reward.kind '{scorer.kind}': expected chain, one_sentence, gsm8k, model, serve, format, judge, code, "
        "none or package.module:function"
    )
