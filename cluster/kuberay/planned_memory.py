"""The memory plan of a run that starts elsewhere: of models and data nothing but sizes has to be here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from transformers import AutoModelForSequenceClassification
from transformers.configuration_utils import PretrainedConfig

from rlhfspec.cluster.placement.memory_plan import MemoryNeeds, MemoryPlan, ModelShapes
from rlhfspec.cluster.placement.ray_session import MIN_OBJECT_STORE_BYTES
from rlhfspec.cluster.preflight.draft_head import head_shape
from rlhfspec.cluster.preflight.model_check import model_shape
from rlhfspec.cluster.preflight.model_files import count_params
from rlhfspec.cluster.preflight.named_models import DEMO
from rlhfspec.cluster.weights.first_weights import mtp_checkpoint
from rlhfspec.core.config import Config, DataConfig
from rlhfspec.core.errors import ModelError
from rlhfspec.engine.drafters.head.head_weights import load_head_config
from rlhfspec.engine.drafters.head.mtp_weights import mtp_config
from rlhfspec.engine.weights.loading import load_hf_config, meta_model
from rlhfspec.learning.models.catalog import KNOWN_MODELS
from rlhfspec.learning.models.demo_pair import demo_configs
from rlhfspec.learning.trainer.adapter import count_adapter_params

ROLES = ("target", "draft", "reward")


def plan_remote_memory(config: Config, like: Mapping[str, str]) -> MemoryPlan:
    """Reckon the plan from the models' configs and the limits of lengths, without weights, data or tokenizers.

    Args:
        config: of the run; its models' names are those of the cluster.
        like: role (`ROLES`) to the folder or hub name of a model of the same shape that can be read here.

    Raises:
        ModelError: the config of a model cannot be read here, and `like` names no other.
    """
    models = config.models
    target_config = _read_config(config, "target", models.target, like)
    target = model_shape(target_config)
    if config.trainer.lora is not None:
        module = meta_model(models.target, target_config)
        target = replace(target, num_adapter_params=count_adapter_params(module, config.trainer.lora))
    draft = None
    if config.speculation.drafter == "head" and models.draft is not None:
        folder = Path(like.get("draft", models.draft)).expanduser()
        num_layers = int(target_config.get_text_config().num_hidden_layers)
        draft = head_shape(load_head_config(folder, num_target_layers=num_layers))
    elif config.speculation.drafter == "mtp":
        # of the sizes of the target's own layers, wherever it stands
        draft = head_shape(mtp_config(target_config, mtp_checkpoint(config)))
    elif config.speculation.drafter == "model" and models.draft is not None:
        draft = model_shape(_read_config(config, "draft", models.draft, like))
    shapes = ModelShapes(target=target, draft=draft, reward_params=_reward_params(config, like))
    needs = MemoryNeeds(config, shapes, max_total_tokens=_most_tokens(config))
    # of every node: each pulls what is published
    return needs.plan(object_store_bytes=max(MIN_OBJECT_STORE_BYTES, needs.object_store()))


def _most_tokens(config: Config) -> int:
    """Most tokens that a sample of training or evaluation may have: the data are not read."""
    sampling, evaluation = config.sampling, config.evaluation
    longest = _longest_prompt(config.data) + sampling.max_new_tokens
    if evaluation.every:
        responses = evaluation.max_new_tokens or sampling.max_new_tokens
        longest = max(longest, _longest_prompt(evaluation.data or config.data) + responses)
    return longest + config.max_first_words_tokens


def _longest_prompt(data: DataConfig) -> int:
    return max(source.max_prompt_tokens for source in data.each_source())


def _reward_params(config: Config, like: Mapping[str, str]) -> int | None:
    names = [each.model for each in config.reward.scorers if each.kind == "model" and each.model is not None]
    if not names:
        return None
    configs = [_read_config(config, "reward", name, like) for name in names]
    return sum(count_params(each, AutoModelForSequenceClassification) for each in configs)


def _read_config(config: Config, role: str, name: str, like: Mapping[str, str]) -> PretrainedConfig:
    """The config of a model, or of the one that is like it. Raises ModelError."""
    if role not in like and name == DEMO:
        return demo_configs()[0 if role == "target" else 1]
    known = KNOWN_MODELS.get(name)
    place = like.get(role) or (known.hub if known is not None and known.hub is not None else name)
    try:
        return load_hf_config(
            str(Path(place).expanduser()), trust_remote_code=config.models.trust_remote_code
        )
    except ModelError as error:
        raise ModelError(
            f"the size of the {role} model '{name}' is needed for the memory plan and cannot be read here: {error}; "
            f"give --like {role}=DIR, a folder with the config.json of a model of the same shape"
        ) from error
