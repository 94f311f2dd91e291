"""The reward function protocol and the one place that builds one from the config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from core.config import RewardConfig
from core.errors import ConfigError
from core.records import Prompt, Reward


@runtime_checkable
class RewardFunction(Protocol):
    """Scores responses. Must be a pure function of its arguments: a retry gives the same reward."""

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[Reward]:
        """Score one response a prompt, in order.

        Raises RewardError naming the sample when it cannot be scored.
        """
        ...


def build_reward(config: RewardConfig, *, device: str = "cpu") -> RewardFunction:
    """Build the reward function that `reward.kind` names; a model works on `device`, as torch names it.

    Raises ConfigError for an unknown kind or a function that cannot be imported, ModelError for a
    reward model that cannot be loaded.
    """
    # imported here so that a rule reward does not wait for what it never uses
    if config.kind == "chain":
        from learning.tasks.chain_task import ChainReward

        return ChainReward()
    if config.kind == "one_sentence":
        from learning.tasks.one_sentence import OneSentenceReward

        return OneSentenceReward()
    if config.kind == "gsm8k":
        from learning.tasks.gsm8k import Gsm8kReward

        return Gsm8kReward()
    if config.kind == "model":
        from learning.rewards.reward_model import ModelReward

        if config.model is None:
            raise ConfigError("reward.kind is 'model' but reward.model names none; give a path or hub name")
        return ModelReward(config.model, batch_size=config.batch_size, device=device)
    if config.kind == "environment":
        raise ConfigError(
            "reward.kind 'environment' is what an environment gives; there is no function to build"
        )
    if ":" in config.kind:
        from learning.rewards.user_function import UserReward

        return UserReward(config.kind)
    raise ConfigError(
        f"unknown reward.kind '{config.kind}': expected chain, one_sentence, gsm8k, model or package.module:function"
    )
