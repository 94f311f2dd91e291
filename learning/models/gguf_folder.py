"""Makes a Hugging Face folder of a GGUF file: float32 weights, tokenizer, chat template, generation config.

transformers reads and unpacks the blocks. What it leaves out is done here: a model that is written to disk may
not call itself quantised, and the way text is split before BPE is told by a word of llama.cpp.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, normalizers, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ...core.errors import ModelError
from ...core.surfaces.surface import surface
from ...engine.weights.chunks import model_checksum
from ...engine.weights.loading import meta_model
from ...engine.weights.weight_files import require_all_weights
from ..training.reloaded import Said, few_of, own_log_probs, require_reloads

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"For a file without a template of its own whose vocabulary has the two tokens."
_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
_HEAD_KEYS = ("tokens", "token_type", "pre", "eos_token_id")
_CONTROL = 3
"llama.cpp's token type of control tokens: one id each wherever they stand in a text."


def _by_pattern(digits: str) -> Any:
    """The split of cl100k and kin, which takes so many digits together."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return [pre_tokenizers.Split(Regex(pattern), behavior="isolated")]


_SPLITS: dict[str, Callable[[], list[Any]]] = {
    "smollm": lambda: [pre_tokenizers.Digits(individual_digits=True)],
    "gpt-2": list,
    "qwen2": lambda: _by_pattern(r"\p{N}"),
    "llama-bpe": lambda: _by_pattern(r"\p{N}{1,3}"),
}
"""What stands before the bytes, by `tokenizer.ggml.pre`.

Source: llama.cpp, src/llama-vocab.cpp, LLAMA_VOCAB_PRE_TYPE_*."""
_PART = re.compile(r"-[0-9]{5}-of-([0-9]{5})\.gguf$")
_NFC, _LLAMA3 = ("qwen2",), ("llama-bpe",)
"""Splits of families whose text is normalised first; of those whose words that are tokens are not merged, and whose
texts begin with the bos token where a file does not say (llama.cpp, as above)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHead:
    """What a GGUF file says of its tokenizer and its blocks."""

    tokens: tuple[str, ...]
    "by id"
    control_ids: tuple[int, ...]
    split: str
    adds_bos: bool
    "whether texts begin with the bos token"
    eos_id: int
    turn_ends: tuple[int, ...]
    "further tokens that end a turn"
    block_types: dict[str, int]
    "tensors by kind of block, such as Q4_1"


def require_gguf_packages() -> None:
    """Raise ModelError, saying what to install, unless a GGUF file can be read here."""
    missing = []
    for name in ("gguf", "accelerate"):
        try:
            __import__(name)
        except ImportError:
            missing.append(name)
    if missing:
        raise ModelError(
            f"reading a GGUF file needs the Python package {' and '.join(missing)}, which "
            f"{'are' if len(missing) > 1 else 'is'} not installed; run: pip install 'rlhfspec[gguf]' "
            "(in a checkout: make setup)"
        )


def read_head(file: Path) -> GgufHead:
    """Read a GGUF file's vocabulary.

    Raises ModelError: no GGUF file, one of several parts, a key is missing, or holds what would not be read.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
        _require_read(file, reader)
        field = {name: reader.fields[f"tokenizer.ggml.{name}"].contents() for name in _HEAD_KEYS}
    except (KeyError, ValueError, OSError) as error:
        raise ModelError(
            f"{file.name} was expected to be a GGUF file with a BPE vocabulary, got: {error}; take another file"
        ) from error
    adds_bos = reader.fields.get("tokenizer.ggml.add_bos_token")
    return GgufHead(
        tokens=tuple(field["tokens"]),
        control_ids=tuple(index for index, kind in enumerate(field["token_type"]) if kind == _CONTROL),
        split=field["pre"],
        adds_bos=field["pre"] in _LLAMA3 if adds_bos is None else bool(adds_bos.contents()),
        eos_id=int(field["eos_token_id"]),
        turn_ends=tuple(
            int(reader.fields[key].contents())
            for key in ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
            if key in reader.fields
        ),
        block_types=dict(Counter(tensor.tensor_type.name for tensor in reader.tensors)),
    )


def _require_read(file: Path, reader: Any) -> None:
    """Raise ModelError for what the header says and nothing here reads."""
    part = _PART.search(file.name)
    if part is not None and int(part[1]) > 1:
        raise ModelError(
            f"{file.name} is one of {int(part[1])} parts of a model; expected the whole in one file: merge them "
            "(llama-gguf-split --merge FIRST_PART OUT.gguf)"
        )
    arch = str(reader.fields["general.architecture"].contents())
    lists = (
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.merges",
        "tokenizer.ggml.scores",
        "tokenizer.ggml.token_type",
    )
    given = {
        f"ARCH.{key.removeprefix(f'{arch}.')}" if key.startswith(f"{arch}.") else key: field.contents()
        for key, field in reader.fields.items()
        if key not in lists
    }
    read = [f"ARCH.{key}" for key, name in GGUF_CONFIG_MAPPING.get(arch, {}).items() if name is not None]
    surface("gguf.metadata").require(given, f"the GGUF file {file.name}", error=ModelError, also=read)
    # transformers takes another value for one that is left out: weights of another model come out of it
    needed = ("ARCH.attention.head_count_kv", "ARCH.attention.layer_norm_rms_epsilon")
    if lacking := [key for key in needed if key not in given]:
        raise ModelError(
            f"{file.name} was expected to have the metadata {lacking[0].replace('ARCH', arch)}, got none; write the "
            "file anew with llama.cpp's convert_hf_to_gguf.py"
        )
    split = given.get("tokenizer.ggml.pre")
    if split not in _SPLITS:
        raise ModelError(
            f"the GGUF file splits text as '{split}'; expected one of {', '.join(_SPLITS)}: others have not "
            "been compared with their originals; take the Hugging Face folder of the model instead"
        )


def _require_all_tensors(file: Path, reader: Any) -> None:
    """Raise ModelError where the model of a file's metadata lacks a tensor, or has no weight for one."""
    config = AutoConfig.from_pretrained(str(file.parent), gguf_file=file.name)
    model = meta_model(file.name, config)
    arch = str(reader.fields["general.architecture"].contents())
    processor = TENSOR_PROCESSORS.get(arch, TensorProcessor)(config=config.to_dict())
    weights = get_gguf_hf_weights_map(model, processor)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    tied = model.config.tie_word_embeddings
    require_all_weights(
        file.name, [key for key in weights if key not in stored and not (tied and key == "output.weight")]
    )
    surface("gguf.tensors").require(stored, f"the GGUF file {file.name}", error=ModelError, also=weights)


def convert_gguf(file: Path, folder: Path) -> GgufHead:
    """Write the model of a GGUF file as a Hugging Face folder and return the file's head.

    Weights are unpacked to float32: values of 4 or 8 bits and their scales are exact in it.

    Raises:
        ModelError: packages are missing, transformers cannot read the file, or the tokenizer it makes of it
            does not agree with the file's vocabulary.
    """
    from gguf import GGUFReader

    require_gguf_packages()
    head = read_head(file)
    try:
        _require_all_tensors(file, GGUFReader(file))
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
        packed = AutoModelForCausalLM.from_pretrained(
            str(file.parent), gguf_file=file.name, dtype=torch.float32
        )
    except (MemoryError, torch.OutOfMemoryError, ModelError):
        raise
    except Exception as error:  # transformers raises whatever the file leads to
        raise ModelError(
            f"transformers cannot read {file.name}: {type(error).__name__}: {error}; take another file, or "
            "install the versions in constraints.txt"
        ) from error
    _mend_tokenizer(tokenizer, head)
    model = _plain(packed, head)
    few = few_of([range(len(head.tokens))])
    said = Said(sequences=few, log_probs=own_log_probs(packed, few))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    check_tokenizer(AutoTokenizer.from_pretrained(str(folder)), head)
    require_reloads(
        folder,
        config=model.config,
        checksum=model_checksum(model),
        generation=model.generation_config,
        said=said,
    )
    return head


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, head: GgufHead) -> None:
    """Compare a tokenizer with the vocabulary of the file. Raises ModelError naming the first difference."""
    ours = tokenizer.convert_ids_to_tokens(list(range(len(head.tokens))))
    for index, (token, expected) in enumerate(zip(ours, head.tokens, strict=True)):
        if token != expected:
            raise ModelError(
                f"the converted tokenizer has {token!r} as id {index}, the GGUF file {expected!r}"
            )
    for index in head.control_ids:
        ids = tokenizer.encode(f"a{head.tokens[index]}b", add_special_tokens=False)
        if index not in ids:
            raise ModelError(
                f"the converted tokenizer splits the control token {head.tokens[index]!r} into {ids}; expected "
                f"the one id {index}"
            )
    if tokenizer.eos_token_id != head.eos_id:
        raise ModelError(
            f"the converted tokenizer ends at id {tokenizer.eos_token_id}, the GGUF file at {head.eos_id}"
        )


def _mend_tokenizer(tokenizer: Any, head: GgufHead) -> None:
    backend, before = tokenizer.backend_tokenizer, _SPLITS[head.split]()
    # GPT-2's own split, unless a pattern has split already
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=head.split not in (*_NFC, *_LLAMA3))
    backend.pre_tokenizer = pre_tokenizers.Sequence([*before, bytes_of])
    if head.split in _NFC:
        backend.normalizer = normalizers.NFC()
    if head.split in _LLAMA3:
        backend.model.ignore_merges = True
    tokenizer.add_bos_token = head.adds_bos
    if tokenizer.chat_template is None and set(_CHATML_TOKENS) <= set(head.tokens):
        tokenizer.chat_template = CHATML


def _plain(packed: Any, head: GgufHead) -> Any:
    """The same weights in a model that never heard of GGUF: one that was loaded from it refuses to be saved."""
    left_out = ("quantization_config", "_name_or_path", "_model_name_or_path")
    tree = {name: value for name, value in packed.config.to_dict().items() if name not in left_out}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tree), dtype=torch.float32)
    model.load_state_dict(packed.state_dict())
    config = packed.config
    ends = list(dict.fromkeys([head.eos_id, *head.turn_ends]))
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=ends if len(ends) > 1 else ends[0],
        pad_token_id=config.pad_token_id,
    )
    return model
