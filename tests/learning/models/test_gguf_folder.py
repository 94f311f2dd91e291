"""A GGUF file becomes a Hugging Face folder with the same weights and the same tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from reference_bpe import reference_ids
from tiny_gguf import CONTROL, TEXT, TinyGguf, write_tiny_gguf

from rlhfspec.core.errors import ModelError
from rlhfspec.engine.weights.loading import load_causal_lm, load_tokenizer
from rlhfspec.learning.models.gguf_folder import convert_gguf, read_head

CHATS = [
    *TEXT,
    "In 1984,  12+345   = 357.\n\n\tI can't  do  it!",
    "naïve 日本語 🤖  7  8 <|im_start|>user",
]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[TinyGguf, Path]:
    folder = tmp_path_factory.mktemp("gguf")
    tiny = write_tiny_gguf(folder / "tiny.gguf")
    convert_gguf(tiny.file, folder / "out")
    return tiny, folder / "out"


def test_every_weight_is_what_the_blocks_stand_for(written: tuple[TinyGguf, Path]) -> None:
    tiny, folder = written
    converted = dict(load_causal_lm(str(folder), "float32").named_parameters())
    expected = dict(tiny.model.named_parameters())
    assert converted.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(converted[name], values), name


def test_logits_are_those_of_the_original_module(written: tuple[TinyGguf, Path]) -> None:
    tiny, folder = written
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        ours = load_causal_lm(str(folder), "float32")(ids).logits
        assert torch.allclose(ours, tiny.model(ids).logits, atol=1e-5)


@pytest.mark.parametrize("text", CHATS)
def test_chat_prompts_get_the_ids_of_the_files_own_vocabulary(
    written: tuple[TinyGguf, Path], text: str
) -> None:
    tiny, folder = written
    tokenizer = load_tokenizer(str(folder))
    messages = [{"role": "user", "content": text}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert isinstance(prompt, str) and prompt.startswith("<|im_start|>user\n")
    expected = reference_ids(prompt, tiny.tokens, tiny.merges, CONTROL)
    assert tokenizer.encode(prompt, add_special_tokens=False) == expected
    assert tokenizer.decode(expected) == prompt


def test_generation_stops_at_the_end_of_a_turn(written: tuple[TinyGguf, Path]) -> None:
    _, folder = written
    assert load_tokenizer(str(folder)).eos_token_id == 2
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())


def test_a_file_without_a_template_gets_the_one_its_tokens_are_made_for(tmp_path: Path) -> None:
    tiny = write_tiny_gguf(tmp_path / "tiny.gguf", chat_template=None)
    convert_gguf(tiny.file, tmp_path / "out")
    messages = [{"role": "user", "content": "A dog"}]
    text = load_tokenizer(str(tmp_path / "out")).apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    assert text == "<|im_start|>user\nA dog<|im_end|>\n<|im_start|>assistant\n"


def test_a_split_that_was_never_compared_is_refused(tmp_path: Path) -> None:
    tiny = write_tiny_gguf(tmp_path / "tiny.gguf", split="qwen2")
    with pytest.raises(ModelError, match=r"'qwen2'; expected one of smollm"):
        convert_gguf(tiny.file, tmp_path / "out")


def test_what_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUZ" + bytes(64))
    with pytest.raises(ModelError, match=r"tiny\.gguf was expected to be a GGUF file"):
        read_head(tmp_path / "tiny.gguf")
