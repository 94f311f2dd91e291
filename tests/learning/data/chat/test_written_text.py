"""What the model wrote reaches rewards whole: special tokens stay, the end is cut, the prompt's opened part is told."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast
from word_chat import PLAIN, word_chat

from rlhfspec.actors.reward_server.score_schema import ScoreBody, from_body, to_body
from rlhfspec.core.config import DataConfig, RewardConfig
from rlhfspec.core.records import Completion, FinishReason, Prompt, SampleKey
from rlhfspec.learning.data.chat.scored_text import format_notes
from rlhfspec.learning.data.chat.written_text import response_text, text_without_special_tokens, written_text
from rlhfspec.learning.data.prompts import load_prompts
from rlhfspec.learning.rewards.reward_function import build_reward
from rlhfspec.learning.rewards.reward_model import ModelText
from rlhfspec.learning.rewards.score_request import score_requests

TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<turn>"]
OPENS = PLAIN.replace(
    "{% if add_generation_prompt %}<assistant>", "{% if add_generation_prompt %}<assistant> <think>"
)
CLOSED = OPENS.replace("{{ m.content }}", "<think> </think> {{ m.content }}")
"A template that writes an empty thought into every turn of the assistant's."


def tokenizer_of(template: str = PLAIN) -> PreTrainedTokenizerFast:
    tokenizer = word_chat(template)
    tokenizer.add_special_tokens({"additional_special_tokens": TAGS})
    return tokenizer


def completion(
    tokenizer: PreTrainedTokenizerFast, text: str, *, cut: bool = False, given: str = ""
) -> Completion:
    ids = tokenizer.encode(text, add_special_tokens=False)
    words, sampled = text.split(), [True] * len(ids)
    for place, word in enumerate(words):
        sampled[place] = word not in given.split()
    none = np.zeros(len(ids), dtype=np.float32)
    return Completion(
        key=SampleKey(run_seed=0, sample_index=0),
        prompt_id=0,
        group_id=0,
        epoch=0,
        token_ids=np.array(ids),
        policy_logprobs=none,
        sampling_logprobs=none,
        finish_reason=FinishReason.LENGTH if cut else FinishReason.STOP,
        weight_spans=(),
        instance="gen-0",
        num_decode_steps=0,
        num_accepted_tokens=0,
        sampled=None if not given else np.array(sampled),
    )


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("<think> hi </think> fine <end>", "<think> hi </think> fine"),
        ("<think> hi </think> fine <end> <pad> <pad>", "<think> hi </think> fine"),
        ("<tool_call> you </tool_call>", "<tool_call> you </tool_call>"),
        ("fine <turn>", "fine"),
        ("hi there <end>", "hi there"),
        ("<end>", ""),
    ],
)
def test_special_tokens_stay_and_the_end_is_cut(said: str, shown: str) -> None:
    tokenizer = tokenizer_of()
    assert response_text(tokenizer, completion(tokenizer, said)) == shown
    ids = np.array(tokenizer.encode(said, add_special_tokens=False))
    assert written_text(tokenizer, ids, stopped=True) == shown, "an environment reads the same"


def test_what_closes_the_text_itself_is_no_tag_of_the_answer() -> None:
    """As in chat models made of Llama-2 or Mistral: `<|im_end|>` is their end token, and `</s>` stops too."""
    tokenizer = tokenizer_of()
    tokenizer.add_special_tokens({"bos_token": "<s>", "additional_special_tokens": [*TAGS, "</s>"]})
    assert response_text(tokenizer, completion(tokenizer, "fine </s>")) == "fine"
    assert response_text(tokenizer, completion(tokenizer, "fine </think>")) == "fine </think>"


def test_what_was_cut_at_its_limit_has_no_end_to_cut() -> None:
    tokenizer = tokenizer_of()
    assert response_text(tokenizer, completion(tokenizer, "fine <turn>", cut=True)) == "fine <turn>"
    assert text_without_special_tokens(tokenizer, completion(tokenizer, "<think> fine <end>")) == "fine"


def test_an_episode_is_shown_without_the_template_s_tokens_around_what_was_given() -> None:
    tokenizer = tokenizer_of()
    whole = completion(
        tokenizer, "<think> hi <turn> <user> good <assistant> fine <end>", given="<user> good <assistant>"
    )
    assert response_text(tokenizer, whole) == "<think> hi good fine"


@pytest.mark.parametrize(
    ("template", "prefill"),
    [(PLAIN, ""), (OPENS, "<think>"), (CLOSED, "<think>")],
    ids=["plain", "opens", "closed"],
)
def test_prompts_say_what_the_template_begins_the_turn_with(
    template: str, prefill: str, tmp_path: Path
) -> None:
    (tmp_path / "d.jsonl").write_text(json.dumps({"question": "hi", "answer": "fine"}) + "\n")
    data = DataConfig(path=str(tmp_path / "d.jsonl"), chat=True)
    tokenizer = tokenizer_of(template)
    (prompt,) = load_prompts(data, tokenizer, seed=0).prompts
    assert prompt.prefill.strip() == prefill
    assert str(tokenizer.decode(prompt.token_ids)).endswith(
        "<assistant> " + prefill if prefill else "<assistant>"
    )


def test_a_plain_prompt_template_may_open_a_tag_too(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text(json.dumps({"question": "hi <b>", "answer": "fine"}) + "\n")
    for form, prefill in (("{prompt} me <think>", "<think>"), ("{prompt}", ""), ("<think> {prompt} me", "")):
        data = DataConfig(path=str(tmp_path / "d.jsonl"), prompt_template=form)
        (prompt,) = load_prompts(data, tokenizer_of(), seed=0).prompts
        assert prompt.prefill == prefill, form


def opened(messages: tuple[tuple[str, str], ...] = (("user", "hi"),)) -> Prompt:
    return Prompt(prompt_id=0, token_ids=np.array([4]), text="hi", messages=messages, prefill="<think>")


def test_functions_and_format_see_the_opened_part() -> None:
    function = build_reward(RewardConfig(kind="sample_rewards:opened"))
    assert function.score([opened()], [" good </think> fine"])[0].value == 1.0
    pattern = build_reward(RewardConfig(kind="format", pattern=r"<think>.*</think>.*"))
    rewards = pattern.score([opened()] * 3, [" good </think> fine", "<think> good </think> me", "fine"])
    assert [reward.value for reward in rewards] == [1.0, 1.0, 0.0]


def test_a_reward_model_reads_the_whole_turn_here_and_served() -> None:
    tokenizer = tokenizer_of()
    (request,) = score_requests([opened()], [" good </think> fine"])
    read = ModelText(tokenizer, None).token_ids(request)
    assert "<assistant> <think> good </think> fine" in tokenizer.decode(read)
    (served,) = from_body(ScoreBody.model_validate_json(to_body([request]).model_dump_json()))
    assert ModelText(tokenizer, None).token_ids(served) == read
    (plain,) = score_requests([opened(messages=())], [" good"])
    assert plain.whole_turn == " good", "a plain prompt's own text holds what it opened"


def test_a_pattern_that_cannot_match_is_noted() -> None:
    tokenizer = tokenizer_of()
    assert not format_notes(r"<think>.*</think>.*", {"<think>", ""}, tokenizer)
    assert not format_notes(r"(?s).*</think>\d+", {"<think>\n"}, tokenizer)
    (note,) = format_notes(r"<reason>.*", {"<think>\n"}, tokenizer)
    assert "nothing that begins so matches" in note and r"'<think>\n'" in note
    (note,) = format_notes(r"fine<end>", {""}, tokenizer)
    assert "names <end>, which is cut off" in note
