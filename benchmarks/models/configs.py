"""Small models of any causal family: config fields are recognised by name, what is special stands in one table.

A model has two layers (more where a family mixes more kinds), 307 token ids and hidden size 64. Its weights
are random, seeded, and of a size that makes every layer and the context matter.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from transformers import AutoModelForCausalLM
from transformers.configuration_utils import PretrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ...engine.weights.loading import freeze

VOCAB_SIZE = 307
LAYERS, HEADS = 2, 4
LOGIT_SPREAD = 2.5
"Standard deviation of a position's logits."

TABLES = yaml.safe_load(Path(__file__).with_name("families.yaml").read_text())
BY_NAME = {name: size for size, names in TABLES["sizes"] for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One small model: a model type, what its config says besides the usual sizes, and what is tried by it."""

    model_type: str
    variant: str = ""
    "what is special; empty: the family as it is"
    settings: dict[str, Any] = field(default_factory=dict)
    forward: Literal["auto", "stock"] = "auto"

    @property
    def name(self) -> str:
        """The model type and the variant."""
        return f"{self.model_type}, {self.variant}" if self.variant else self.model_type


def all_families() -> list[Family]:
    """Return every family of the installed transformers and the variants, by name."""
    needs = TABLES["needs"]
    plain = [
        Family(model_type=name, settings=needs.get(name, {})) for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    ]
    special = [
        Family(model_type=name, variant=variant, settings=settings)
        for name, variant, settings in TABLES["variants"]
    ]
    stock = [Family(model_type=name, variant="forward: stock", forward="stock") for name in TABLES["stock"]]
    return sorted([*plain, *special, *stock], key=lambda family: (family.model_type, family.variant))


def quick_families() -> list[Family]:
    """Return one of each kind of outcome, and what was wrong once."""
    return [family for family in all_families() if family.name in TABLES["quick"]]


def small_config(model_type: str, settings: dict[str, Any]) -> PretrainedConfig:
    """Return a config of a family with every known size made small; `settings` win."""
    return _shrunk(CONFIG_MAPPING[model_type], settings)


def _shrunk(kind: type[PretrainedConfig], settings: dict[str, Any]) -> PretrainedConfig:
    try:
        usual = kind()
    except Exception:  # some have no valid config of their own
        usual = kind(**settings)
    known = usual.to_dict()
    sizes: dict[str, Any] = {
        name: size
        for name, size in BY_NAME.items()
        if name in known and (isinstance(known[name], int | float) or known[name] is None)
    }
    sizes = {n: s for n, s in sizes.items() if not isinstance(known[n], bool)}
    # sizes that are off by default stay off
    for name in ("kv_lora_rank", "q_lora_rank", "sliding_window", "head_dim", "rotary_dim", "n_inner"):
        if name in sizes and known[name] in (None, 0):
            del sizes[name]
    if known.get("tie_word_embeddings"):
        sizes["tie_word_embeddings"] = False
    if known.get("kv_lora_rank"):
        # one latent for all heads; what turns is the rotary part of a head
        sizes["num_key_value_heads"] = HEADS
        sizes.pop("head_dim", None)
    if "is_decoder" in known:
        sizes["is_decoder"] = True
    kinds = known.get("layer_types")
    if isinstance(kinds, list) and kinds:
        distinct = list(dict.fromkeys(kinds))
        num_layers = settings.get("num_hidden_layers", max(LAYERS, len(distinct)))
        sizes["num_hidden_layers"] = num_layers
        sizes["layer_types"] = [distinct[i % len(distinct)] for i in range(num_layers)]
    parts: dict[str, Any] = kind.sub_configs  # type: ignore[assignment]
    for name in parts:
        if isinstance(getattr(usual, name, None), PretrainedConfig):
            # the kind that is meant where the class says "any"
            sizes[name] = _shrunk(type(getattr(usual, name)), settings.get(name, {})).to_dict()
    return kind(**(sizes | {k: v for k, v in settings.items() if k not in parts}))


def build_model(family: Family) -> PreTrainedModel:
    """Return a family's small model with random weights, the same every time, in eval mode."""
    torch.manual_seed(0)
    config = small_config(family.model_type, family.settings)
    model = freeze(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    generator = torch.Generator().manual_seed(1)
    done: set[int] = set()
    for weight in model.parameters():
        if weight.data_ptr() in done:
            continue
        done.add(weight.data_ptr())
        noise = torch.randn(weight.shape, generator=generator)
        if weight.dim() >= 2:
            weight.copy_(noise * 1.2 / weight.shape[-1] ** 0.5)
        else:
            weight.add_(noise * 0.1)
    ids = torch.randint(3, VOCAB_SIZE, (1, 24), generator=generator)
    with torch.inference_mode():
        spread = float(model(input_ids=ids, use_cache=False).logits.std(-1).mean())
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    # a tied one is left alone: it would drown the layers in the residual stream
    if head is not None and head.weight is not embedding.weight:
        head.weight.mul_(LOGIT_SPREAD / spread)
    return model


def perturbed(model: PreTrainedModel) -> PreTrainedModel:
    """Return a draft model: a copy whose matrices are a little off."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(5)
    for weight in draft.parameters():
        if weight.dim() >= 2:
            weight.add_(torch.randn(weight.shape, generator=generator) * weight.std() * 0.1)
    return draft
