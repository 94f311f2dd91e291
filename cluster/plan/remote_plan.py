"""The plan of a run that starts elsewhere: of models and data nothing but sizes has to be here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from transformers import AutoModelForSequenceClassification

from ...core.config import Config, DataConfig
from ...core.errors import ConfigError
from ...engine.weights.loading import meta_model
from ...learning.training.adapter import count_adapter_params
from ..placement.ray_session import MIN_OBJECT_STORE_BYTES
from .drafts import what_drafts
from .memory_plan import MemoryNeeds, MemoryPlan
from .model_files import config_like, count_params, model_shape
from .model_sizes import ModelShapes
from .topology import Topology, plan_topology

ROLES = ("target", "draft", "reward")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePlan:
    """What a run that starts elsewhere will hold, and where its actors are to stand."""

    topology: Topology
    memory: MemoryPlan
    profile_threads: int
    "of the process that starts the run, which measures the pair first; 0: it does not"


def plan_remote(config: Config, like: Iterable[str]) -> RemotePlan:
    """Plan by the models' configs and the limits of lengths, without weights, data or tokenizers.

    Args:
        config: of the run; its models' names are those of the cluster.
        like: `ROLE=PLACE` with one of `ROLES` and the folder or hub name of a model of the same shape that is here.

    Raises:
        ModelError: the config of a model cannot be read here, and `like` names no other.
        ConfigError: `like` names no role, or the pools cannot be laid out.
    """
    places = _places(like)
    target_config = config_like("target", config.models.target, config.models, places)
    target = model_shape(target_config)
    if config.trainer.lora is not None:
        module = meta_model(config.models.target, target_config)
        target = replace(target, num_adapter_params=count_adapter_params(module, config.trainer.lora))
    drafts = what_drafts(config)
    draft = None if drafts is None else drafts.shape_like(target_config, places)
    rewards = [config_like("reward", name, config.models, places) for name in config.reward.models]
    params = sum(count_params(each, AutoModelForSequenceClassification) for each in rewards) or None
    # the data are not read: a sample may be as long as they may be
    longest = _longest_prompt(config.data) + config.sampling.max_new_tokens
    if config.evaluation.every:
        responses = config.evaluation.max_new_tokens or config.sampling.max_new_tokens
        longest = max(longest, _longest_prompt(config.evaluation.data or config.data) + responses)
    needs = MemoryNeeds(
        config,
        ModelShapes(target=target, draft=draft, reward_params=params),
        max_total_tokens=longest + config.max_first_words_tokens,
    )
    return RemotePlan(
        topology=plan_topology(config),
        # of every node: each pulls what is published
        memory=needs.plan(object_store_bytes=max(MIN_OBJECT_STORE_BYTES, needs.object_store())),
        profile_threads=config.engine.num_threads if config.speculation.goes_by_profile else 0,
    )


def _places(like: Iterable[str]) -> dict[str, str]:
    found = {}
    for text in like:
        role, _, place = text.partition("=")
        if role not in ROLES or not place:
            raise ConfigError(f"--like expects ROLE=DIR with a role of {', '.join(ROLES)}, got '{text}'")
        found[role] = place
    return found


def _longest_prompt(data: DataConfig) -> int:
    return max(source.max_prompt_tokens for source in data.each_source())
