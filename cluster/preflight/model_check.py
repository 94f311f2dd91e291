"""The models of a run before it starts: whole, of one vocabulary, and such that the engine serves them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import AutoModelForCausalLM
from transformers.configuration_utils import PretrainedConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from rlhfspec.cluster.placement.memory_plan import ModelShape
from rlhfspec.cluster.preflight.draft_head import check_head, check_mtp, describe_training
from rlhfspec.cluster.preflight.inputs import read_tokenizer
from rlhfspec.cluster.preflight.model_files import TEMPLATE_FILE, count_params, other_templates
from rlhfspec.core.checkpoint_manifest import has_manifest, verify_checkpoint
from rlhfspec.core.config import Config
from rlhfspec.core.errors import ModelError
from rlhfspec.core.outside import quote
from rlhfspec.engine.cache.kv_pool import KVShape
from rlhfspec.engine.calibration.cost_sweep import MAX_PROFILED_NODES
from rlhfspec.engine.draft_policies import most_nodes
from rlhfspec.engine.model.support import refuse_unsupported
from rlhfspec.engine.weights.draft_vocabulary import foreign_ids
from rlhfspec.engine.weights.loading import (
    load_hf_config,
    load_tokenizer,
    meta_model,
    num_token_ids,
)
from rlhfspec.engine.weights.weight_files import indexed_too
from rlhfspec.learning.trainer.adapter import count_adapter_params

_ROWS_A_PADDING, _LARGEST_PADDING = 16, 1024
"Rows beyond the tokenizer: more than a part of all and more than is ever padded is another tokenizer."


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedModels:
    """What is known of the models without a weight of them."""

    tokenizer: PreTrainedTokenizerBase
    target_config: PretrainedConfig
    draft_config: PretrainedConfig | None
    "of a draft model; None: something else drafts, or nothing"
    target: ModelShape
    draft: ModelShape | None
    lines: tuple[str, ...]
    "what `check` says of them"

    @property
    def configs(self) -> Sequence[PretrainedConfig | None]:
        """Of the models whose positions a sample takes."""
        return self.target_config, self.draft_config


def check_models(config: Config) -> CheckedModels:
    """Look at target, what drafts, and tokenizers.

    Raises ModelError, and ConfigError for adapters that the target has no layers for.
    """
    trust, speculation = config.models.trust_remote_code, config.speculation
    _verify_own_checkpoints(config)
    target_config = load_hf_config(config.models.target, trust_remote_code=trust)
    tokenizer = read_tokenizer(config.models, config.run.template_time)
    target = model_shape(target_config, config.models.target)
    if config.trainer.lora is not None:
        module = meta_model(config.models.target, target_config)
        target = replace(target, num_adapter_params=count_adapter_params(module, config.trainer.lora))
    _check_vocabulary("target", config.models.target, target, tokenizer)
    lines = [_describe_model("target", config.models.target, target)]
    lines += _doubts(config, target, tokenizer)
    draft = draft_config = None
    if speculation.drafter == "head" and config.models.draft is not None:
        draft, line = check_head(config.models.draft, target_config)
        lines += [line, describe_training(config, target_config)]
    elif speculation.drafter == "mtp":
        draft, line = check_mtp(config)
        lines.append(line)
    elif speculation.drafter == "model" and config.models.draft is not None:
        draft_config = load_hf_config(config.models.draft, trust_remote_code=trust)
        own = load_tokenizer(config.models.draft, trust_remote_code=trust)
        foreign = foreign_ids(tokenizer, own)
        draft = model_shape(draft_config, config.models.draft)
        _check_vocabulary("draft", config.models.draft, draft, own)
        lines.append(_describe_model("draft", config.models.draft, draft))
        lines.append(
            f"tokenizers share {len(tokenizer.get_vocab().keys() & own.get_vocab().keys())} entries (target "
            f"{len(tokenizer)}, draft {len(own)}); what only one has is never drafted"
            if foreign or len(own) != len(tokenizer)
            else f"tokenizers equal, {len(tokenizer)} entries"
        )
    return CheckedModels(
        tokenizer=tokenizer,
        target_config=target_config,
        draft_config=draft_config,
        target=target,
        draft=draft,
        lines=tuple(lines),
    )


def require_served(config: Config, models: CheckedModels, *, max_total_tokens: int) -> None:
    """Raise ModelError for a model that the engine refuses when it is built for samples of so many tokens."""
    nodes = most_nodes(config.speculation)
    if config.speculation.policy == "goodput" and nodes:
        # the profile's engine drafts more
        nodes = max(nodes, MAX_PROFILED_NODES)
    names = (config.models.target, config.models.draft)
    for name, described in zip(names, models.configs, strict=True):
        if name is not None and described is not None:
            refuse_unsupported(meta_model(name, described), max_total_tokens + nodes + 1)


def model_shape(config: PretrainedConfig, name: str | None = None) -> ModelShape:
    """Sizes of the causal LM a Hugging Face config describes.

    Args:
        config: of the model.
        name: path or hub name; where given, its weight files are checked too.

    Raises:
        ModelError: there is no such model, or its weight files are not whole or another model's.
    """
    text = config.get_text_config()
    return ModelShape(
        num_params=count_params(config, AutoModelForCausalLM, name),
        kv=KVShape.of(config),
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
    )


def _verify_own_checkpoints(config: Config) -> None:
    """Checkpoints that a run wrote have checksums: a damaged one would decode to nonsense."""
    draft = config.models.draft if config.speculation.drafter in ("model", "head") else None
    for name in (config.models.target, draft):
        if name is not None and has_manifest(Path(name)):
            verify_checkpoint(Path(name))


def _check_vocabulary(role: str, name: str, shape: ModelShape, tokenizer: PreTrainedTokenizerBase) -> None:
    needed = num_token_ids(tokenizer)
    if shape.vocab_size < needed:
        over = tokenizer.convert_ids_to_tokens(list(range(shape.vocab_size, needed)))
        named = ", ".join(quote(token) for token in over[:3])
        raise ModelError(
            f"the {role} model {name} has {shape.vocab_size} token ids, the tokenizer {needed} (beyond: {named}): "
            "every token needs a row of the model; take a model trained with this tokenizer, or set models.tokenizer"
        )


def _doubts(config: Config, target: ModelShape, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Lines on files that are read without fault and may not be those that were meant."""
    lines, known = [], num_token_ids(tokenizer)
    if target.vocab_size - known > max(target.vocab_size // _ROWS_A_PADDING, _LARGEST_PADDING):
        lines.append(
            f"the tokenizer has {known} of the target's {target.vocab_size} token ids, fewer than rows are padded by: "
            "is it this model's?"
        )
    folder = Path(config.models.tokenizer or config.models.target).expanduser()
    others = other_templates(folder) if config.data.chat_template is None else []
    if others:
        lines.append(
            f"chat templates differ: {TEMPLATE_FILE} is used, and what {' and '.join(others)} holds is not"
        )
    if folder.is_dir():
        lines += [
            f"{one} is read, {one}.index.json beside it and its shards are not" for one in indexed_too(folder)
        ]
    return lines


def _describe_model(role: str, name: str, shape: ModelShape) -> str:
    return f"{role} {name}: {shape.num_params / 1e6:.2f}M parameters, {shape.kv.num_layers} layers"
