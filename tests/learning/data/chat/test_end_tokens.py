"""What ends a response: what tokenizer and model name, and what the chat template closes a turn with."""

import json

import pytest
from word_chat import PLAIN, word_chat

from rlhfspec.core.config import DataConfig, SamplingConfig
from rlhfspec.core.errors import ModelError
from rlhfspec.engine.weights.generation_settings import ending_at
from rlhfspec.learning.data.chat.end_tokens import find_end_tokens, model_end_tokens, turn_end
from rlhfspec.learning.data.prompts import sampling_params

END, OPEN = 1, 5
DATA = DataConfig(path="x.jsonl")
CUT_OPEN = PLAIN.replace(" <end>", "")


def chat(template=PLAIN, *, eos="<pad>"):
    """A tokenizer whose end token is not what its template closes turns with."""
    tokenizer = word_chat(template)
    tokenizer.eos_token = eos
    return tokenizer


def model_of(folder, **config):
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    return str(folder)


def test_a_turn_s_end_that_nothing_names_is_found_by_rendering_and_said(tmp_path):
    found = find_end_tokens(DATA, chat(), model=model_of(tmp_path), is_chat=True)
    assert found.token_ids == (0, END)
    assert found.line and "responses also end at <end> (id 1)" in found.line
    asked = SamplingConfig(end_token_ids=found.token_ids, stop_token_ids=(7,))
    assert sampling_params(asked, chat()).stop_token_ids == (7, 0, END)


@pytest.mark.parametrize(
    ("eos", "config", "stops"),
    [("<end>", {}, ()), ("<pad>", {"eos_token_id": [0, 1]}, ()), ("<pad>", {}, (1,))],
)
def test_nothing_is_said_of_an_end_that_somebody_names(tmp_path, eos, config, stops):
    found = find_end_tokens(
        DATA, chat(eos=eos), model=model_of(tmp_path, **config), is_chat=True, stop_token_ids=stops
    )
    assert found.line is None and (END in found.token_ids or END in stops)


def test_plain_prompts_end_as_tokenizer_and_model_say(tmp_path):
    found = find_end_tokens(DATA, chat(), model=model_of(tmp_path), is_chat=False)
    assert (found.token_ids, found.line) == ((0,), None)


def test_a_template_that_leaves_the_last_answer_open_ends_it_with_what_begins_the_next_turn(tmp_path):
    # as GLM's templates: <user> follows the answer at once
    glm = "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}"
    assert turn_end(chat(glm), DATA) == 4
    silent = "{% for m in messages %} {{ m.content }} who {% endfor %}"
    found = find_end_tokens(DATA, chat(silent), model=model_of(tmp_path), is_chat=True)
    assert found.token_ids == (0,) and found.line and "no token of its own: <pad> ends" in found.line
    assert turn_end(chat("{{ raise_exception('no') }}"), DATA) is None


def test_the_named_template_of_the_data_is_what_is_rendered():
    assert turn_end(chat(CUT_OPEN), DataConfig(path="x", chat_template=PLAIN)) == END


def test_without_generation_config_the_config_s_own_end_tokens_count(tmp_path):
    assert model_end_tokens(chat(), model_of(tmp_path, eos_token_id=[1, 3, 99])) == (0, 1, 3)
    assert model_end_tokens(chat(), model_of(tmp_path, text_config={"eos_token_id": 3})) == (0, 3)
    # what the class of the config has by default was not said
    assert model_end_tokens(chat(), model_of(tmp_path)) == (0,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2}')
    assert model_end_tokens(chat(), model_of(tmp_path, eos_token_id=1)) == (0, 2)


def test_a_checkpoint_stops_where_its_run_did(tmp_path):
    model = model_of(tmp_path, eos_token_id=[0, 1], bos_token_id=3)
    assert ending_at(model, (0, 1)) is None
    more = ending_at(model, (0, 1, 2))
    assert more is not None and (more.eos_token_id, more.bos_token_id) == ([0, 1, 2], 3)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 0, "top_p": 0.5}')
    same, longer = ending_at(model, (0,)), ending_at(model, (0, 1))
    assert same is not None and same.eos_token_id == 0
    assert longer is not None and (longer.eos_token_id, longer.top_p) == ([0, 1], 0.5)


def test_an_end_token_beyond_the_tokenizer_is_told(tmp_path):
    found = find_end_tokens(DATA, chat(), model=model_of(tmp_path, eos_token_id=[0, 999]), is_chat=True)
    assert found.token_ids == (0, END)
    assert found.line and "ends responses at id 999" in found.line and "also end at <end>" in found.line
    plain = find_end_tokens(DATA, chat(), model=model_of(tmp_path, eos_token_id=999), is_chat=False)
    assert plain.token_ids == (0,) and plain.line and "ends responses at id 999" in plain.line


@pytest.mark.parametrize("eos", ["</s>", True, [0, "</s>"], [1.5]])
def test_end_tokens_that_are_no_ids_are_refused(tmp_path, eos):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(ModelError, match=r"has eos_token_id .*; expected the id of a token"):
        find_end_tokens(DATA, chat(), model=model_of(tmp_path), is_chat=True)
