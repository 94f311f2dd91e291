"""A turn's end token that is not the tokenizer's own: told, named, and saved so that responses stop."""

import json
from types import SimpleNamespace

import pytest
from transformers import GenerationConfig
from word_chat import MARKED, word_chat

from rlhfspec.cluster.jobs.job_inputs import open_end, set_end_token
from rlhfspec.core.errors import ConfigError
from rlhfspec.core.settings.supervised import DemonstrationsConfig
from rlhfspec.learning.data.record import Record
from rlhfspec.learning.data.supervised_rows import encode_demonstrations
from rlhfspec.learning.training.finished_model import _name_end

TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "you"}]


def base_model_s():
    """The turn ends with <end>, which is a special token and not the end token."""
    tokenizer = word_chat()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<end>", "<system>", "<user>", "<assistant>"]}
    )
    tokenizer.eos_token = "<pad>"
    return tokenizer


def test_a_turn_whose_end_stops_nothing_is_told_until_it_is_named():
    tokenizer = base_model_s()
    row = Record("x:1", {"messages": TURNS})
    examples, _ = encode_demonstrations([row], DemonstrationsConfig(path="x.jsonl"), tokenizer)
    [line] = open_end(examples, tokenizer)
    # transformers 5 calls it special no more once it has no name
    tokenizer.add_special_tokens({"additional_special_tokens": []})
    assert open_end(examples, tokenizer) == (line,)
    settings = GenerationConfig(eos_token_id=0)
    _name_end(SimpleNamespace(eos_token_id=0), settings, tokenizer)
    assert settings.eos_token_id == [0, 1]
    assert "set model.eos_token to '<end>'" in line
    set_end_token(tokenizer, "<end>")
    assert open_end(examples, tokenizer) == ()
    with pytest.raises(ConfigError, match="no token of the tokenizer"):
        set_end_token(tokenizer, "<nothing>")


def test_examples_of_which_none_ends_a_turn_are_told():
    unended = MARKED.replace("<end>{% endgeneration %}", "{% endgeneration %}<end>")
    row = Record("x:1", {"messages": TURNS})
    for template, limit, told in ((unended, 99, 1), (MARKED, 5, 1), (MARKED, 99, 0)):
        data = DemonstrationsConfig(path="x.jsonl", max_tokens=limit)
        examples, _ = encode_demonstrations([row], data, word_chat(template))
        assert len(open_end(examples, word_chat(template))) == told, template


@pytest.mark.parametrize(
    ("before", "after"), [(None, 1), (0, [1, 0]), ([0, 4], [1, 0, 4]), (1, 1), ([0, 1], [0, 1])]
)
def test_the_saved_model_names_it_before_all_others(before, after):
    settings = GenerationConfig(eos_token_id=before)
    _name_end(SimpleNamespace(eos_token_id=0), settings, word_chat())
    assert json.dumps(settings.eos_token_id) == json.dumps(after)
