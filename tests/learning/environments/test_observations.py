"""Answers become tokens behind what was sampled: in a chat as the template's next turns, else as they are."""

from types import SimpleNamespace

import numpy as np
import pytest

from rlhfspec.core.errors import EpisodeError
from rlhfspec.core.records import Prompt
from rlhfspec.learning.data.chat.written_text import written_text
from rlhfspec.learning.environments.environment_protocol import checked_reset, checked_step
from rlhfspec.learning.environments.observations import ObservationRenderer, ending_with
from rlhfspec.learning.models.tokenization import character_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz:;!|-?"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<eos>{% else %};{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture
def tokenizer():
    made = character_tokenizer(LETTERS)
    made.chat_template = TEMPLATE
    return made


PLAIN = Prompt(prompt_id=0, token_ids=np.arange(2), text="q")
CHAT = Prompt(prompt_id=0, token_ids=np.arange(2), text="q", messages=(("user", "q"),))


def given(renderer: ObservationRenderer, prompt: Prompt, observation, *, last_token: int):
    return renderer.give(observation, prompt=prompt, last_token=last_token).token_ids


def text(tokenizer, ids) -> str:
    return tokenizer.decode(list(ids))


def test_text_follows_as_it_is(tokenizer):
    renderer = ObservationRenderer(tokenizer, max_tokens=10)
    assert text(tokenizer, given(renderer, PLAIN, "hello", last_token=5)) == "hello"
    assert len(given(renderer, PLAIN, "", last_token=5)) == 0


def test_what_a_prompt_is_decides_whether_its_answers_are_turns(tokenizer):
    renderer = ObservationRenderer(tokenizer, max_tokens=10)
    last = tokenizer.eos_token_id
    assert text(tokenizer, given(renderer, PLAIN, "hello", last_token=last)) == "hello"
    found = renderer.give("hello", prompt=CHAT, last_token=last)
    assert text(tokenizer, found.token_ids) == "u:hello;a:" and found.messages == (("user", "hello"),)
    raw = ObservationRenderer(tokenizer, max_tokens=10, raw=True)
    assert text(tokenizer, given(raw, CHAT, "hello", last_token=last)) == "hello"


def test_later_turns_take_the_template_and_its_variables_that_the_first_took(tokenizer):
    template = TEMPLATE.replace("}}a:{%", "}}a:{{ mood }}{%").replace("%}a:{%", "%}a{{ mood }}:{%")
    renderer = ObservationRenderer(
        tokenizer, max_tokens=10, chat_template=template, chat_template_kwargs={"mood": "!"}
    )
    found = given(renderer, CHAT, "hello", last_token=tokenizer.eos_token_id)
    assert text(tokenizer, found) == "u:hello;a!:"
    first = renderer.with_text(CHAT, "x")
    assert text(tokenizer, first.token_ids) == "u:qx;a!:" and first.messages == (("user", "qx"),)


@pytest.mark.parametrize("closed", [True, False])
def test_a_chat_goes_on_with_the_next_turns_and_closes_what_was_left_open(tokenizer, closed):
    renderer = ObservationRenderer(tokenizer, max_tokens=10)
    last = tokenizer.eos_token_id if closed else tokenizer.encode("b")[0]
    found = text(tokenizer, given(renderer, CHAT, "hello", last_token=last))
    assert found == ("" if closed else "<eos>") + "u:hello;a:"
    several = given(
        renderer,
        CHAT,
        [{"role": "tool", "content": "x"}, {"role": "user", "content": "y"}],
        last_token=tokenizer.eos_token_id,
    )
    assert text(tokenizer, several) == "t:x;u:y;a:"
    whole = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "hello"},
        ],
        add_generation_prompt=True,
        tokenize=False,
    )
    if not closed:
        assert whole == "u:q;a:b" + found, "prompt, turn and answer are the template's own rendering"


def test_token_ids_are_taken_as_they_are_and_checked(tokenizer):
    renderer = ObservationRenderer(tokenizer, max_tokens=3)
    assert given(renderer, CHAT, np.array([4, 5]), last_token=1).tolist() == [4, 5]
    assert given(renderer, CHAT, [4, 5, 6, 7], last_token=1).tolist() == [4, 5, 6] and renderer.num_cut == 1
    with pytest.raises(EpisodeError, match="token ids from 0"):
        given(renderer, CHAT, [len(tokenizer)], last_token=1)


def test_long_answers_are_cut_and_counted_inside_their_message(tokenizer):
    renderer = ObservationRenderer(tokenizer, max_tokens=3)
    found = given(renderer, CHAT, "abcdef", last_token=tokenizer.eos_token_id)
    assert text(tokenizer, found) == "u:abc;a:" and renderer.num_cut == 1


def test_of_an_endless_answer_only_the_beginning_is_encoded(tokenizer, monkeypatch):
    renderer, lengths = ObservationRenderer(tokenizer, max_tokens=3), []
    encode = renderer._encode
    monkeypatch.setattr(renderer, "_encode", lambda text: lengths.append(len(text)) or encode(text))
    found = given(renderer, CHAT, "abc" * 10_000_000, last_token=tokenizer.eos_token_id)
    assert text(tokenizer, found) == "u:abc;a:" and renderer.num_cut == 1 and max(lengths) <= 3 * 256


def test_first_words_end_the_prompt_or_its_last_message(tokenizer):
    renderer = ObservationRenderer(tokenizer, max_tokens=9)
    plain = Prompt(prompt_id=0, token_ids=np.array(tokenizer.encode("ask:")), text="ask")
    found = renderer.with_text(plain, "ed")
    assert text(tokenizer, found.token_ids) == "ask:ed" and found.text == "asked"
    turns = (("user", "b"), ("assistant", "b"), ("user", "ask"))
    chat = Prompt(
        prompt_id=0, token_ids=np.array(tokenizer.encode("u:ask;a:")), text="a readable view", messages=turns
    )
    found = renderer.with_text(chat, "ed")
    assert found.messages == (*turns[:-1], ("user", "asked"))
    assert text(tokenizer, found.token_ids) == "u:b;a:b<eos>u:asked;a:"


def test_tokens_that_end_with_a_text_end_a_turn(tokenizer):
    assert ending_with(tokenizer, ("b", "!")) == tuple(sorted(tokenizer.encode("b!")))
    assert ending_with(tokenizer, ()) == ()
    ids = np.array([*tokenizer.encode("ab"), tokenizer.eos_token_id])
    assert written_text(tokenizer, ids, stopped=True) == "ab"


@pytest.mark.parametrize("observation", [{"a": 1}, [{"role": "user"}], [1.5], [[1]]])
def test_what_is_no_observation_is_refused(observation):
    with pytest.raises(EpisodeError):
        checked_step(SimpleNamespace(observation=observation, reward=0.0, done=False))


@pytest.mark.parametrize(
    ("reward", "done"), [(None, True), ("1", True), ({}, True), (1.0, "false"), (1.0, None)]
)
def test_what_is_no_reward_or_no_end_is_refused_and_not_taken_for_one(reward, done):
    """TRL 6427: a reward of None that counts as 0 stands above siblings that were given less."""
    with pytest.raises(EpisodeError, match=r"expected (a number as reward|True or False as done)"):
        checked_step(SimpleNamespace(observation="", reward=reward, done=done))
    step = checked_step(SimpleNamespace(observation="", reward=np.float32(0.5), done=np.bool_(True)))
    assert step.done is True and step.reward == 0.5


@pytest.mark.parametrize("first", [("an observation", {"info": 1}), ["a"], 1])
def test_what_a_reset_may_not_return_is_refused(first):
    """Gymnasium's returns a pair."""
    with pytest.raises(EpisodeError, match="expected reset to return None or a text, got"):
        checked_reset(first)
    assert checked_reset("a") == "a" and checked_reset(None) is None
