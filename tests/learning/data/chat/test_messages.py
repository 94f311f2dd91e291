"""Conversations: their forms, where they end, what the chat template makes of them, what is wrong with them."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
from data_rows import as_seen as seen
from data_rows import load_rows as load
from pytest import fixture, mark, raises

from rlhfspec.core.config import DataConfig
from rlhfspec.core.errors import DataError
from rlhfspec.learning.data.chat.messages import asked_and_answered, readable
from rlhfspec.learning.data.prompts import load_prompts
from rlhfspec.learning.models.tokenization import train_bpe

TEMPLATE = (
    "{% if think %}<think>{% endif %}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
STRICT = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + TEMPLATE
)


def turns(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


HISTORY = turns(("user", "Hi"), ("assistant", "Hello"), ("user", "1+1?"), ("assistant", "2"))


@fixture(scope="module")
def tokenizer():
    bpe = train_bpe(["Tom has 12 apples.", "system user assistant"], vocab_size=300)
    bpe.chat_template = TEMPLATE
    return bpe


@mark.parametrize(
    "row",
    [
        {"messages": HISTORY},
        {"prompt": HISTORY[:-1], "answer": "2"},
        {"prompt": HISTORY[:-1], "question_id": 7, "answer": "2"},
        {"conversation": [{"content": turn["content"], "role": turn["role"]} for turn in HISTORY]},
        {
            "conversations": [
                {"from": {"user": "human", "assistant": "gpt"}[turn["role"]], "value": turn["content"]}
                for turn in HISTORY
            ]
        },
        {
            "messages": [
                {"role": t["role"], "content": [{"type": "text", "text": t["content"]}]} for t in HISTORY
            ]
        },
    ],
    ids=["TRL", "TRL prompt", "verl", "LMSYS", "ShareGPT", "parts"],
)
def test_every_form_ends_with_the_user_and_goes_through_the_template(tmp_path, tokenizer, row):
    dataset = load(tmp_path, tokenizer, [row])
    (prompt,) = dataset.prompts
    assert seen(dataset, tokenizer) == ["<user>Hi\n<assistant>Hello\n<user>1+1?\n<assistant>"]
    assert prompt.messages == (("user", "Hi"), ("assistant", "Hello"), ("user", "1+1?"))
    assert (prompt.text, prompt.reference) == ("user: Hi\n\nassistant: Hello\n\nuser: 1+1?", "2")


def test_token_ids_are_those_of_the_tokenizers_own_template(tmp_path, tokenizer):
    (prompt,) = load(tmp_path, tokenizer, [{"messages": HISTORY}]).prompts
    own = tokenizer.apply_chat_template(HISTORY[:-1], add_generation_prompt=True, return_dict=True)
    assert prompt.token_ids.tolist() == own["input_ids"]


def test_parquet_gives_the_same_conversations(tmp_path, tokenizer):
    rows = [{"prompt": HISTORY[:-1], "reward_model": {"ground_truth": "2", "style": "rule"}}] * 3
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    data = DataConfig(path=str(tmp_path / "d.parquet"), reference_field="reward_model.ground_truth")
    dataset = load_prompts(data, tokenizer, seed=0)
    jsonl = load(tmp_path, tokenizer, rows, reference_field="reward_model.ground_truth")
    assert dataset.fingerprint == jsonl.fingerprint
    assert dataset.prompts[2].reference == "2"


def test_plain_text_has_no_messages_and_chat_has_one_turn(tmp_path, tokenizer):
    rows = [{"question": "1+1?", "answer": "2"}]
    (plain,) = load(tmp_path, tokenizer, rows).prompts
    (chat,) = load(tmp_path, tokenizer, rows, chat=True, prompt_template="Q: {prompt}").prompts
    assert plain.messages == () and plain.token_ids.tolist() == tokenizer.encode("1+1?")
    assert chat.messages == (("user", "Q: 1+1?"),) and chat.text == "1+1?"


def test_settings_reach_the_template(tmp_path, tokenizer):
    file = tmp_path / "t.jinja"
    file.write_text("{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    rows = [{"messages": turns(("user", "Hi"))}, {"messages": turns(("system", "Own"), ("user", "Hi"))}]
    one = load(tmp_path, tokenizer, rows, system_prompt="Be short", chat_template_kwargs={"think": True})
    assert seen(one, tokenizer) == [
        "<think><system>Be short\n<user>Hi\n<assistant>",
        "<think><system>Own\n<user>Hi\n<assistant>",
    ]
    assert one.prompts[0].messages[0] == ("system", "Be short")
    assert one.prompts[0].text == "Hi"
    for template in (str(file), file.read_text()):
        two = load(tmp_path, tokenizer, rows, chat_template=template, prompt_template="{prompt}!")
        assert seen(two, tokenizer) == ["[Hi!]", "[Own][Hi!]"]


@mark.parametrize(
    ("messages", "message"),
    [
        ([], "nothing to answer: expected a last turn of a user"),
        ("text", r"must be a list of \{role, content\}, got str"),
        (["a"], "message 0 must be an object with role and content, got str"),
        (turns(("assistant", "a")), "nothing to answer"),
        (turns(("system", "a"), ("assistant", "b")), "got a system turn"),
        (turns(("user", "a"), ("wizard", "b")), "message 1 has an unknown role.*got 'wizard'"),
        ([{"content": "a"}], "unknown role.*got NoneType"),
        ([{"role": 3, "content": "a"}], "unknown role.*got int"),
        (turns(("user", 3)), "its content must be text, got int"),
        ([{"role": "user"}], "its content must be text, got NoneType"),
        (turns(("user", "  ")), "the last turn is empty"),
        (turns(("user", "a\ud800")), "message 0: its content must be text, got half of a surrogate pair"),
        (
            [{"role": "user", "content": [{"type": "image", "url": "x"}]}],
            "a part has .type.: .*got .image.; images",
        ),
        ([{"role": "user", "content": []}], "must hold text"),
        (
            [{"role": "assistant", "content": None, "tool_calls": [1]}],
            "its tool_calls must be a list of objects, got .1.",
        ),
    ],
)
def test_faults_name_the_row_and_the_message(tmp_path, tokenizer, messages, message):
    good = {"messages": turns(("user", "Hi"))}
    with raises(DataError, match=rf"d\.jsonl:2: field 'messages'.*{message}"):
        load(tmp_path, tokenizer, [good, {"messages": messages}])


def test_formats_are_not_mixed_in_a_source(tmp_path, tokenizer):
    good = {"prompt": turns(("user", "Hi")), "answer": ""}
    with raises(DataError, match=r"d\.jsonl:2: field 'prompt' must be a list"):
        load(tmp_path, tokenizer, [good, {"prompt": "Hi", "answer": ""}])
    with raises(DataError, match=r"d\.jsonl:2: field 'prompt' must be text, got list"):
        load(tmp_path, tokenizer, [{"prompt": "Hi", "answer": ""}, good], prompt_field="prompt")
    with raises(
        DataError, match=r"d\.jsonl:1 has no field 'question' \(data\.prompt_field\); its fields are prompt"
    ):
        load(tmp_path, tokenizer, [{"prompt": "Hi", "answer": ""}])
    with raises(DataError, match=r"d\.jsonl:1 has no field 'turns' \(data\.messages_field\)"):
        load(tmp_path, tokenizer, [good], messages_field="turns")


def test_a_template_that_refuses_names_the_row_and_the_way_out(tmp_path, tokenizer):
    rows = [{"messages": turns(("user", "Hi"))}, {"messages": turns(("system", "a"), ("user", "Hi"))}]
    with raises(DataError, match=r"d\.jsonl:2: the chat template refuses.*System role not.*by data\.filter"):
        load(tmp_path, tokenizer, rows, chat_template=STRICT)
    with raises(DataError, match=r"d\.jsonl:1: .*System role not supported; .*take out data\.system_prompt"):
        load(tmp_path, tokenizer, rows, chat_template=STRICT, system_prompt="x")


@mark.parametrize(
    ("template", "message"),
    [
        ("{% for", "d.jsonl:1: the chat template refuses.*TemplateSyntaxError"),
        ("{{ messages.wrong.deeper }}", "UndefinedError"),
        ("no-such.jinja", "there is no file no-such.jinja"),
    ],
)
def test_templates_that_are_none(tmp_path, tokenizer, template, message):
    with raises(DataError, match=message):
        load(tmp_path, tokenizer, [{"messages": HISTORY}], chat_template=template)


def test_a_conversation_needs_a_template_and_a_system_prompt_a_conversation(tmp_path, tokenizer):
    bare = train_bpe(["Tom has 12 apples."], vocab_size=300)
    with raises(DataError, match=r"d\.jsonl:1 is a conversation but the tokenizer has no chat template"):
        load(tmp_path, bare, [{"messages": HISTORY}])
    with raises(DataError, match=r"d\.jsonl:1: data\.system_prompt needs a conversation"):
        load(tmp_path, tokenizer, [{"question": "a", "answer": ""}], system_prompt="x")


def test_further_columns_reach_reward_functions(tmp_path, tokenizer):
    rows = [{"question": "a", "answer": "b", "tests": ["x == 1"], "extra": {"level": 3}}]
    (prompt,) = load(tmp_path, tokenizer, rows, reward_fields=("tests", "extra.level")).prompts
    assert prompt.fields == {"tests": ["x == 1"], "extra.level": 3}
    with raises(DataError, match=r"has no field 'zz' \(data\.reward_fields\)"):
        load(tmp_path, tokenizer, rows, reward_fields=("zz",))


def test_text_of_a_conversation_is_the_users_words_where_he_speaks_alone():
    assert readable((("system", "s"), ("user", "u"))) == "u"
    assert readable((("user", "a"), ("tool", "b"))) == "user: a\n\ntool: b"
    asked, answer = asked_and_answered(turns(("user", "u"), ("assistant", "a"), ("assistant", "b")), "x")
    assert (asked, answer) == (tuple(turns(("user", "u"))), "a")


def test_a_template_in_json_is_the_template_within(tmp_path, tokenizer):
    (tmp_path / "d.jsonl").write_text('{"question": "2+2?", "answer": "4"}\n')
    path = tmp_path / "chat_template.json"
    data = DataConfig(path=str(tmp_path / "d.jsonl"), chat=True, chat_template=str(path))
    path.write_text(json.dumps({"chat_template": tokenizer.chat_template}))
    own = load_prompts(DataConfig(path=data.path, chat=True), tokenizer, seed=0)
    assert load_prompts(data, tokenizer, seed=0).fingerprint == own.fingerprint
    path.write_text(json.dumps({"chat_template": {"default": "{{ messages }}"}}))
    with raises(DataError, match="JSON whose chat_template is one template's text"):
        load_prompts(data, tokenizer, seed=0)


@mark.parametrize("question", ["", " \n", "\u200b\ufeff", "\t\u00a0\x00"])
def test_a_question_of_which_nothing_is_seen_is_refused_whatever_stands_around_it(
    tmp_path, tokenizer, question
):
    (tmp_path / "d.jsonl").write_text(json.dumps({"question": question, "answer": "4"}) + "\n")
    path = str(tmp_path / "d.jsonl")
    for data in (DataConfig(path=path, chat=True), DataConfig(path=path, prompt_template="Q: {prompt}")):
        with raises(DataError, match="field 'question' is empty"):
            load_prompts(data, tokenizer, seed=0)
