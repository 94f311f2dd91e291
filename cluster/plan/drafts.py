"""What drafts with weights of its own: a draft model, a draft head, or an MTP layer; one class each.

`what_drafts` is where a run's `speculation.drafter` becomes one of them. Look-ups and plain decoding have none.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers.configuration_utils import PretrainedConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ...core.config import Config
from ...core.errors import ModelError
from ...core.settings.run import ModelsConfig
from ...engine.cache.kv_pool import KVShape, cell_size
from ...engine.drafters.head.head_weights import (
    HeadConfig,
    HeadWeights,
    is_head_folder,
    load_head,
    read_origin,
    require_fit,
)
from ...engine.drafters.head.mtp_weights import FoundMtp, load_mtp
from ...engine.drafters.head.published_head import rounded
from ...engine.weights.causal_lm import DTYPES, PreTrainedModel
from ...engine.weights.llama_config import MODEL_TYPES
from ...engine.weights.loading import load_causal_lm, load_hf_config, load_tokenizer, num_token_ids
from ...engine.weights.shared_ids import fit_draft, foreign_ids
from ...engine.weights.stored_weights import StoredWeights, load_weights
from ...engine.weights.weight_files import weights_digest
from .model_files import check_vocabulary, describe_model, model_shape
from .model_sizes import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedDraft:
    """What is known of what drafts before a weight of it is published."""

    shape: ModelShape
    lines: tuple[str, ...]
    hf_config: PretrainedConfig | None = None
    "of a draft model, whose positions a sample takes"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModel:
    """A smaller causal LM. What only one of the two tokenizers has is never drafted."""

    models: ModelsConfig
    place: str
    "path or hub name"
    title = "draft model"

    def check(self, target: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> CheckedDraft:
        """Look at its files. Raises ModelError: they are not whole, or its rows and tokens do not go together."""
        if is_head_folder(Path(self.place).expanduser()):
            raise ModelError(
                f"models.draft {self.place} holds a draft head, expected a model of its own, as speculation.drafter is "
                "model; set speculation.drafter to head, which takes it"
            )
        trust = self.models.trust_remote_code
        hf_config = load_hf_config(self.place, trust_remote_code=trust)
        own = load_tokenizer(self.place, trust_remote_code=trust)
        foreign = foreign_ids(tokenizer, own)
        shape = model_shape(hf_config, self.place)
        check_vocabulary("draft", self.place, shape, own)
        line = (
            f"tokenizers share {len(tokenizer.get_vocab().keys() & own.get_vocab().keys())} entries (target "
            f"{len(tokenizer)}, draft {len(own)}); what only one has is never drafted"
            if foreign or len(own) != len(tokenizer)
            else f"tokenizers equal, {len(tokenizer)} entries"
        )
        lines = (describe_model("draft", self.place, shape), line)
        return CheckedDraft(shape=shape, lines=lines, hf_config=hf_config)

    def foreign_ids(self, place: str | None = None) -> tuple[list[int], int]:
        """The ids that only one of draft and target has, and how many the target has."""
        models, trust = self.models, self.models.trust_remote_code
        tokenizer = load_tokenizer(models.tokenizer or models.target, trust_remote_code=trust)
        own = load_tokenizer(place or self.place, trust_remote_code=trust)
        return foreign_ids(tokenizer, own), num_token_ids(tokenizer)

    def read(self, place: str | None = None) -> PreTrainedModel:
        """Load it, or what a run kept of it at `place`, as published: rows for the target's tokens, its own marked.

        Raises ModelError: it cannot be loaded, or its tokenizer has other tokens at the target's ids.
        """
        foreign, num_ids = self.foreign_ids(place)
        trust = self.models.trust_remote_code
        loaded = load_causal_lm(place or self.place, self.models.dtype, trust_remote_code=trust)
        return fit_draft(loaded, foreign, num_ids=num_ids)

    def weights(self) -> StoredWeights | PreTrainedModel:
        """As `read`, but straight from its files where nothing is to be marked."""
        if self.foreign_ids()[0]:
            return self.read()
        return load_weights(self.place, self.models.dtype, trust_remote_code=self.models.trust_remote_code)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftHead:
    """A layer on the target's hidden states, in a folder of its own."""

    models: ModelsConfig
    place: str
    frozen_because: str
    "why instances do not train it; empty: they do"
    buffer_mb: float
    chat: bool
    "of the run's prompts"
    title = "draft head"

    def check(self, target: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> CheckedDraft:
        """Read it. Raises ModelError: no head, a tensor lacks or is not finite, or it is of another target."""
        head = self._load(self.place, target)
        require_fit(head.config, target)
        config = head.config
        taps = ", ".join(str(layer) for layer in config.tapped_layers)
        line = (
            f"draft head {self.place}: {head.num_trained / 1e6:.2f}M parameters, {config.draft_vocab_size:,} of the "
            f"target's {config.vocab_size:,} token ids, hidden states before layers {taps}"
        )
        return CheckedDraft(
            shape=_head_shape(config), lines=(line, *self._doubts(), self.describe_training(target))
        )

    def _doubts(self) -> list[str]:
        """Lines on a head that was made for something else, or does not say for what."""
        measure = "`rlhfspec drafter eval` measures how it does here"
        origin = read_origin(Path(self.place).expanduser())
        if origin is None:
            return [f"the head's folder does not say which target it was made for: {measure}"]
        lines = []
        if origin.target_weights not in (None, weights_digest(self.models.target)):
            lines.append(
                f"the head was made for other weights than this target's ({origin.target}): {measure}"
            )
        if origin.chat != self.chat:
            lines.append(
                f"the head was made from prompts with data.chat={str(origin.chat).lower()}, this run has "
                f"{str(self.chat).lower()}: set data.chat alike, or {measure}"
            )
        return lines

    def describe_training(self, target: PretrainedConfig) -> str:
        """Say whether it will be trained, and where not, why."""
        kind = target.get_text_config().model_type
        if self.frozen_because:
            return f"the head stays as it is: {self.frozen_because}"
        if kind not in MODEL_TYPES:
            return f"the head stays as it is: a '{kind}' target teaches none ({', '.join(MODEL_TYPES)} do)"
        return (
            "the head is trained by instances that have no samples, from at most "
            f"{self.buffer_mb:g} MB of hidden states each, and published after an update where it is no worse"
        )

    def read(self, place: str | None = None) -> HeadWeights:
        """Load it, or what a run kept of it at `place`, in the type that it is published in. Raises ModelError."""
        models = self.models
        target = load_hf_config(models.target, trust_remote_code=models.trust_remote_code)
        # what is trained is published as it is trained
        dtype = models.dtype if self.frozen_because else "float32"
        return rounded(self._load(place or self.place, target), DTYPES[dtype])

    def _load(self, place: str, target: PretrainedConfig) -> HeadWeights:
        num_layers = target.get_text_config().num_hidden_layers
        return load_head(Path(place).expanduser(), num_target_layers=num_layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpLayer:
    """The layer that the target's checkpoint brings, or another one (`models.draft`). It is never trained or saved."""

    models: ModelsConfig
    place: str
    "of the checkpoint that has it"
    title = "MTP layer"

    def check(self, target: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> CheckedDraft:
        """Read it. Raises ModelError: the checkpoint has none, one of another form, or of another target."""
        found = self._load()
        others = f"; the first of {found.num_layers} drafts, over and over" if found.num_layers > 1 else ""
        line = (
            f"MTP layer of {self.place}: {found.head.num_trained / 1e6:.2f}M parameters, on the output of the target's "
            f"last layer{others}; it stays as it is, the target's embedding and output go with the target; checkpoints "
            "of the run do not hold it, models.draft names this one to draft for them"
        )
        return CheckedDraft(shape=_head_shape(found.head.config), lines=(line,))

    def read(self, place: str | None = None) -> HeadWeights:
        """Load it in the type that it is published in; no run keeps another. Raises ModelError."""
        return rounded(self._load().head, DTYPES[self.models.dtype])

    def _load(self) -> FoundMtp:
        trust = self.models.trust_remote_code
        found = load_mtp(self.place, load_hf_config(self.place, trust_remote_code=trust))
        require_fit(found.head.config, load_hf_config(self.models.target, trust_remote_code=trust))
        return found


Drafts = DraftModel | DraftHead | MtpLayer


def what_drafts(config: Config) -> Drafts | None:
    """What drafts in a run whose model names are resolved; None: nothing with weights of its own."""
    models, drafter, training = config.models, config.speculation.drafter, config.drafter_training
    if drafter == "mtp":
        return MtpLayer(models=models, place=models.draft or models.target)
    if models.draft is None or not config.speculation.names_draft:
        return None
    if drafter == "model":
        return DraftModel(models=models, place=models.draft)
    why = "" if config.trains_head else "drafter_training.spot is off"
    if not training.refit:
        why = "drafter_training.refit is false"
    elif config.speculation.policy == "off":
        why = "speculation.policy is off"
    elif config.decodes_on_gpu:
        why = "instances on GPUs train none so far"
    return DraftHead(
        models=models,
        place=models.draft,
        frozen_because=why,
        buffer_mb=training.buffer_mb,
        chat=config.data.chat,
    )


def draft_doubts(models: ModelsConfig, drafter: str) -> tuple[str, ...]:
    """A line on a draft model that gains nothing; its files have been looked at."""
    draft, target = models.draft, models.target
    if draft is None or drafter != "model":
        return ()
    if (weights_digest(draft) or draft) != (weights_digest(target) or target):
        return ()
    return (
        "models.draft is the target itself, so that a draft token costs as much as one without drafts; name a smaller "
        "model, or set speculation.drafter to suffix",
    )


def _head_shape(head: HeadConfig) -> ModelShape:
    """Sizes of a head: one layer, logits over its own vocabulary."""
    return ModelShape(
        num_params=head.num_trained,
        kv=KVShape(
            num_layers=1,
            num_kv_heads=head.num_kv_heads,
            num_heads=head.num_heads,
            head_size=cell_size(head.head_size),
        ),
        hidden_size=head.hidden_size,
        vocab_size=head.draft_vocab_size,
    )
