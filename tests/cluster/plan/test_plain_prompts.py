"""Plain prompts to a tokenizer with a chat template are told, and nothing is where they get it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from byte_chat import save_byte_pair

from rlhfspec.cluster.plan.inputs import Inputs
from rlhfspec.core.settings.data import DataConfig
from rlhfspec.engine.weights.loading import load_tokenizer
from rlhfspec.learning.data.prompts import load_prompts


@pytest.mark.parametrize(
    ("text", "chat", "told"),
    [("say one", False, True), ("say one", True, False), ("<user>say one<end><assistant>", False, False)],
)
def test_plain_prompts_of_a_chat_model_are_told(text: str, chat: bool, told: bool, tmp_path: Path) -> None:
    save_byte_pair(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path / "target"))
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"question": text, "answer": ""}) + "\n")
    prompts = load_prompts(DataConfig(path=str(file), chat=chat), tokenizer, seed=0)
    notes = Inputs(tokenizer=tokenizer, dataset=prompts, max_total_tokens=64).notes()
    assert any("plain prompts go without the chat template" in note for note in notes) == told
