"""Prompt ids are what the response follows: no end token behind them, the beginning once."""

import json

import pytest
from tokenizers import processors
from word_chat import PLAIN, word_chat

from rlhfspec.core.config import DataConfig
from rlhfspec.core.settings.supervised import DemonstrationsConfig
from rlhfspec.learning.data.prompt_tokens import prompt_ids
from rlhfspec.learning.data.prompts import load_prompts
from rlhfspec.learning.data.record import Record
from rlhfspec.learning.data.supervised_rows import encode_demonstrations


def adding(single, template=None):
    """A tokenizer that puts <user> (its beginning) before a text, or <end> behind it."""
    tokenizer = word_chat(template)
    tokenizer.bos_token = "<user>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<user>", 4), ("<end>", 1)]
    )
    return tokenizer


@pytest.mark.parametrize(
    ("single", "text", "shown"),
    [
        ("$A", "hi there", "hi there"),
        ("$A <end>", "hi there", "hi there"),
        ("<user> $A <end>", "hi there", "<user> hi there"),
        ("<user> $A", "<user> hi there", "<user> hi there"),
        ("$A", "<user> hi there <end>", "<user> hi there <end>"),
        ("$A <end>", "hi <end>", "hi <end>"),
    ],
)
def test_a_plain_prompt_has_no_end_that_it_does_not_write_and_one_beginning(tmp_path, single, text, shown):
    tokenizer = adding(single)
    assert " ".join(tokenizer.convert_ids_to_tokens(prompt_ids(tokenizer, [text])[0])) == shown
    (tmp_path / "d.jsonl").write_text(json.dumps({"question": text, "answer": "me"}))
    data = DataConfig(path=str(tmp_path / "d.jsonl"))
    (prompt,) = load_prompts(data, tokenizer, seed=0).prompts
    assert prompt.token_ids.tolist() == prompt_ids(tokenizer, [text])[0]
    # what is learned in sft follows the same ids
    row = Record("x:1", {"prompt": text, "completion": "me"})
    (example,), _ = encode_demonstrations([row], DemonstrationsConfig(path="x.jsonl"), tokenizer)
    assert example.token_ids[~example.is_learned].tolist() == prompt.token_ids.tolist()


def test_a_chat_prompt_has_the_template_s_special_tokens_alone(tmp_path):
    tokenizer = adding("<user> $A <end>", PLAIN)
    (tmp_path / "d.jsonl").write_text(json.dumps({"question": "hi", "answer": "me"}))
    (prompt,) = load_prompts(DataConfig(path=str(tmp_path / "d.jsonl"), chat=True), tokenizer, seed=0).prompts
    assert (
        " ".join(tokenizer.convert_ids_to_tokens(prompt.token_ids.tolist())) == "<user> hi <end> <assistant>"
    )
