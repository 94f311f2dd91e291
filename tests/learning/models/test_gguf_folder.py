"""A GGUF file becomes a Hugging Face folder with the same weights and the same tokenizer."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter
from reference_bpe import reference_ids
from tiny_gguf import CONTROL, TEXT, TinyGguf, write_tiny_gguf
from tokenizers import Regex, pre_tokenizers
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2

from rlhfspec.core.errors import ModelError
from rlhfspec.engine.weights.loading import load_causal_lm, load_tokenizer
from rlhfspec.learning.models.gguf_folder import convert_gguf, read_head

LLAMA3 = inspect.signature(TikTokenConverter.__init__).parameters["pattern"].default
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
    tiny = write_tiny_gguf(tmp_path / "tiny.gguf", split="tekken")
    with pytest.raises(ModelError, match=r"'tekken'; expected one of smollm"):
        convert_gguf(tiny.file, tmp_path / "out")


def test_what_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUZ" + bytes(64))
    with pytest.raises(ModelError, match=r"tiny\.gguf was expected to be a GGUF file"):
        read_head(tmp_path / "tiny.gguf")


@pytest.mark.parametrize(("split", "original"), [("qwen2", QWEN2), ("llama-bpe", LLAMA3)])
def test_text_is_split_as_the_originals_split_it(tmp_path: Path, split: str, original: str) -> None:
    tiny = write_tiny_gguf(tmp_path / "tiny.gguf", split=split)
    convert_gguf(tiny.file, tmp_path / "out")
    backend = load_tokenizer(str(tmp_path / "out")).backend_tokenizer
    pattern = pre_tokenizers.Split(Regex(original), behavior="isolated")
    for text in [*CHATS, "a12345 b\r\n\r\n  c'LL  \u2167 \u0661\u0662\u0663\u0664"]:
        pieces = [place for _, place in backend.pre_tokenizer.pre_tokenize_str(text)]
        assert pieces == [place for _, place in pattern.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("split", "given", "adds"),
    [("llama-bpe", None, True), ("smollm", None, False), ("llama-bpe", False, False), ("qwen2", True, True)],
)
def test_a_text_begins_with_the_bos_token_where_the_file_or_else_llama_cpp_says_so(
    tmp_path: Path, split: str, given: bool | None, adds: bool
) -> None:
    tiny = write_tiny_gguf(tmp_path / "tiny.gguf", split=split, adds_bos=given)
    convert_gguf(tiny.file, tmp_path / "out")
    tokenizer = load_tokenizer(str(tmp_path / "out"))
    bare = tokenizer.encode("a dog", add_special_tokens=False)
    assert tokenizer.encode("a dog") == [1] * adds + bare


def test_a_file_of_several_parts_is_refused_by_its_name_and_by_its_count(tmp_path: Path) -> None:
    named = tmp_path / "tiny-00001-of-00002.gguf"
    write_tiny_gguf(named)
    with pytest.raises(ModelError, match=r"one of 2 parts .*merge them"):
        convert_gguf(named, tmp_path / "out")
    write_tiny_gguf(tmp_path / "tiny.gguf", metadata={"split.count": 2, "split.no": 0})
    with pytest.raises(ModelError, match=r"'split\.count': expected none or 0 or 1, got 2; .*merge them"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("tensors", "without", "said"),
    [
        ((), "model.layers.1.mlp.up_proj.weight", r"lack weights .*1, first 'blk\.1\.ffn_up\.weight'"),
        (
            ("rope_freqs.weight",),
            "",
            r"'rope_freqs\.weight', which cannot be taken into account; frequencies",
        ),
        (("blk.0.attn_q.bias",), "", r"'blk\.0\.attn_q\.bias', which nothing here reads"),
    ],
)
def test_a_tensor_that_lacks_or_is_not_read_ends_it(
    tmp_path: Path, tensors: tuple[str, ...], without: str, said: str
) -> None:
    tiny = write_tiny_gguf(tmp_path / "tiny.gguf", tensors=tensors, without=without)
    with pytest.raises(ModelError, match=said):
        convert_gguf(tiny.file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_ends_a_turn_ends_a_response_too(tmp_path: Path) -> None:
    tiny = write_tiny_gguf(tmp_path / "tiny.gguf", metadata={"tokenizer.ggml.eot_token_id": 0})
    convert_gguf(tiny.file, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == [2, 0]


@pytest.mark.parametrize(
    ("left_out", "key"),
    [
        ("add_head_count_kv", "attention.head_count_kv"),
        ("add_layer_norm_rms_eps", "attention.layer_norm_rms_eps"),
    ],
)
def test_metadata_for_which_another_value_would_be_taken_must_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_out: str, key: str
) -> None:
    monkeypatch.setattr(GGUFWriter, left_out, lambda *_: None)
    tiny = write_tiny_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(ModelError, match=rf"expected to have the metadata llama\.{key}"):
        convert_gguf(tiny.file, tmp_path / "out")
