"""The multi-token-prediction (MTP) layer that a target's own checkpoint brings (DeepSeek-V3, arXiv 2412.19437, 2.2).

One form is read: that of MiMo-7B (arXiv 2505.07608), named as its checkpoints name it below `model.mtp_layers.0.`,
with one of Llama's or Qwen2's decoder layers in it (H hidden size of the target):

    token_layernorm.weight                      [H]         norm of the token's embedding
    hidden_layernorm.weight                     [H]         norm of the target's hidden state
    input_proj.weight                           [H, 2 H]    of both, the hidden state first
    input_layernorm.weight                      [H]         the layer begins
    self_attn.{q,k,v,o}_proj.weight                         Qwen2: with `.bias` of q, k and v
    post_attention_layernorm.weight             [H]
    mlp.{gate,up,down}_proj.weight
    final_layernorm.weight                      [H]

Embedding and output matrix are the target's. What is deeper than one level comes of the same layer, over and over.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ....core.errors import ModelError
from ...weights.weight_files import first_line, local_folder, tensors_in, weight_files
from .config_keys import rope_of_tree, wrong_rope
from .head_weights import HeadConfig, HeadWeights, require_whole

ARCHITECTURE = "RlhfSpecMtpLayer"
"What a published layer's config says; no file has it."
PREFIX = "model.mtp_layers."
BLOCKS = ("llama", "qwen2")
"Model types whose decoder layer the block may be."
_OTHERS = re.compile(r"(^|\.)(mtp|nextn|eh_proj)")
"In names of such layers in checkpoints of other families: Qwen3.5's, Ernie's, DeepSeek's and GLM's."
_NUMBERED = re.compile(rf"{re.escape(PREFIX)}(\d+)\.")
_INSTEAD = (
    "take a target of that form (MiMo-7B), let models.draft name the checkpoint that its weights came from, make a "
    "head with `rlhfspec drafter make` (speculation.drafter=head), or set speculation.drafter=suffix"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpConfig(HeadConfig):
    """Sizes of an MTP layer: those of the target."""

    form: ClassVar[str] = "MiMo's form"
    what: ClassVar[str] = "MTP layer"
    again: ClassVar[str] = "copy or download the checkpoint again"
    instead: ClassVar[str] = "let models.draft name the checkpoint that the target's weights came from"
    layer: ClassVar[str] = ""
    takes_output: ClassVar[bool] = True
    has_bias: bool
    "of queries, keys and values"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return every tensor's shape by name."""
        hidden, inner, kv = self.hidden_size, self.intermediate_size, self.num_kv_heads * self.head_size
        attention = {"q": self.attended_size, "k": kv, "v": kv}
        norms = ("token", "hidden", "input", "post_attention", "final")
        return {
            **{f"{each}_layernorm.weight": (hidden,) for each in norms},
            "input_proj.weight": (hidden, 2 * hidden),
            **{f"self_attn.{each}_proj.weight": (size, hidden) for each, size in attention.items()},
            **{f"self_attn.{each}_proj.bias": (size,) for each, size in attention.items() if self.has_bias},
            "self_attn.o_proj.weight": (hidden, self.attended_size),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundMtp:
    """An MTP layer and how many the checkpoint has."""

    head: HeadWeights
    "of an `MtpConfig`"
    num_layers: int


def mtp_config(hf_config: Any, name: str) -> MtpConfig:
    """Return the sizes that an MTP layer of this Hugging Face config has; `name` is the checkpoint's, for errors.

    Raises ModelError: the layer would be computed otherwise than we do.
    """
    text = hf_config.get_text_config()
    tree = text.to_dict()
    if text.model_type not in BLOCKS:
        raise _refused(name, f"model_type {' or '.join(BLOCKS)} (a MiMo's is read as qwen2)", text.model_type)
    facts = [
        ("hidden_act", "silu", tree.get("hidden_act") or "silu"),
        ("mlp_bias", False, bool(tree.get("mlp_bias"))),
        ("layers that see a window only:", False, "sliding_attention" in (tree.get("layer_types") or ())),
        ("partial_rotary_factor", 1, (tree.get("rope_parameters") or {}).get("partial_rotary_factor") or 1),
    ]
    for what, expected, got in facts:
        if expected != got:
            raise _refused(name, f"{what} {expected}", f"{got}")
    if why := wrong_rope(tree):
        raise _refused(name, "rotary positions of a kind that is known", f"others ({why})")
    heads = int(tree["num_attention_heads"])
    layers = int(tree["num_hidden_layers"])
    return MtpConfig(
        hidden_size=int(tree["hidden_size"]),
        intermediate_size=int(tree["intermediate_size"]),
        num_heads=heads,
        num_kv_heads=int(tree.get("num_key_value_heads") or heads),
        head_size=int(tree.get("head_dim") or tree["hidden_size"] // heads),
        vocab_size=int(tree["vocab_size"]),
        draft_vocab_size=int(tree["vocab_size"]),
        tapped_layers=(layers,),
        rms_norm_eps=float(tree["rms_norm_eps"]),
        rope_parameters=rope_of_tree(tree),
        max_position_embeddings=int(tree["max_position_embeddings"]),
        num_target_layers=layers,
        has_bias=text.model_type == "qwen2",
    )


def load_mtp(name: str, hf_config: Any) -> FoundMtp:
    """Read the first MTP layer of a checkpoint.

    Args:
        name: path of its folder, or a hub name whose files are on this machine.
        hf_config: its Hugging Face config.

    Raises:
        ModelError: it has none, or one that we would compute otherwise; it is not on this machine, or cannot be read.
    """
    folder = local_folder(name)
    if folder is None:
        raise ModelError(
            f"the MTP layer of '{name}' cannot be read: its weight files are not on this machine; download them "
            "first, or give the path of their folder"
        )
    files = {key: tensor.file for key, tensor in tensors_in(weight_files(folder)).items()}
    numbers = {found[1] for key in files if (found := _NUMBERED.match(key))}
    if not numbers:
        raise _none(name, files)
    own = f"{PREFIX}0."
    found = {key.removeprefix(own): file for key, file in files.items() if key.startswith(own)}
    config = mtp_config(hf_config, name)
    # by name before anything is read: experts, latents and norms of heads take much room
    if odd := sorted(found.keys() ^ config.shapes().keys()):
        got = "it" if odd[0] in found else "none"
        raise _refused(name, f"{'no' if odd[0] in found else 'a'} tensor {own}{odd[0]}", got)
    head = HeadWeights(config=config, tensors={key: _read(file, own + key) for key, file in found.items()})
    require_whole(head, f"{name} ({own}*)")
    return FoundMtp(head=head, num_layers=len(numbers))


def mtp_tree(config: MtpConfig) -> dict[str, Any]:
    """Return an MTP layer's config as JSON holds it."""
    return {"architectures": [ARCHITECTURE], "sizes": asdict(config)}


def config_of_mtp_tree(tree: Mapping[str, Any]) -> MtpConfig:
    """Return the config that `mtp_tree` has written."""
    sizes: dict[str, Any] = dict(tree["sizes"])
    sizes["tapped_layers"] = tuple(sizes["tapped_layers"])
    return MtpConfig(**sizes)


def _read(file: Path, key: str) -> Tensor:
    if file.suffix != ".safetensors":
        raise ModelError(
            f"the MTP layer in {file} cannot be read: expected safetensors, got {file.suffix}; save the checkpoint as "
            "safetensors"
        )
    try:
        with safe_open(file, framework="pt") as opened:
            return opened.get_tensor(key)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{key} cannot be read from {file}: {first_line(error)}; copy or download the checkpoint again"
        ) from error


def _none(name: str, names: Iterable[str]) -> ModelError:
    other = next((key for key in sorted(names) if _OTHERS.search(key)), None)
    got = "none" if other is None else f"a layer of another form ({other})"
    return ModelError(
        f"'{name}' brings no MTP layer that is read here: expected tensors {PREFIX}0.* as MiMo-7B names them, got "
        f"{got}; {_INSTEAD}"
    )


def _refused(name: str, expected: str, got: str) -> ModelError:
    return ModelError(
        f"the MTP layer of '{name}' would be computed otherwise than its maker does: expected {expected}, got {got}; "
        f"{_INSTEAD}"
    )
