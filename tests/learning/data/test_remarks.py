"""What is taken as it is and may not be meant so is told: unread columns, control tokens in texts, a missing head."""

from data_rows import write_rows as write
from pytest import fixture, mark, raises

from rlhfspec.core.config import DataConfig
from rlhfspec.core.errors import DataError
from rlhfspec.learning.data.prompts import load_prompts
from rlhfspec.learning.models.tokenization import train_bpe

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}/{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
HEADLESS = TEMPLATE.partition("{% if")[0]
BRACKETS = (
    "{% for m in messages %}{% if m.role == 'user' %}[I]{{ m.content }}[/I]{% else %} {{ m.content }}/{% endif %}"
    "{% endfor %}"
)
ALPACA = {"instruction": "Translate.", "input": "The tree", "output": "Der Baum"}
ALPACA_FIELDS = {"prompt_field": "instruction", "reference_field": "output"}


@fixture(scope="module")
def tokenizer():
    bpe = train_bpe(["Translate. The tree user assistant"], vocab_size=300)
    bpe.add_special_tokens({"additional_special_tokens": ["<|mark|>"]})
    bpe.chat_template = TEMPLATE
    return bpe


@mark.parametrize("name", ["d.jsonl", "d.json", "d.parquet"])
def test_columns_that_nothing_reads_are_told(tmp_path, tokenizer, name):
    path = write(tmp_path / name, [ALPACA])
    (note,) = load_prompts(DataConfig(path=path, **ALPACA_FIELDS), tokenizer, seed=0).notes()
    assert "has 'input', which nothing here reads (used are instruction, output); " in note
    read = DataConfig(path=path, reward_fields=("input",), **ALPACA_FIELDS)
    assert load_prompts(read, tokenizer, seed=0).notes() == []


@mark.parametrize("name", ["d.jsonl", "d.parquet"])
def test_columns_in_the_template_are_filled_in_and_other_braces_stay(tmp_path, tokenizer, name):
    path = write(tmp_path / name, [ALPACA])

    def shown(template: str, **names: str) -> str:
        data = DataConfig(path=path, prompt_template=template, reference_field="output", **names)
        loaded = load_prompts(data, tokenizer, seed=0)
        assert not loaded.notes() or "input" not in template
        return tokenizer.decode(loaded.prompts[0].token_ids)

    assert shown("{input} {prompt}", prompt_field="instruction") == f"{ALPACA['input']} Translate."
    assert shown("{instruction} {input}") == f"Translate. {ALPACA['input']}"
    assert shown(r"\boxed{x} {prompt}", prompt_field="instruction") == r"\boxed{x} Translate."
    with raises(DataError, match=r"fills nothing of rows of .*instruction.* in"):
        shown("{instructions}", prompt_field="instruction")


def test_what_a_column_holds_is_not_filled_in_again(tmp_path, tokenizer):
    path = write(tmp_path / "d.jsonl", [{"question": "{input}", "input": "{prompt}", "answer": ""}])
    data = DataConfig(path=path, prompt_template="{input} {prompt}")
    (prompt,) = load_prompts(data, tokenizer, seed=0).prompts
    assert tokenizer.decode(prompt.token_ids) == "{prompt} {input}"


def test_a_row_without_a_column_of_the_template_is_named(tmp_path, tokenizer):
    path = write(
        tmp_path / "d.jsonl", [{"question": "a", "input": "b", "answer": ""}, {"question": "c", "answer": ""}]
    )
    with raises(DataError, match=r"d\.jsonl:2 has no field 'input' \(data\.prompt_template\)"):
        load_prompts(DataConfig(path=path, prompt_template="{input} {prompt}"), tokenizer, seed=0)


def test_a_conversation_needs_the_prompt_in_its_template(tmp_path, tokenizer):
    rows = [{"messages": [{"role": "user", "content": "a"}], "topic": "b", "answer": ""}]
    path = write(tmp_path / "d.jsonl", rows)
    with raises(DataError, match=r"fills nothing of conversations in; expected \{prompt\}; put it in"):
        load_prompts(
            DataConfig(path=path, messages_field="messages", prompt_template="{topic}"), tokenizer, seed=0
        )


def test_control_tokens_in_what_a_user_says_are_told_with_the_first_row(tmp_path, tokenizer):
    rows = [{"question": text, "answer": ""} for text in ("The tree", "tree<|mark|>", "<|mark|> user")]
    path = write(tmp_path / "d.jsonl", rows)
    (note,) = load_prompts(DataConfig(path=path, chat=True), tokenizer, seed=0).notes()
    assert note.startswith(
        "2 rows hold text that the tokenizer reads as a token of its own, the first <|mark|> in "
    )
    assert f"{path}:2;" in note
    assert load_prompts(DataConfig(path=path), tokenizer, seed=0).notes() == [], (
        "plain text may be rendered already"
    )


@mark.parametrize(("template", "head"), [(HEADLESS, "'<assistant>'"), (TEMPLATE, None), (BRACKETS, None)])
def test_a_template_that_leaves_the_assistants_head_to_the_response_is_told(
    tmp_path, tokenizer, template, head
):
    path = write(tmp_path / "d.jsonl", [{"question": "The tree", "answer": ""}])
    notes = load_prompts(DataConfig(path=path, chat=True, chat_template=template), tokenizer, seed=0).notes()
    told = [f"the chat template does not begin the assistant's turn: {head}, "] if head else []
    assert [note[: len(start)] for note, start in zip(notes, told, strict=True)] == told
