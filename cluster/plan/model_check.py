"""The models of a run before it starts: whole, of one vocabulary, and such that the engine serves them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from transformers.configuration_utils import PretrainedConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ...core.checkpoint_manifest import has_manifest, verify_checkpoint
from ...core.config import Config
from ...core.errors import ModelError
from ...core.outside import quote
from ...core.settings.generation import SpeculationConfig
from ...core.settings.run import ModelsConfig
from ...engine.calibration.cost_sweep import MAX_PROFILED_NODES
from ...engine.draft_policies import most_nodes
from ...engine.group.dealing import require_module_dealt
from ...engine.model.support import refuse_unsupported
from ...engine.weights.causal_lm import max_context_tokens
from ...engine.weights.loading import load_hf_config, load_tokenizer, meta_model, num_token_ids
from ...engine.weights.weight_files import indexed_too
from ...learning.data.chat.chat_format import own_template
from ...learning.training.adapter import count_adapter_params
from .drafts import Drafts, draft_doubts, what_drafts
from .inputs import read_tokenizer
from .model_files import (
    TEMPLATE_FILE,
    check_vocabulary,
    describe_model,
    model_shape,
    other_templates,
    own_weights,
)
from .model_sizes import ModelShape, ModelShapes

_ROWS_A_PADDING, _LARGEST_PADDING = 16, 1024
"Rows beyond the tokenizer: more than a part of all and more than is ever padded is another tokenizer."


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedModels:
    """What is known of the models without a weight of them; each `ModelShape` of one that there is."""

    tokenizer: PreTrainedTokenizerBase
    configs: dict[str, PretrainedConfig]
    "of the models whose positions a sample takes, by path or hub name; the target's first"
    target: ModelShape
    drafts: Drafts | None
    draft: ModelShape | None
    "the sizes of what drafts"
    teacher: ModelShape | None
    teacher_tokens: int | None
    "positions of the teacher; None: it says none, or there is none"
    lines: tuple[str, ...]
    "what `check` says of them"
    doubts: tuple[str, ...] = ()
    "of these, what a run says at its start too"

    @property
    def context_tokens(self) -> int | None:
        """Positions of the model that has the fewest; None: none says."""
        limits = [limit for one in self.configs.values() if (limit := max_context_tokens(one))]
        return min(limits, default=None)

    def shapes(self, reward_params: int | None) -> ModelShapes:
        """Of all models of a run; `reward_params` are those of its reward models."""
        return ModelShapes(
            target=self.target, draft=self.draft, teacher=self.teacher, reward_params=reward_params
        )

    def require_served(
        self, speculation: SpeculationConfig, *, max_total_tokens: int, ranks: int, takes_drafts: bool = False
    ) -> None:
        """Raise ModelError for a model that the engine of an instance refuses when it is built.

        Args:
            speculation: what drafts, and how much.
            max_total_tokens: of a sample.
            ranks: of an instance.
            takes_drafts: requests may bring drafts.
        """
        nodes = most_nodes(speculation, takes_drafts=takes_drafts)
        if speculation.policy == "goodput" and nodes:
            # the profile's engine drafts more
            nodes = max(nodes, MAX_PROFILED_NODES)
        for name, described in self.configs.items():
            model = own_weights(name, described) or meta_model(name, described)
            refuse_unsupported(model, max_total_tokens + nodes + 1)
        if ranks > 1:
            name, described = next(iter(self.configs.items()))
            require_module_dealt(meta_model(name, described), ranks, num_token_ids(self.tokenizer))


def check_models(config: Config) -> CheckedModels:
    """Look at target, what drafts, and tokenizers.

    Raises ModelError, and ConfigError for adapters that the target has no layers for.
    """
    models, drafts = config.models, what_drafts(config)
    drafting = models.draft if config.speculation.names_draft else None
    for name in (models.target, drafting, models.teacher):
        # checkpoints that a run wrote have checksums: a damaged one would decode to nonsense
        if name is not None and has_manifest(Path(name)):
            verify_checkpoint(Path(name))
    target_config = load_hf_config(models.target, trust_remote_code=models.trust_remote_code)
    tokenizer = read_tokenizer(models, config.run.template_time)
    target = model_shape(target_config, models.target)
    if config.trainer.lora is not None:
        module = meta_model(models.target, target_config)
        target = replace(target, num_adapter_params=count_adapter_params(module, config.trainer.lora))
    check_vocabulary("target", models.target, target, tokenizer)
    lines = [describe_model("target", models.target, target)]
    lines += _doubts(models, target, tokenizer, own_template=config.data.chat_template is None)
    draft = None if drafts is None else drafts.check(target_config, tokenizer)
    doubts = draft_doubts(models, config.speculation.drafter)
    teacher = None if models.teacher is None else _check_teacher(models, models.teacher, tokenizer)
    if teacher is not None:
        lines += [describe_model("teacher", str(models.teacher), teacher[0]), *teacher[2]]
    configs = {models.target: target_config}
    if drafts is not None and draft is not None and draft.hf_config is not None:
        configs[drafts.place] = draft.hf_config
    return CheckedModels(
        tokenizer=tokenizer,
        configs=configs,
        target=target,
        drafts=drafts,
        draft=None if draft is None else draft.shape,
        teacher=None if teacher is None else teacher[0],
        teacher_tokens=None if teacher is None else teacher[1],
        lines=(*lines, *(() if draft is None else draft.lines), *doubts),
        doubts=doubts,
    )


def _check_teacher(
    models: ModelsConfig, place: str, tokenizer: PreTrainedTokenizerBase
) -> tuple[ModelShape, int | None, list[str]]:
    """Its sizes, positions, and what may surprise.

    Raises ModelError: it has other tokens, its distribution is over something else.
    """
    trust = models.trust_remote_code
    described = load_hf_config(place, trust_remote_code=trust)
    shape = model_shape(described, place)
    of_teacher = load_tokenizer(place, trust_remote_code=trust)
    own = of_teacher.get_vocab()
    vocabulary = tokenizer.get_vocab()
    if differing := sorted(vocabulary.items() ^ own.items(), key=lambda pair: (pair[1], pair[0])):
        token, number = differing[0]
        raise ModelError(
            f"models.teacher {place} has {len(own)} tokens, the target {len(vocabulary)}, and {len(differing)} entries "
            f"are of one alone (first: {quote(token)}, id {number}); expected equal tokenizers, as a student learns "
            "its teacher's distribution token by token: take a teacher of the target's family"
        )
    check_vocabulary("teacher", place, shape, tokenizer)
    reads_ours = own_template(of_teacher) in (None, own_template(tokenizer))
    note = "teacher reads prompts as the target's chat template renders them, which differs from its own"
    return shape, max_context_tokens(described), [] if reads_ours else [note]


def _doubts(
    models: ModelsConfig, target: ModelShape, tokenizer: PreTrainedTokenizerBase, *, own_template: bool
) -> list[str]:
    """Lines on files that are read without fault and may not be those that were meant."""
    lines, known = [], num_token_ids(tokenizer)
    if target.vocab_size - known > max(target.vocab_size // _ROWS_A_PADDING, _LARGEST_PADDING):
        lines.append(
            f"the tokenizer has {known} of the target's {target.vocab_size} token ids, fewer than rows are padded by: "
            "is it this model's?"
        )
    folder = Path(models.tokenizer or models.target).expanduser()
    others = other_templates(folder) if own_template else []
    if others:
        lines.append(
            f"chat templates differ: {TEMPLATE_FILE} is used, and what {' and '.join(others)} holds is not"
        )
    if folder.is_dir():
        lines += [
            f"{one} is read, {one}.index.json beside it and its shards are not" for one in indexed_too(folder)
        ]
    return lines
