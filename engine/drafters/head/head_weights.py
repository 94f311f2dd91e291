"""A draft head's weights and sizes, in EAGLE-3's own names and files (Li et al. 2025, arXiv 2503.01840).

What SpecForge and EAGLE write and what SGLang and vLLM read: `config.json` of a `LlamaForCausalLMEagle3`, and
safetensors with these names (H hidden size of the target, D draft vocabulary, V the target's):

    fc.weight                                   [H, 3 H]    mixes low, middle and high hidden states of the target
    midlayer.input_layernorm.weight             [H]         norm of the token's embedding
    midlayer.hidden_norm.weight                 [H]         norm of the mixed hidden state
    midlayer.self_attn.{q,k,v,o}_proj.weight                q, k, v read both norms behind one another: [.., 2 H]
    midlayer.post_attention_layernorm.weight    [H]
    midlayer.mlp.{gate,up,down}_proj.weight
    norm.weight                                 [H]
    lm_head.weight                              [D, H]
    d2t                                         int64 [D]   target's id minus draft id
    t2d                                         bool [V]    whether the draft vocabulary has a target's id

The token embedding is the target's. Others' files may hold one (`embed_tokens.weight`): it is left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Int
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ....core.errors import ModelError
from ....core.files import storage_errors
from .config_keys import require_plain, rope_of, rope_of_tree, tap_keys, taps_of

ARCHITECTURE = "LlamaForCausalLMEagle3"
WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
ORIGIN_FILE = "made_for.json"
"Beside the two, as other readers know no such keys in `config.json`."
LAYER = "midlayer."
FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_SIZES_OF = {
    "t2d": " (an entry for each id of the target's vocabulary, vocab_size)",
    "d2t": " (an entry for each id of the draft vocabulary, draft_vocab_size)",
}
TABLE_TYPES = (torch.int64, torch.int32, torch.bool)
LEFT_OUT = ("embed_tokens.weight", "model.embed_tokens.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """Sizes of a head. It fits targets of its hidden size, vocabulary and tokenizer."""

    form: ClassVar[str] = "EAGLE-3's form"
    what: ClassVar[str] = "draft head"
    again: ClassVar[str] = "make it again"
    instead: ClassVar[str] = (
        "take the head that was made for this target, or make one with `rlhfspec drafter make`"
    )
    layer: ClassVar[str] = LAYER
    "what the names of the decoder layer's tensors begin with"
    takes_output: ClassVar[bool] = False
    "whether it drafts from the output of the target's last layer, and not from inputs of layers alone"

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    "of the target, padded ids included"
    draft_vocab_size: int
    tapped_layers: tuple[int, ...]
    "whose inputs are mixed, of the target's layers from 0, ascending"
    rms_norm_eps: float = 1e-6
    rope_parameters: Mapping[str, Any] = field(default_factory=dict)
    "by their present names; the default kind is left out (`config_keys.rope_of`)"
    max_position_embeddings: int = 2048
    num_target_layers: int | None = None
    "of the target that it was made for; others' files do not say it"

    def __post_init__(self) -> None:
        object.__setattr__(self, "rope_parameters", rope_of(self.rope_parameters))

    @property
    def attended_size(self) -> int:
        """Of all heads of a token together."""
        return self.num_heads * self.head_size

    @property
    def num_trained(self) -> int:
        """Weights that training changes."""
        return sum(prod(shape) for name, shape in self.shapes().items() if name not in ("d2t", "t2d"))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return every tensor's shape by name."""
        hidden, inner, kv = self.hidden_size, self.intermediate_size, self.num_kv_heads * self.head_size
        return {
            "fc.weight": (hidden, len(self.tapped_layers) * hidden),
            LAYER + "input_layernorm.weight": (hidden,),
            LAYER + "hidden_norm.weight": (hidden,),
            LAYER + "self_attn.q_proj.weight": (self.attended_size, 2 * hidden),
            LAYER + "self_attn.k_proj.weight": (kv, 2 * hidden),
            LAYER + "self_attn.v_proj.weight": (kv, 2 * hidden),
            LAYER + "self_attn.o_proj.weight": (hidden, self.attended_size),
            LAYER + "post_attention_layernorm.weight": (hidden,),
            LAYER + "mlp.gate_proj.weight": (inner, hidden),
            LAYER + "mlp.up_proj.weight": (inner, hidden),
            LAYER + "mlp.down_proj.weight": (hidden, inner),
            "norm.weight": (hidden,),
            "lm_head.weight": (self.draft_vocab_size, hidden),
            "d2t": (self.draft_vocab_size,),
            "t2d": (self.vocab_size,),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadWeights:
    """Config and tensors by EAGLE-3's names: floats, and `d2t` and `t2d`."""

    config: HeadConfig
    tensors: Mapping[str, Tensor]

    @property
    def token_ids(self) -> Int[Tensor, " D"]:
        """The target's id of every draft id, ascending."""
        ids = torch.arange(self.config.draft_vocab_size)
        return self.tensors["d2t"] + ids if "d2t" in self.tensors else ids

    @property
    def num_trained(self) -> int:
        """Weights that training changes."""
        return self.config.num_trained

    @property
    def trained(self) -> dict[str, Tensor]:
        """The tensors that training changes, by name."""
        return {name: tensor for name, tensor in self.tensors.items() if tensor.is_floating_point()}

    def with_trained(self, tensors: Mapping[str, Tensor]) -> HeadWeights:
        """Return the same head with other float tensors; vocabulary and config stay."""
        return replace(self, tensors={**self.tensors, **tensors})


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOrigin:
    """What a head was made for."""

    target: str
    target_weights: str | None
    "`weights_digest` of the target; None: its files were not at hand"
    chat: bool
    "data.chat of the prompts that it learned from"


def vocabulary_tensors(token_ids: Int[Tensor, " D"], vocab_size: int) -> dict[str, Tensor]:
    """Return `d2t` and `t2d` of a draft vocabulary: the target's ids in it, ascending."""
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[token_ids] = True
    return {"d2t": token_ids - torch.arange(len(token_ids)), "t2d": t2d}


def _made_tables(tensors: Mapping[str, Tensor], config: HeadConfig) -> dict[str, Tensor]:
    """Make `d2t` and `t2d` of the one that is there; a head over the whole vocabulary brings neither."""
    if (d2t := tensors.get("d2t")) is not None:
        ids = d2t + torch.arange(len(d2t))
    elif (t2d := tensors.get("t2d")) is not None:
        ids = t2d.nonzero()[:, 0]
    else:
        ids = torch.arange(config.draft_vocab_size)
    # what is outside is refused later, by name
    inside = ids[(ids >= 0) & (ids < config.vocab_size)]
    return vocabulary_tensors(inside, config.vocab_size) | {"d2t": ids - torch.arange(len(ids))}


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Layers whose inputs are mixed: EAGLE-3's low, middle and high (2, L / 2, L - 3), kept apart in small models."""
    wanted = (min(2, num_layers - 1), num_layers // 2, max(num_layers - 3, 0))
    return tuple(sorted(wanted))


def config_tree(head: HeadWeights) -> dict[str, Any]:
    """Return a head's `config.json`."""
    config, of_target = head.config, head.config.num_target_layers
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_parameters["rope_theta"],
        "rope_scaling": _scaling_of(config.rope_parameters),
        "max_position_embeddings": config.max_position_embeddings,
        **({} if of_target is None else {"target_num_hidden_layers": of_target}),
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": str(head.tensors["fc.weight"].dtype).removeprefix("torch."),
        **tap_keys(config.tapped_layers),
    }


def save_head(folder: Path, head: HeadWeights, origin: HeadOrigin | None = None) -> None:
    """Write a head into a folder, made if need be. Raises StorageError."""
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        contiguous = {name: tensor.contiguous() for name, tensor in head.tensors.items()}
        save_file(contiguous, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        (folder / WEIGHTS_FILE).chmod(0o644)  # safetensors leaves it to its owner alone
        (folder / CONFIG_FILE).write_text(json.dumps(config_tree(head), indent=2) + "\n")
        if origin is not None:
            (folder / ORIGIN_FILE).write_text(json.dumps(asdict(origin), indent=2) + "\n")


def read_origin(folder: Path) -> HeadOrigin | None:
    """Read what a head was made for; None where its folder does not say. Raises ModelError: not as we write it."""
    file = folder / ORIGIN_FILE
    if not file.is_file():
        return None
    try:
        return HeadOrigin(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(
            f"{file} does not say what the draft head was made for: expected {', '.join(HeadOrigin.__annotations__)}, "
            f"got {type(error).__name__}: {error}; copy it again, or remove it"
        ) from error


def load_head(folder: Path, *, num_target_layers: int) -> HeadWeights:
    """Read a head that was written by us, SpecForge or EAGLE: safetensors in one file.

    Args:
        folder: with `config.json` and safetensors of one file.
        num_target_layers: says which layers were tapped where the config does not.

    Raises:
        ModelError: there is none, it is of another form, a tensor lacks or has another shape or is not finite.
    """
    config = load_head_config(folder, num_target_layers=num_target_layers)
    read = _read_tensors(folder)
    _require_types(read, str(folder), config)
    tensors = _made_tables(read, config) | read
    head = HeadWeights(config=config, tensors={n: t for n, t in tensors.items() if n not in LEFT_OUT})
    require_whole(head, str(folder))
    return head


def load_head_config(folder: Path, *, num_target_layers: int) -> HeadConfig:
    """Read the sizes of the head in a folder; arguments and errors as `load_head`. Its weights need not be there."""
    tree = _read_config(folder)
    try:
        require_plain(tree, str(folder))
        return config_of_tree(tree, num_target_layers)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(
            f"the config.json of the draft head {folder} lacks what an EAGLE-3 head needs: {type(error).__name__} "
            f"{error}; take a head of that form, or make one with `rlhfspec drafter make`"
        ) from error


def is_head_folder(folder: Path) -> bool:
    """Whether a draft head lies there, whole or not."""
    try:
        return bool(_read_config(folder))
    except ModelError:
        return False


def require_whole(head: HeadWeights, name: str) -> None:
    """Raise ModelError where a tensor lacks, is one too many, or is not of its shape, or not finite."""
    expected = head.config.shapes()
    got = {key: tuple(tensor.shape) for key, tensor in head.tensors.items()}
    for key in sorted(expected.keys() | got.keys()):
        if expected.get(key) != got.get(key):
            raise ModelError(
                f"the {head.config.what} {name} is not of {head.config.form}: expected {key} to be "
                f"{list(expected[key]) if key in expected else 'absent'}, got "
                f"{list(got[key]) if key in got else 'none'}{_SIZES_OF.get(key, '')}; config.json and weights must "
                f"go together: copy both again from one place, or {head.config.again}"
            )
    _require_types(head.tensors, name, head.config)
    for key, tensor in head.tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ModelError(
                f"the {head.config.what} {name} has weights in {key} that are not finite; {head.config.again}"
            )
    if "d2t" in expected:
        _require_vocabulary(head, name)


def _require_types(tensors: Mapping[str, Tensor], name: str, config: HeadConfig) -> None:
    for key, tensor in tensors.items():
        is_table = key in ("d2t", "t2d")
        if tensor.dtype not in (TABLE_TYPES if is_table else FLOAT_TYPES):
            expected = "whole numbers" if is_table else "float32, bfloat16 or float16"
            raise ModelError(
                f"the {config.what} {name} has {key} in {str(tensor.dtype).removeprefix('torch.')}: "
                f"expected {expected}; save it so, or make a head with `rlhfspec drafter make`"
            )


def _require_vocabulary(head: HeadWeights, name: str) -> None:
    ids, vocab_size = head.token_ids, head.config.vocab_size
    falls = (ids[1:] <= ids[:-1]).nonzero()
    if len(falls):
        before, behind = ids[int(falls[0]) :][:2].tolist()
        raise ModelError(
            f"the draft head {name} has a d2t that is no vocabulary: expected token ids that rise from one to the "
            f"next, got {behind} behind {before}; d2t must hold the target's id minus the draft's"
        )
    if len(ids) and (int(ids[0]) < 0 or int(ids[-1]) >= vocab_size):
        raise ModelError(
            f"the draft head {name} maps its vocabulary to token ids from {int(ids[0])} to {int(ids[-1])}, "
            f"its target has {vocab_size}; d2t must hold the target's id minus the draft's"
        )
    stated = head.tensors["t2d"].bool()
    differ = stated & ~vocabulary_tensors(ids.cpu(), vocab_size)["t2d"].to(stated.device)
    if int(stated.sum()) != len(ids) or bool(differ.any()):
        raise ModelError(
            f"the draft head {name} has a t2d that does not go with its d2t: expected the {len(ids)} ids of d2t, got "
            f"{int(stated.sum())} of which {int(differ.sum())} differ; leave t2d out of the file, it is made from d2t"
        )


def require_fit(head: HeadConfig, target: Any) -> None:
    """Raise ModelError where a head is not for targets of this Hugging Face config."""
    text = target.get_text_config()
    num_layers, highest = int(text.num_hidden_layers), max(head.tapped_layers)
    facts = [
        ("hidden size ", text.hidden_size, head.hidden_size),
        ("vocabulary ", text.vocab_size, head.vocab_size),
    ]
    wrong = [f"{what}{int(expected)}, got {got}" for what, expected, got in facts if int(expected) != got]
    if head.num_target_layers not in (None, num_layers):
        wrong.append(f"{num_layers} layers, got {head.num_target_layers}")
    elif highest >= num_layers and not head.takes_output:
        wrong.append(
            f"hidden states of its layers, got layer {highest}, the target has {num_layers} layers from 0"
        )
    if wrong:
        raise ModelError(
            f"the {head.what} does not fit the target: expected {'; '.join(wrong)}; {head.instead}"
        )


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG_FILE
    try:
        tree = json.loads(file.read_text())
    except OSError as error:
        raise ModelError(
            f"the draft head {folder} cannot be read: expected a folder with {CONFIG_FILE} and {WEIGHTS_FILE}, got "
            f"{type(error).__name__}: {error}; make one with `rlhfspec drafter make`"
        ) from error
    except ValueError as error:
        raise _damaged(file) from error
    architectures = tree.get("architectures") if isinstance(tree, dict) else None
    if (
        not isinstance(architectures, list)
        or not architectures
        or "eagle3" not in str(architectures[0]).lower()
    ):
        raise ModelError(
            f"{folder} holds no draft head: expected an EAGLE-3 architecture such as {ARCHITECTURE}, got "
            f"{architectures!r}; a draft model of its own goes with speculation.drafter=model"
        )
    return tree


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    file = folder / WEIGHTS_FILE
    try:
        return load_file(file)
    except FileNotFoundError:
        there = ", ".join(sorted(one.name for one in folder.iterdir())[:8])
        raise ModelError(
            f"the draft head {folder} lacks its weights: expected {WEIGHTS_FILE}, got {there}; copy it again, or save "
            "its weights as safetensors in one file: other files are not read"
        ) from None
    except (OSError, SafetensorError, ValueError) as error:
        raise _damaged(file) from error


def _damaged(file: Path) -> ModelError:
    """Of a file that is there; what the library says of its bytes helps nobody."""
    return ModelError(
        f"the draft head {file.parent} cannot be read: {file.name} ({file.stat().st_size:,} bytes) is cut or damaged; "
        "copy it again, or make a head with `rlhfspec drafter make`"
    )


def config_of_tree(tree: Mapping[str, Any], num_target_layers: int) -> HeadConfig:
    """Read the sizes from a `config.json`; `num_target_layers` as in `load_head`. Raises KeyError and the like."""
    hidden = int(tree["hidden_size"])
    num_heads = int(tree["num_attention_heads"])
    return HeadConfig(
        hidden_size=hidden,
        intermediate_size=int(tree["intermediate_size"]),
        num_heads=num_heads,
        num_kv_heads=int(tree.get("num_key_value_heads") or num_heads),
        head_size=int(tree.get("head_dim") or hidden // num_heads),
        vocab_size=int(tree["vocab_size"]),
        draft_vocab_size=int(tree.get("draft_vocab_size") or tree["vocab_size"]),
        tapped_layers=taps_of(tree) or default_taps(num_target_layers),
        rms_norm_eps=float(tree.get("rms_norm_eps") or 1e-6),
        rope_parameters=rope_of_tree(tree),
        max_position_embeddings=int(tree.get("max_position_embeddings") or 2048),
        num_target_layers=int(tree["target_num_hidden_layers"])
        if tree.get("target_num_hidden_layers")
        else None,
    )


def _scaling_of(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a config calls `rope_scaling`: everything but the base."""
    return {key: value for key, value in rope.items() if key != "rope_theta"} or None
