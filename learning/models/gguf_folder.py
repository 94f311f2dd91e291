"""Makes a Hugging Face folder of a GGUF file: float32 weights, tokenizer, chat template, generation config.

transformers reads and unpacks the blocks. What it leaves out is done here: a model that is written to disk may
not call itself quantised, and the way text is split before BPE is told by a word of llama.cpp.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from rlhfspec.core.errors import ModelError

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"For a file without a template of its own whose vocabulary has the two tokens."
_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
_HEAD_KEYS = ("tokens", "token_type", "pre", "eos_token_id")
_CONTROL = 3
"llama.cpp's token type of control tokens: one id each wherever they stand in a text."


def _digits_alone() -> Any:
    """Every digit a piece of its own, then GPT-2's split."""
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


_SPLITS: dict[str, Callable[[], Any]] = {
    "smollm": _digits_alone,
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
}
"""By `tokenizer.ggml.pre`. Source: llama.cpp, src/llama-vocab.cpp, LLAMA_VOCAB_PRE_TYPE_*."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHead:
    """What a GGUF file says of its tokenizer and its blocks."""

    tokens: tuple[str, ...]
    "by id"
    control_ids: tuple[int, ...]
    split: str
    eos_id: int
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
    """Read a GGUF file's vocabulary. Raises ModelError: no GGUF file, or a key is missing."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
        field = {name: reader.fields[f"tokenizer.ggml.{name}"].contents() for name in _HEAD_KEYS}
    except (KeyError, ValueError, OSError) as error:
        raise ModelError(
            f"{file.name} was expected to be a GGUF file with a BPE vocabulary, got: {error}; take another file"
        ) from error
    return GgufHead(
        tokens=tuple(field["tokens"]),
        control_ids=tuple(index for index, kind in enumerate(field["token_type"]) if kind == _CONTROL),
        split=field["pre"],
        eos_id=int(field["eos_token_id"]),
        block_types=dict(Counter(tensor.tensor_type.name for tensor in reader.tensors)),
    )


def convert_gguf(file: Path, folder: Path) -> GgufHead:
    """Write the model of a GGUF file as a Hugging Face folder and return the file's head.

    Weights are unpacked to float32: values of 4 or 8 bits and their scales are exact in it.

    Raises:
        ModelError: packages are missing, transformers cannot read the file, or the tokenizer it makes of it
            does not agree with the file's vocabulary.
    """
    require_gguf_packages()
    head = read_head(file)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
        packed = AutoModelForCausalLM.from_pretrained(
            str(file.parent), gguf_file=file.name, dtype=torch.float32
        )
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # transformers raises whatever the file leads to
        raise ModelError(
            f"transformers cannot read {file.name}: {type(error).__name__}: {error}; take another file, or "
            "install the versions in constraints.txt"
        ) from error
    _mend_tokenizer(tokenizer, head)
    model = _plain(packed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    check_tokenizer(AutoTokenizer.from_pretrained(str(folder)), head)
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
    if head.split not in _SPLITS:
        raise ModelError(
            f"the GGUF file splits text as '{head.split}'; expected one of {', '.join(_SPLITS)}: others have not "
            "been compared with their originals; take the Hugging Face folder of the model instead"
        )
    tokenizer.backend_tokenizer.pre_tokenizer = _SPLITS[head.split]()
    if tokenizer.chat_template is None and set(_CHATML_TOKENS) <= set(head.tokens):
        tokenizer.chat_template = CHATML


def _plain(packed: Any) -> Any:
    """The same weights in a model that never heard of GGUF: one that was loaded from it refuses to be saved."""
    left_out = ("quantization_config", "_name_or_path", "_model_name_or_path")
    tree = {name: value for name, value in packed.config.to_dict().items() if name not in left_out}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tree), dtype=torch.float32)
    model.load_state_dict(packed.state_dict())
    config = packed.config
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    return model
