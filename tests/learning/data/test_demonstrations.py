"""Which tokens are learned: what the assistant wrote and its end token, whatever format and template."""

import math
from datetime import UTC, datetime

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from word_chat import MARKED, PLAIN, word_chat

from rlhfspec.core.errors import DataError, ModelError
from rlhfspec.core.settings.supervised import DemonstrationsConfig
from rlhfspec.learning.data.chat.chat_masks import conversation_tokens
from rlhfspec.learning.data.record import Record
from rlhfspec.learning.data.supervised_rows import encode_demonstrations

TALK = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hi there"},
    {"role": "assistant", "content": "hi you"},
    {"role": "user", "content": "who are you"},
    {"role": "assistant", "content": "me"},
]


def shown(fields, *, template=PLAIN, **settings):
    """Each token, those that are learned in brackets."""
    tokenizer = word_chat(template)
    data = DemonstrationsConfig(path="x.jsonl", **settings)
    (example,), _ = encode_demonstrations([Record("x.jsonl:1", fields)], data, tokenizer)
    tokens = tokenizer.convert_ids_to_tokens(example.token_ids.tolist())
    marked = zip(tokens, example.is_learned, strict=True)
    return " ".join(f"[{token}]" if learned else token for token, learned in marked)


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["marked", "plain"])
def test_every_assistant_turn_is_learned_with_its_end_token_and_nothing_else(template):
    assert shown({"messages": TALK}, template=template) == (
        "<system> be kind <end> <user> hi there <end> <assistant> [hi] [you] [<end>] "
        "<user> who are you <end> <assistant> [me] [<end>]"
    )


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["marked", "plain"])
def test_of_prompt_and_completion_as_messages_only_the_completion_is_learned(template):
    assert shown({"prompt": TALK[1:4], "completion": TALK[4:]}, template=template) == (
        "<user> hi there <end> <assistant> hi you <end> <user> who are you <end> <assistant> [me] [<end>]"
    )


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["marked", "plain"])
def test_a_conversation_that_the_assistant_begins_is_learned_from_its_first_word_on(template):
    assert shown({"messages": TALK[2:]}, template=template) == (
        "<assistant> [hi] [you] [<end>] <user> who are you <end> <assistant> [me] [<end>]"
    )


def test_where_a_first_turn_of_the_assistant_cannot_be_told_it_is_the_turn_that_is_named():
    silent = PLAIN.partition("{% if add_generation_prompt")[0]
    with pytest.raises(
        DataError, match=r"x\.jsonl:1 begins with a message of the assistant.*of a system or user"
    ):
        shown({"messages": TALK[2:]}, template=silent)


FORGETFUL = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<assistant> {% if loop.last %}think {% endif %}"
    "{% generation %}{{ m.content }} <end>{% endgeneration %} {% else %}<user> {{ m.content }} <end> {% endif %}"
    "{% endfor %}"
)


def test_a_template_that_shortens_earlier_turns_still_learns_the_completion_alone():
    # the prompt by itself would be rendered a token longer than it is in the whole
    fields = {"prompt": TALK[1:4], "completion": TALK[4:]}
    learned = shown(fields, template=FORGETFUL).split("<assistant>")
    assert "[" not in learned[0] + learned[1] and learned[2].strip().endswith("[me] [<end>]")


THINKING = (  # as Qwen3's: thoughts stand before turns behind the last question alone
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<{{ m.role }}> {% if m.role == 'assistant' and "
    "loop.index0 > ns.last and (loop.last or m.reasoning_content) %}<think> {{ m.reasoning_content or '' }} </think> "
    "{% endif %}{{ m.content }} <end> {% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)


def test_a_template_that_takes_empty_thoughts_out_of_earlier_turns_is_learned_as_it_writes_the_whole():
    assert shown({"messages": TALK[1:]}, template=THINKING) == (
        "<user> hi there <end> <assistant> [hi] [you] [<end>] "
        "<user> who are you <end> <assistant> [<unk>] [<unk>] [me] [<end>]"
    )
    thought = [TALK[1], {**TALK[2], "reasoning_content": "be kind"}, *TALK[3:]]
    with pytest.raises(DataError, match="message 1 otherwise"):
        shown({"messages": [*thought[:3], {**TALK[4], "reasoning_content": "fine"}]}, template=THINKING)


OPENED = PLAIN.replace("<assistant>", "<assistant> <think> ")


def test_a_mark_that_the_prompt_ends_with_is_not_learned_again():
    answer = {"role": "assistant", "content": "<think> be </think> me"}
    with pytest.raises(
        DataError, match=r"x\.jsonl:1: what is asked.*ends with <think> and the answer begins with it again"
    ):
        shown({"messages": [*TALK[:2], answer]}, template=OPENED)
    with pytest.raises(DataError, match="<think>"):
        shown({"prompt": "who <think>", "completion": "<think> be </think> me"})
    assert shown({"messages": [*TALK[:2], {**answer, "content": "be </think> me"}]}, template=OPENED)


def test_marks_of_a_turn_that_is_asked_for_otherwise_are_told():
    opened = MARKED.replace("%}<assistant>{% endif", "%}<assistant> <think>{% endif")
    notes = {}
    data, row = DemonstrationsConfig(path="x"), Record("x:1", {"messages": TALK})
    for template in (MARKED, opened):
        assert not notes
        encode_demonstrations([row], data, word_chat(template), notes.setdefault)
    assert "ends" in (note := next(iter(notes))) and "<think>" in note and len(notes) == 1


def test_where_the_next_turn_s_mark_ends_a_turn_it_is_learned_behind_every_answer():
    open_turns = PLAIN.replace(" <end>", "")  # as GLM's
    assert shown({"messages": TALK}, template=open_turns) == (
        "<system> be kind <user> hi there <assistant> [hi] [you] [<user>] who are you <assistant> [me] [<user>]"
    )
    unlearned = [*TALK[:4], {**TALK[4], "weight": 0}]
    assert shown({"messages": unlearned}, template=open_turns).endswith("[<user>] who are you <assistant> me")


def test_a_last_turn_that_calls_a_tool_gets_no_end_of_a_turn_to_the_user():
    open_turns = PLAIN.replace(" <end>", "")
    call = {
        "role": "assistant",
        "content": "hi",
        "tool_calls": [{"function": {"name": "f", "arguments": {}}}],
    }
    with pytest.raises(
        DataError, match="tool_calls"
    ):  # this template leaves them out; what is learned is looked at
        shown({"messages": [*TALK[:2], call]}, template=open_turns)
    written = open_turns.replace("{{ m", "{% if m.tool_calls %}f {% endif %}{{ m", 1)
    assert not shown({"messages": [*TALK[:2], call]}, template=written).endswith("[<user>]")


def test_what_no_template_reads_may_be_of_any_type():
    told = [{**turn, "timestamp": datetime(2026, 1, 2, tzinfo=UTC), "score": math.nan} for turn in TALK]
    assert shown({"messages": told}) == shown({"messages": TALK})


def test_share_gpt_s_conversations_are_messages_too():
    talk = [{"from": "human", "value": "hi there"}, {"from": "gpt", "value": "hi you"}]
    assert shown({"conversations": talk}) == "<user> hi there <end> <assistant> [hi] [you] [<end>]"


def test_plain_prompt_and_completion_are_learned_from_the_completion_on_with_an_end_token():
    assert shown({"prompt": "who are you", "completion": "me"}) == "who are you [me] [<end>]"
    assert shown({"prompt": "who are you", "completion": "me <end>"}) == "who are you [me] [<end>]"


def test_a_whole_text_is_learned_with_an_end_token_behind():
    # the first token of all is predicted by nothing
    assert shown({"text": "who are you"}, text_field="text") == "who [are] [you] [<end>]"
    assert shown({"text": "who are you <end>"}, text_field="text", loss_on="all") == "who [are] [you] [<end>]"
    with pytest.raises(DataError, match=r"x\.jsonl:1 has no field 'words' \(data\.text_field\)"):
        shown({"text": "who"}, text_field="words")


FIRST_ALONE = "{{ messages[0].content }} <end>"


@pytest.mark.parametrize("template", [MARKED, PLAIN, FIRST_ALONE], ids=["marked", "plain", "first alone"])
def test_all_of_a_conversation_is_learned_as_the_template_writes_it(template):
    turns = [{"role": "user", "content": "hi"}] if template == FIRST_ALONE else TALK[1:3]
    learned = {FIRST_ALONE: "hi [<end>]"}.get(
        template, "<user> [hi] [there] [<end>] [<assistant>] [hi] [you] [<end>]"
    )
    assert shown({"messages": turns}, template=template, loss_on="all") == learned
    assert shown({"prompt": "hi", "completion": "me"}, loss_on="all") == "hi [me] [<end>]"


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["marked", "plain"])
def test_all_of_a_completion_is_learned_other_roles_and_their_headers_too(template):
    fields = {"prompt": TALK[1:2], "completion": TALK[2:]}
    asked = "<user> hi there <end> <assistant> [hi] [you] [<end>] "
    assert shown(fields, template=template, loss_on="completion") == (
        asked + "[<user>] [who] [are] [you] [<end>] [<assistant>] [me] [<end>]"
    )
    assert shown(fields, template=template) == (asked + "<user> who are you <end> <assistant> [me] [<end>]")
    assert shown({"prompt": "hi", "completion": "me"}, loss_on="completion") == "hi [me] [<end>]"


@pytest.mark.parametrize(
    ("fields", "loss_on", "said"),
    [
        ({"messages": TALK}, "completion", "the row has messages; expected `prompt` and `completion`"),
        ({"messages": [*TALK[:2], {**TALK[2], "weight": 0}]}, "all", "message 2 says that it is not learned"),
    ],
)
def test_what_a_loss_on_cannot_cover_is_named(fields, loss_on, said):
    with pytest.raises(DataError, match=said):
        shown(fields, loss_on=loss_on)


@pytest.mark.parametrize(
    ("more", "said"),
    [({"loss_on": "completion"}, "has no completion"), ({"chat": True}, r"take data\.chat out")],
)
def test_settings_beside_a_whole_text_that_mean_nothing_are_refused(more, said):
    with pytest.raises(ValueError, match=said):
        DemonstrationsConfig(path="x", text_field="text", **more)


def test_a_system_prompt_comes_first_where_a_conversation_has_none():
    assert shown({"messages": TALK[1:3]}, system_prompt="be kind") == (
        "<system> be kind <end> <user> hi there <end> <assistant> [hi] [you] [<end>]"
    )
    assert shown({"messages": TALK[:3]}, system_prompt="be good").startswith("<system> be kind <end> <user>")
    fields = {"prompt": TALK[1:4], "completion": TALK[4:]}
    assert shown(fields, system_prompt="be kind") == f"<system> be kind <end> {shown(fields)}"
    plain = {"prompt": "who", "completion": "me"}
    assert shown(plain, chat=True, system_prompt="be kind").startswith("<system> be kind <end> <user> who")
    with pytest.raises(DataError, match="system_prompt needs a conversation, got plain text"):
        shown(plain, system_prompt="be kind")


def test_a_row_weighs_what_its_field_says():
    data = DemonstrationsConfig(path="x", weight_field="score")
    fields = {"prompt": "who", "completion": "me"}
    rows = [Record(f"x:{i}", {**fields, "score": weight}) for i, weight in enumerate((0, 0.5, 2))]
    examples, _ = encode_demonstrations(rows, data, word_chat())
    assert [example.weight for example in examples] == [0.0, 0.5, 2.0]
    for wrong in (-1, "2", True, float("nan")):
        with pytest.raises(DataError, match=r"x:9: field 'score' must be a (finite )?number"):
            encode_demonstrations([Record("x:9", {**fields, "score": wrong})], data, word_chat())


def test_named_fields_and_a_plain_prompt_as_a_user_turn():
    fields = {"question": "who are you", "answer": "me"}
    names = {"prompt_field": "question", "reference_field": "answer"}
    assert shown(fields, **names) == "who are you [me] [<end>]"
    assert shown(fields, chat=True, prompt_template="hi {prompt}", **names) == (
        "<user> hi who are you <end> <assistant> [me] [<end>]"
    )


def test_a_prompt_of_several_columns():
    fields = {"who": "you", "verb": "are", "completion": "me"}
    assert shown(fields, prompt_template="who {verb} {who}") == "who are you [me] [<end>]"
    assert shown({**fields, "prompt": "hi"}, prompt_template="{prompt} {who} {else}").startswith("hi you")


def test_a_long_example_is_cut_left_out_or_refused():
    fields = {"prompt": "hi", "completion": "me me me me"}
    assert shown(fields, max_tokens=4) == "hi [me] [me] [me]"
    rows = [Record("x:1", fields), Record("x:2", {**fields, "completion": "me"})]

    def encode(on_long, limit=4):
        data = DemonstrationsConfig(path="x.jsonl", on_long=on_long, max_tokens=limit)
        return encode_demonstrations(rows, data, word_chat())

    (kept,), num_left_out = encode("skip")
    assert (kept.num_tokens, num_left_out) == (3, 1)
    notes = {}
    encode_demonstrations(rows, DemonstrationsConfig(path="x", max_tokens=4), word_chat(), notes.setdefault)
    assert "1 of 2 rows lost their end, 1 of them a learned one (data.max_tokens 4)" in next(iter(notes))
    with pytest.raises(DataError, match=r"x:1 has 6 tokens, data\.max_tokens is 4"):
        encode("fail")
    with pytest.raises(DataError, match="no example left of 2 rows"):
        encode("skip", 2)


def test_a_cut_that_leaves_nothing_to_learn_leaves_the_example_out():
    rows = [Record("x:1", {"prompt": "hi hi hi", "completion": "me"})]
    rows.append(Record("x:2", {"prompt": "hi", "completion": "me"}))
    kept, num_left_out = encode_demonstrations(
        rows, DemonstrationsConfig(path="x.jsonl", max_tokens=3), word_chat()
    )
    assert num_left_out == 1
    np.testing.assert_array_equal(kept[0].is_learned, [False, True, True])


REWRITING = "{% for m in messages %}{% if loop.last %}<user>{% endif %} {{ m.content }} <end>{% endfor %}"


@pytest.mark.parametrize(
    ("fields", "template", "kind", "said"),
    [
        ({"messages": "hi"}, PLAIN, DataError, r"field 'messages' must be a list of \{role, content\}"),
        (
            {"messages": [{"role": "user"}]},
            PLAIN,
            DataError,
            "'messages', message 0: its content must be text",
        ),
        ({"prompt": [], "completion": TALK[2:3]}, PLAIN, DataError, "x.jsonl:1: field 'prompt'.*an empty"),
        ({"messages": TALK[:2]}, PLAIN, DataError, "no message of role assistant"),
        ({"messages": TALK}, None, ModelError, "no chat template"),
        ({"messages": TALK}, REWRITING, DataError, "writes message 2 otherwise"),
        ({"messages": TALK}, "{{ raise_exception('no') }}", DataError, "the chat template refuses"),
        ({"question": "hi"}, PLAIN, DataError, "has no field 'prompt'"),
        ({"prompt": "hi"}, PLAIN, DataError, "has no field 'completion'"),
        ({"prompt": "hi", "completion": [3]}, PLAIN, DataError, "must be text, got list"),
    ],
)
def test_what_cannot_be_learned_from_is_named(fields, template, kind, said):
    with pytest.raises(kind, match=said):
        shown(fields, template=template)


def test_the_first_word_behind_a_blank_that_the_prompt_ends_with_is_learned():
    """The tokenizer makes one token of both: a one-word answer was not learned at all."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    words = ["user: hi there\n", "assistant: fine thanks\n"] * 9
    trained = trainers.BpeTrainer(
        special_tokens=["<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator(words, trained)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token if m.role == 'assistant' }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    turns = [{"role": "user", "content": "hi there"}, {"role": "assistant", "content": "fine"}]
    ids, mask = conversation_tokens(tokenizer, turns, origin="row 1")
    assert tokenizer.decode(ids[mask]) == " fine<eos>"
