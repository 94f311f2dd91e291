"""Conversations are kept whole: what messages hold beside role and content, and tools, reaches the template."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
from data_rows import as_seen as seen
from data_rows import load_rows
from pytest import fixture, mark, raises
from word_chat import word_chat

from rlhfspec.actors.reward_server.score_schema import ScoreBody, from_body, to_body
from rlhfspec.core.config import DataConfig
from rlhfspec.core.errors import DataError, ModelError
from rlhfspec.core.settings.supervised import DemonstrationsConfig, PreferencesConfig
from rlhfspec.learning.data.preferences import encode_preferences
from rlhfspec.learning.data.prompts import load_prompts
from rlhfspec.learning.data.record import Record
from rlhfspec.learning.data.supervised_rows import encode_demonstrations, read_raw_rows
from rlhfspec.learning.environments.observations import ObservationRenderer
from rlhfspec.learning.models.tokenization import train_bpe
from rlhfspec.learning.rewards.reward_model import ModelText
from rlhfspec.learning.rewards.score_request import ScoreRequest
from rlhfspec.learning.rewards.timed_function import _columns

TEMPLATE = (
    "{% for t in tools or [] %}T{{ t.function.name }};{% endfor %}"
    "{% for m in messages %}<{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}>"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}/"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}/{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "tide", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "tide", "arguments": {"port": "Ely"}}}
ASKED = {"role": "user", "content": "High?"}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TOLD = {"role": "tool", "name": "tide", "content": "at 9"}
TALK = [ASKED, CALLING, TOLD]
WHOLE = 'Ttide;<user>High?/<assistant>[tide {"port": "Ely"}]/<tool tide>at 9/<assistant>'


@fixture(scope="module")
def tokenizer():
    bpe = train_bpe(["Tide at port 9, High? tool user assistant"], vocab_size=300)
    bpe.chat_template = TEMPLATE
    return bpe


def load(tmp_path, tokenizer, *rows, **settings):
    return load_rows(tmp_path, tokenizer, [*rows], **settings)


def columns(turns):
    """As `datasets` gives a Sequence of objects."""
    names = dict.fromkeys(name for turn in turns for name in turn)
    return {name: [turn.get(name) for turn in turns] for name in names}


AS_TEXT = {"type": "function", "function": {"name": "tide", "arguments": '{"port": "Ely"}'}}


@mark.parametrize(
    "row",
    [
        {"messages": TALK, "tools": TOOLS},
        {"messages": [ASKED, {**CALLING, "content": None}, TOLD], "tools": TOOLS},
        {"messages": [ASKED, {"role": "assistant", "tool_calls": [CALL]}, TOLD], "tools": TOOLS},
        {"messages": [ASKED, {**CALLING, "tool_calls": [AS_TEXT]}, TOLD], "tools": json.dumps(TOOLS)},
        {"messages": columns(TALK), "tools": [json.dumps(one) for one in TOOLS]},
        {"messages": json.dumps(TALK), "tools": TOOLS},
        {"prompt": TALK, "tools": TOOLS},
    ],
    ids=["empty", "null", "absent", "arguments as text", "dict of lists", "JSON text", "prompt"],
)
def test_every_form_of_a_call_gives_the_template_the_same(tmp_path, tokenizer, row):
    dataset = load(tmp_path, tokenizer, row, reference_field=None)
    assert seen(dataset, tokenizer) == [WHOLE]
    (prompt,) = dataset.prompts
    assert prompt.conversation == tuple(TALK) and prompt.tools == tuple(TOOLS)
    assert prompt.messages == (("user", "High?"), ("assistant", ""), ("tool", "at 9"))


@mark.parametrize("given", ["null", '{"port": ', '["Ely"]', "Ely", 3, [1]])
def test_arguments_that_are_no_object_are_refused_by_row_and_path(tmp_path, tokenizer, given):
    call = {"type": "function", "function": {"name": "tide", "arguments": given}}
    with raises(
        DataError, match=r"d\.jsonl:1.*message 1, tool_calls\[0\]\.function\.arguments: expected an object"
    ):
        load(tmp_path, tokenizer, {"messages": [ASKED, {**CALLING, "tool_calls": [call]}, TOLD]})


def test_columns_of_parquet_give_no_message_the_keys_of_others(tmp_path, tokenizer):
    other = {"type": "function", "function": {"name": "moon", "arguments": {"day": 3}}}
    talks = [TALK, [ASKED, {**CALLING, "tool_calls": [other]}, TOLD]]
    rows = [{"messages": talk, "tools": TOOLS} for talk in talks]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    data = DataConfig(path=str(tmp_path / "d.parquet"), reference_field=None)
    found = load_prompts(data, tokenizer, seed=0)
    assert found.fingerprint == load(tmp_path, tokenizer, *rows, reference_field=None).fingerprint
    # a null that a line of JSON holds is its own
    call = {"type": "function", "function": {"name": "tide", "arguments": {"port": None}}}
    lines = load(tmp_path, tokenizer, {"messages": [ASKED, {**CALLING, "tool_calls": [call]}, TOLD]})
    assert '{"port": null}' in seen(lines, tokenizer)[0]
    learned, _ = read_raw_rows(DemonstrationsConfig(path=str(tmp_path / "d.parquet"), eval_share=0.0), seed=0)
    assert all(row.padded for row in learned)


@mark.parametrize("how", ["struct", "text"])
def test_columns_that_hold_conversations_in_another_form_are_read_and_never_sent_as_text(
    tmp_path, tokenizer, how
):
    talk = [ASKED, {"role": "assistant", "content": "At 9."}, {"role": "user", "content": "Low?"}]
    value = columns(talk) if how == "struct" else json.dumps(talk)
    pq.write_table(pa.table({"messages": [value]}), tmp_path / "d.parquet")
    data = {"path": str(tmp_path / "d.parquet"), "reference_field": None}
    wanted = ["<user>High?/<assistant>At 9./<user>Low?/<assistant>"]
    assert seen(load_prompts(DataConfig(**data), tokenizer, seed=0), tokenizer) == wanted
    named = DataConfig(**data, messages_field="messages")
    assert seen(load_prompts(named, tokenizer, seed=0), tokenizer) == wanted
    asked = DataConfig(**data, prompt_field="messages")
    if how == "struct":
        assert seen(load_prompts(asked, tokenizer, seed=0), tokenizer) == wanted
    else:
        with raises(DataError, match=r"conversation as JSON text.*data\.messages_field"):
            load_prompts(asked, tokenizer, seed=0)


@mark.parametrize(
    ("row", "said"),
    [
        ({"messages": TALK, "tools": TOOLS}, "does not write the tool_calls of message 1"),
        ({"messages": [ASKED], "tools": TOOLS}, "does not write the tools"),
        ({"messages": [ASKED], "tools": "tide"}, r"field 'tools' must be a list of tools.*data\.tools_field"),
        ({"messages": [ASKED], "tools": ["tide"]}, r"field 'tools' must be a list of tools"),
        ({"messages": [ASKED, {**CALLING, "tool_calls": "tide"}, TOLD]}, "tool_calls must be a list of obj"),
        (
            {"messages": [{**ASKED, "name": "\ud800"}]},
            "message 0: name must be text, got half of a surrogate",
        ),
    ],
)
def test_what_a_template_leaves_out_or_is_no_tool_is_refused_by_row(tmp_path, tokenizer, row, said):
    with raises(DataError, match=rf"d\.jsonl:1: .*{said}"):
        load(tmp_path, tokenizer, row, chat_template=FORGETFUL)


def test_tools_can_be_left_out_by_their_setting(tmp_path, tokenizer):
    row = {"messages": [ASKED], "tools": TOOLS}
    dataset = load(tmp_path, tokenizer, row, tools_field=None, chat_template=FORGETFUL)
    assert seen(dataset, tokenizer) == ["<user>High?/<assistant>"]


def test_prompts_that_differ_in_what_is_called_alone_are_two(tmp_path, tokenizer):
    other = {**CALLING, "tool_calls": [{**CALL, "function": {"name": "moon", "arguments": {}}}]}
    rows = [{"messages": talk} for talk in (TALK, [ASKED, other, TOLD], TALK)]
    dataset = load(tmp_path, tokenizer, *rows, deduplicate="exact")
    assert len(dataset) == 2 and len(set(seen(dataset, tokenizer))) == 2


def named_templates():
    tokenizer = train_bpe(["Tide at port 9, High? tool user assistant"], vocab_size=300)
    tokenizer.chat_template = {"tool_use": TEMPLATE, "rag": "RAG" + FORGETFUL, "default": FORGETFUL}
    return tokenizer


def test_of_several_templates_one_is_chosen_by_name_and_tools_have_their_own(tmp_path):
    tokenizer = named_templates()
    row = {"messages": [ASKED]}
    assert seen(load(tmp_path, tokenizer, row), tokenizer) == ["<user>High?/<assistant>"]
    assert seen(load(tmp_path, tokenizer, row, chat_template="rag"), tokenizer) == [
        "RAG<user>High?/<assistant>"
    ]
    with_tools = load(tmp_path, tokenizer, {"messages": TALK, "tools": TOOLS})
    assert seen(with_tools, tokenizer) == [WHOLE]
    with raises(DataError, match=r"no file rug; the tokenizer has default, rag, tool_use"):
        load(tmp_path, tokenizer, row, chat_template="rug")
    tokenizer.chat_template = {"rag": FORGETFUL}
    with raises(DataError, match=r"none of the tokenizer's chat templates \(rag\) is the default"):
        load(tmp_path, tokenizer, row)


def test_rewards_environments_and_servers_get_conversations_whole(tmp_path, tokenizer):
    (prompt,) = load(tmp_path, tokenizer, {"messages": TALK, "tools": TOOLS}, reference_field=None).prompts
    request = ScoreRequest(prompt=prompt, response="At 9.")
    scored = tokenizer.decode(ModelText(tokenizer, None).token_ids(request))
    assert scored == WHOLE + "At 9./"
    [served] = from_body(ScoreBody.model_validate_json(to_body([request]).model_dump_json()))
    assert ModelText(tokenizer, None).token_ids(served) == ModelText(tokenizer, None).token_ids(request)
    assert _columns(request)["messages"] == TALK
    longer = ObservationRenderer(tokenizer, max_tokens=9).with_text(prompt, "!")
    assert tokenizer.decode(longer.token_ids.tolist()) == WHOLE.replace("at 9", "at 9!")


def learned_of(tokenizer, fields, **settings):
    data = DemonstrationsConfig(path="x.jsonl", **settings)
    (example,), _ = encode_demonstrations([Record("x:1", fields)], data, tokenizer)
    return tokenizer.decode(example.token_ids[example.is_learned].tolist())


ANSWER = {"role": "assistant", "content": "9", "reasoning_content": "at port"}


@mark.parametrize("form", [list, columns, json.dumps], ids=["list", "dict of lists", "JSON text"])
def test_demonstrations_learn_calls_and_reasoning(tokenizer, form):
    fields = {"messages": form([*TALK, ANSWER]), "tools": TOOLS}
    assert learned_of(tokenizer, fields) == '[tide {"port": "Ely"}]/(at port)9/'
    fields = {"prompt": form(TALK), "completion": form([ANSWER]), "tools": TOOLS}
    assert learned_of(tokenizer, fields) == "(at port)9/"


@mark.parametrize(
    ("fields", "said"),
    [
        ({"messages": [*TALK, {"role": "assistant", "content": "9"}]}, "the tool_calls of message 1"),
        ({"messages": [ASKED, ANSWER]}, "the assistant's reasoning"),
        ({"messages": [ASKED, {"role": "assistant", "content": "9"}], "tools": TOOLS}, "the tools"),
    ],
)
def test_what_is_learned_must_be_written(tokenizer, fields, said):
    forgetful = named_templates()
    forgetful.chat_template = FORGETFUL
    with raises(DataError, match=f"x:1: the chat template does not write {said}.*model.chat_template"):
        learned_of(forgetful, fields)
    talk = fields["messages"]
    pair = {"chosen": talk, "rejected": [*talk[:-1], {"role": "assistant", "content": "8"}]}
    if "tools" in fields:
        pair["tools"] = TOOLS
    with raises(DataError, match=f"x:1: the chat template does not write {said}"):
        encode_preferences([Record("x:1", pair)], PreferencesConfig(path="x.jsonl"), forgetful)


def test_preferences_compare_whole_turns(tokenizer):
    worse = {**CALLING, "tool_calls": [{**CALL, "function": {"name": "moon", "arguments": {}}}]}
    for form in (list, columns, json.dumps):
        fields = {"chosen": form([ASKED, CALLING]), "rejected": form([ASKED, worse]), "tools": TOOLS}
        rows = [Record("x:1", fields)]
        (pair,), _ = encode_preferences(rows, PreferencesConfig(path="x.jsonl"), tokenizer)
        assert tokenizer.decode(pair.chosen_ids.tolist()) == (
            'Ttide;<user>High?/<assistant>[tide {"port": "Ely"}]/'
        )
        assert tokenizer.decode(pair.rejected_ids.tolist()) == "Ttide;<user>High?/<assistant>[moon {}]/"


def test_supervised_rows_name_templates_without_a_default():
    tokenizer = word_chat()
    tokenizer.chat_template = {"rag": tokenizer.chat_template}
    with raises(ModelError, match=r"none of the tokenizer's chat templates \(rag\) is the default"):
        learned_of(tokenizer, {"messages": [ASKED, {"role": "assistant", "content": "me"}]})


JOINING = TEMPLATE.replace(
    "c.function.name }} {{ c.function.arguments | tojson", "c.function.name + ' ' + c.function.arguments"
)
PRINTING = TEMPLATE.replace("c.function.arguments | tojson", "c.function.arguments")


@mark.parametrize("template", [JOINING, PRINTING], ids=["joins text to them", "prints them"])
@mark.parametrize("arguments", [{"port": "Ely"}, '{"port": "Ely"}'], ids=["object", "JSON text"])
def test_a_template_for_arguments_as_text_gets_text_and_never_pythons_form(
    tmp_path, tokenizer, template, arguments
):
    call = {**CALL, "function": {"name": "tide", "arguments": arguments}}
    row = {"messages": [ASKED, {**CALLING, "tool_calls": [call]}, TOLD], "tools": TOOLS}
    assert seen(load(tmp_path, tokenizer, row, chat_template=template), tokenizer) == [WHOLE]


@mark.parametrize("tools", ["[]", "null", "", [], None])
def test_no_tools_may_be_said_in_any_way(tmp_path, tokenizer, tools):
    row = {"messages": [ASKED], "tools": tools}
    assert seen(load(tmp_path, tokenizer, row), tokenizer) == ["<user>High?/<assistant>"]


PARTS_ALONE = (
    "{% for m in messages %}<{{ m.role }}>{% for c in m.content %}{{ c.text }}{% endfor %}/{% endfor %}"
)
NO_SYSTEM = FORGETFUL.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
NO_TOOL = FORGETFUL.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}")
TRIMMING = FORGETFUL.replace("{{ m.content }}", "{{ m.content | trim | upper }}")


@mark.parametrize(
    ("template", "turns", "role"),
    [
        (PARTS_ALONE, [ASKED], "user"),
        (NO_SYSTEM, [{"role": "system", "content": "be brief"}, ASKED], "system"),
        (NO_TOOL, [ASKED, {"role": "assistant", "content": "wait"}, TOLD], "tool"),
    ],
)
def test_a_template_that_leaves_out_what_somebody_says_is_refused(tmp_path, tokenizer, template, turns, role):
    with raises(DataError, match=f"the chat template does not write what the {role} says"):
        load(tmp_path, tokenizer, {"messages": turns}, chat_template=template)


def test_a_system_prompt_that_the_template_leaves_out_is_refused(tmp_path, tokenizer):
    with raises(DataError, match="does not write what the system says"):
        load(tmp_path, tokenizer, {"messages": [ASKED]}, chat_template=NO_SYSTEM, system_prompt="be brief")


def test_a_template_may_write_what_is_said_in_another_form(tmp_path, tokenizer):
    dataset = load(
        tmp_path, tokenizer, {"messages": [{"role": "user", "content": " High? "}]}, chat_template=TRIMMING
    )
    assert dataset.prompts[0].token_ids.tolist() == tokenizer.encode(
        "<user>HIGH?/<assistant>", add_special_tokens=False
    )
