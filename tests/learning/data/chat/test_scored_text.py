"""What a reward model reads: the template's text, or prompt and response; cut from the prompt's beginning only."""

import json

import numpy as np
import pytest
from word_chat import word_chat

from rlhfspec.actors.reward_server.score_schema import ScoreBody, from_body, to_body
from rlhfspec.core.config import DataConfig
from rlhfspec.core.records import FinishReason, Prompt, ResponseFacts
from rlhfspec.core.settings.supervised import PreferencesConfig
from rlhfspec.learning.data.chat.scored_text import render
from rlhfspec.learning.data.preferences import encode_preferences
from rlhfspec.learning.data.prompts import load_prompts
from rlhfspec.learning.data.record import Record
from rlhfspec.learning.rewards.reward_model import ModelText
from rlhfspec.learning.rewards.score_request import ScoreRequest, score_requests

ASKED = (("system", "be kind"), ("user", "who are you"))
WHOLE = "<system> be kind <end> <user> who are you <end> <assistant> me <end>"


def words(tokenizer, *args, **kwargs):
    return " ".join(tokenizer.convert_ids_to_tokens(render(tokenizer, *args, **kwargs)))


def test_messages_and_the_response_as_the_assistant_s_go_through_the_template():
    assert words(word_chat(), "not this", ASKED, "me", max_tokens=None) == WHOLE


def test_of_several_turns_each_is_rendered_as_who_said_it():
    turns = (("assistant", "me"), ("user", "no"), ("assistant", "you"))
    facts = ResponseFacts(sample_index=0, num_tokens=2, finish_reason=FinishReason.STOP, turns=turns)
    prompt = Prompt(prompt_id=0, token_ids=np.arange(2), text="not this", messages=ASKED)
    (request,) = score_requests([prompt], ["me\nyou"], [facts])
    tokenizer = word_chat()
    ids = ModelText(tokenizer, max_tokens=None).token_ids(request)
    further = " <user> no <end> <assistant> you <end>"
    assert " ".join(tokenizer.convert_ids_to_tokens(ids)) == WHOLE + further


@pytest.mark.parametrize(("template", "messages"), [(None, ASKED), (word_chat().chat_template, ())])
def test_without_template_or_messages_it_is_prompt_and_response(template, messages):
    assert words(word_chat(template), "who are", messages, " you", max_tokens=None) == "who are you"


@pytest.mark.parametrize("max_tokens", [13, 12, 7, 2, 1])
def test_the_prompt_is_cut_from_its_beginning_and_the_response_never(max_tokens):
    whole = WHOLE.split()
    kept = whole[-max(max_tokens, 2) :]  # the response and its end token
    assert words(word_chat(), "", ASKED, "me", max_tokens=max_tokens).split() == kept


def test_plain_text_is_cut_the_same_way():
    tokenizer = word_chat()
    assert words(tokenizer, "who are you ", (), "me no", max_tokens=3) == "you me no"
    assert words(tokenizer, "who are you ", (), "me no yes", max_tokens=1) == "me no yes"


def test_a_prompt_s_template_reaches_the_reward_model_in_ppo_as_in_its_training(tmp_path):
    tokenizer, template = word_chat(None), "who {prompt} are "
    row = {"prompt": "you", "chosen": "me", "rejected": "no"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    pairs = PreferencesConfig(path="x.jsonl", prompt_template=template)
    (pair,), _ = encode_preferences([Record("x:1", row)], pairs, tokenizer)
    data = DataConfig(
        path=str(tmp_path / "rows.jsonl"),
        prompt_field="prompt",
        reference_field=None,
        reward_fields=("chosen",),
        prompt_template=template,
    )
    [prompt] = load_prompts(data, tokenizer, seed=0).prompts
    request = ScoreRequest(prompt=prompt, response="me")
    assert ModelText(tokenizer, None).token_ids(request) == pair.chosen_ids.tolist()
    # a server's reward model reads the same, and functions the row's own text
    [served] = from_body(ScoreBody.model_validate_json(to_body([request]).model_dump_json()))
    assert ModelText(tokenizer, None).token_ids(served) == pair.chosen_ids.tolist()
    assert prompt.text == served.prompt.text == "you"
    assert served.prompt.fields == prompt.fields == {"chosen": "me"}
