"""Prompts: sources, faults, and keys that are never reused."""

import json
import pickle
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from made_rollouts import rollout
from pytest import fixture, mark, raises

import rlhfspec.learning.data.prompt_tokens
import rlhfspec.learning.models.tokenization
from rlhfspec.core.config import DataConfig, SamplingConfig
from rlhfspec.core.errors import DataError, ModelError
from rlhfspec.core.records import Prompt, SamplingParams
from rlhfspec.learning.data.cursor import PromptCursor
from rlhfspec.learning.data.packed_prompts import PackedPrompts
from rlhfspec.learning.data.prompts import load_prompts, sampling_params
from rlhfspec.learning.models.tokenization import character_tokenizer, train_bpe
from rlhfspec.learning.tasks.chain_task import ALPHABET


@fixture(scope="module")
def tokenizer():
    return character_tokenizer(ALPHABET)


@fixture
def jsonl(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(
        "".join(json.dumps({"question": f"{i}+{i}", "answer": str(2 * i)}) + "\n" for i in range(5))
    )
    return path


def test_the_character_tokenizer_round_trips_through_a_folder(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    ids = loaded.encode("03:c+5=", add_special_tokens=False)
    assert len(ids) == 7
    assert loaded.decode([*ids, loaded.eos_token_id], skip_special_tokens=True) == "03:c+5="
    assert loaded.get_vocab() == tokenizer.get_vocab()


@mark.parametrize("key", [{"chat_template": "{{ messages }}"}, {"chat_template_kwargs": {"think": True}}])
def test_what_is_of_conversations_is_refused_where_no_prompt_is_one(tokenizer, jsonl, key):
    with raises(DataError, match=rf"data\.{next(iter(key))} is of conversations: no prompt is one"):
        load_prompts(DataConfig(path=str(jsonl), **key), tokenizer, seed=0)


def test_bpe_round_trips_any_text():
    bpe = train_bpe(["Tom has 12 apples.\n#### 12"] * 3, vocab_size=300)
    text = "Ana has 12 pears, ÿ\n#### 1234"
    assert bpe.decode(bpe.encode(text)) == text
    assert len(bpe.encode("1234")) == 4


@mark.parametrize("text", ["a" * 10**6, " " * 10**6, "ab" * 10**6])
def test_a_tokenizer_is_trained_on_a_million_letters_without_a_blank(text):
    """In the square of the run's length it would take an hour."""
    bpe = train_bpe([text, "Tom has 12 apples."], vocab_size=300)
    assert bpe.decode(bpe.encode("Tom has 12 apples.")) == "Tom has 12 apples."


def test_long_runs_change_no_other_text(monkeypatch):
    texts = ["Tom has 12 apples.\n" * 50, "x" * 1024, " " * 1024 + "y"]
    cut = train_bpe(texts, vocab_size=400).get_vocab()
    monkeypatch.setattr(rlhfspec.learning.models.tokenization, "_without_long_runs", lambda texts: texts)
    assert train_bpe(texts, vocab_size=400).get_vocab() == cut


def test_template_and_limit(jsonl, tokenizer):
    data = DataConfig(path=str(jsonl), prompt_template="{prompt}=", limit=2)
    dataset = load_prompts(data, tokenizer, seed=0)
    assert len(dataset) == 2
    assert tokenizer.decode(dataset.prompts[1].token_ids.tolist()) == "1+1="


def test_chat_uses_the_template(jsonl, tokenizer):
    chatty = character_tokenizer(ALPHABET)
    chatty.chat_template = "{% for m in messages %}:{{ m['content'] }};{% endfor %}#"
    dataset = load_prompts(DataConfig(path=str(jsonl), chat=True), chatty, seed=0)
    assert chatty.decode(dataset.prompts[1].token_ids.tolist()) == ":1+1;#"
    with raises(DataError, match="no chat template"):
        load_prompts(DataConfig(path=str(jsonl), chat=True), tokenizer, seed=0)


@mark.parametrize(
    ("text", "message"),
    [
        ('{"question": "a", "answer": "b"}\n{"question": \n', r"data\.jsonl:2 is not valid JSON"),
        ('{"question": "a", "answer": "b"}\n\n[1]\n', r"data\.jsonl:3 must be a JSON object"),
        ('{"question": "a"}\n', r"data\.jsonl:1 has no field 'answer'"),
        ('{"question": ["a"], "answer": "b"}\n', r"data\.jsonl:1: field 'question' must be text"),
        ("", "is empty"),
        ("\n\n", "is empty"),
        ('{"question": "1111111111", "answer": "b"}\n', r"data\.jsonl:1: the prompt has 10 tokens"),
        ('{"question": ' + "[" * 100_000, r"data\.jsonl:1 cannot be read: its brackets are nested too deep"),
        (
            '{"question": ' + "9" * 5000 + "}",
            r"data\.jsonl:1 cannot be read: an integer has more than 4300 digits",
        ),
        (
            '{"question": "a\\ud800", "answer": "b"}',
            r"data\.jsonl:1: field 'question'.*half of a surrogate pair",
        ),
        ('{"question": "a", "answer": NaN}', r"data\.jsonl:1: field 'answer' must be text, got float"),
        ('{"question": "a", "answer": "b"}\n\0', r"data\.jsonl:2 is not valid JSON"),
    ],
)
def test_faults_name_file_and_line(tmp_path, tokenizer, text, message):
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    with raises(DataError, match=message):
        load_prompts(DataConfig(path=str(path), max_prompt_tokens=8), tokenizer, seed=0)


def test_a_broken_parquet_file_is_named(tmp_path, tokenizer):
    (tmp_path / "x.parquet").write_text("not parquet")
    with raises(DataError, match="not a readable Parquet file"):
        load_prompts(DataConfig(path=str(tmp_path / "x.parquet")), tokenizer, seed=0)


def test_a_damaged_page_of_a_parquet_file_is_named(tmp_path, tokenizer):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"question": [f"{i}+{i}" for i in range(500)], "answer": ["b"] * 500}), path)
    raw = bytearray(path.read_bytes())
    raw[4:200] = bytes(255 - byte for byte in raw[4:200])
    path.write_bytes(raw)
    with raises(DataError, match=r"x\.parquet is not a readable Parquet file: after 0 rows"):
        load_prompts(DataConfig(path=str(path)), tokenizer, seed=0)


def test_columns_that_are_not_used_are_not_read(tmp_path, tokenizer):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"question": ["1+1"], "picture": [b"x" * 1000], "answer": ["2"]}), path)
    raw = bytearray(path.read_bytes())
    at = raw.index(b"x" * 20)
    raw[at - 40 : at] = bytes(40)
    path.write_bytes(raw)
    data = DataConfig(path=str(path), reference_field=None)
    assert [prompt.text for prompt in load_prompts(data, tokenizer, seed=0).prompts] == ["1+1"]
    with raises(
        DataError, match=r"no field 'zz' \(data\.prompt_field\); its fields are question, picture, answer"
    ):
        load_prompts(DataConfig(path=str(path), prompt_field="zz"), tokenizer, seed=0)


@mark.parametrize(
    ("name", "message"),
    [
        (
            "x.xlsx",
            r"expected a file of JSON lines \(.jsonl, .json\), .*or Parquet \(.parquet\), .*got .xlsx; convert it",
        ),
        ("x", "got no suffix; convert it"),
        ("none.txt", r"none\.txt does not exist; check data\.path"),
    ],
)
def test_a_file_of_another_format_gets_the_formats_that_are_read(tmp_path, tokenizer, name, message):
    for there in ("x.xlsx", "x"):
        (tmp_path / there).write_text("question,answer\n")
    with raises(DataError, match=message):
        load_prompts(DataConfig(path=str(tmp_path / name)), tokenizer, seed=0)


@mark.parametrize("name", [":", ":train", "no/such-data-set", "x" * 5000, "a\nb"])
def test_a_data_set_that_there_is_not_is_one_error(tokenizer, name):
    with raises(DataError, match=r"data\.path|cannot load the data set"):
        load_prompts(DataConfig(path=name), tokenizer, seed=0)


def test_a_prompt_beyond_all_tokens_is_refused_without_being_tokenised(tmp_path, tokenizer, monkeypatch):
    longest = max(len(token) for token in tokenizer.get_vocab())
    most = 8 * longest
    path = tmp_path / "d.jsonl"
    lengths = (8, most, most + 1, 10**7)
    path.write_text("".join(json.dumps({"question": "a" * n, "answer": ""}) + "\n" for n in lengths))
    encoded = []
    encode = rlhfspec.learning.data.prompt_tokens.encode_texts

    def counting(tokenizer, texts, *, special):
        encoded.extend(len(text) for text in texts)
        return encode(tokenizer, texts, special=special)

    monkeypatch.setattr(rlhfspec.learning.data.prompt_tokens, "encode_texts", counting)
    data = DataConfig(path=str(path), max_prompt_tokens=8, on_long_prompt="skip")
    dataset = load_prompts(data, tokenizer, seed=0)
    assert (len(dataset), dataset.left_out.too_long, encoded) == (1, 3, [8, most])
    path.write_text(json.dumps({"question": "a" * 10**7, "answer": ""}))
    with raises(
        DataError, match=rf"d\.jsonl:1: the prompt has 10,000,000 characters, .* \(at most {most} char"
    ):
        load_prompts(data.model_copy(update={"on_long_prompt": "fail"}), tokenizer, seed=0)


def test_long_prompts_can_be_skipped(tmp_path, tokenizer):
    path = tmp_path / "d.jsonl"
    path.write_text('{"question": "1111", "answer": ""}\n{"question": "1", "answer": ""}\n')
    data = DataConfig(path=str(path), max_prompt_tokens=3, on_long_prompt="skip")
    dataset = load_prompts(data, tokenizer, seed=0)
    assert ([p.prompt_id for p in dataset.prompts], dataset.left_out.too_long) == ([1], 1)
    with raises(DataError, match="no prompt left"):
        load_prompts(data.model_copy(update={"limit": 1}), tokenizer, seed=0)


def test_the_chain_task_depends_on_the_seed_alone(tokenizer):
    data = DataConfig(task="chain", limit=50)
    one, again, other = (load_prompts(data, tokenizer, seed=s) for s in (1, 1, 2))
    assert [p.text for p in one.prompts] == [p.text for p in again.prompts] != [p.text for p in other.prompts]


def make_cursor(tokenizer, seed=3):
    return PromptCursor(
        load_prompts(DataConfig(task="chain", limit=5), tokenizer, seed=0), run_seed=seed, shuffle=True
    )


def test_group_members_share_prompt_and_group_but_no_index(tokenizer):
    requests = make_cursor(tokenizer).next_requests(2, 3, SamplingParams())
    assert [r.key.sample_index for r in requests] == [0, 1, 2, 3, 4, 5]
    assert [r.group_id for r in requests] == [0, 0, 0, 1, 1, 1]
    assert len({r.prompt.prompt_id for r in requests[:3]}) == 1


def test_an_epoch_gives_each_prompt_once_and_epochs_differ(tokenizer):
    cursor = make_cursor(tokenizer)
    epochs = [[r.prompt.prompt_id for r in cursor.next_requests(5, 1, SamplingParams())] for _ in range(4)]
    assert all(sorted(epoch) == [0, 1, 2, 3, 4] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_a_restored_cursor_goes_on_as_if_nothing_had_happened(tokenizer):
    cursor = make_cursor(tokenizer)
    cursor.next_requests(7, 2, SamplingParams())
    state = json.loads(json.dumps(cursor.state()))
    expected = [(r.key, r.prompt.prompt_id, r.group_id) for r in cursor.next_requests(6, 2, SamplingParams())]
    fresh = make_cursor(tokenizer)
    fresh.restore(state)
    got = [(r.key, r.prompt.prompt_id, r.group_id) for r in fresh.next_requests(6, 2, SamplingParams())]
    assert got == expected
    with raises(DataError, match="run_seed"):
        make_cursor(tokenizer, seed=4).restore(state)


def test_prompts_that_are_solved_are_handed_out_no_more_after_a_resume_too(tokenizer):
    cursor = make_cursor(tokenizer)

    def see(rewards: dict[int, tuple[float, ...]], *, parts=None) -> None:
        """Groups in which a prompt's samples have these rewards."""
        scored = [
            rollout(2 * n, group=group, reward=one, parts=parts)
            for group, of in rewards.items()
            for n, one in enumerate(of)
        ]
        cursor.leave_out_solved(scored, 0.75)

    def drawn(cursor: PromptCursor) -> list[int]:
        return sorted(r.prompt.prompt_id for r in cursor.next_requests(cursor.num_left, 1, SamplingParams()))

    drawn(cursor)
    see({0: (1.0, 0.5), 1: (1.0, 0.0), 3: (1.0, 1.0)})
    see({2: (0.0, 0.0)}, parts={"correct": 1.0, "unshaped": 0.0})
    assert cursor.num_left == 2 and cursor.comes_again(1)
    state = json.loads(json.dumps(cursor.state()))
    assert [drawn(cursor) for _ in range(3)] == [[1, 4]] * 3
    see({3: (0.0, 1.0)})
    assert drawn(cursor) == [1, 3, 4], "seen again, by a batch that was on its way, it is not solved any more"
    again = make_cursor(tokenizer)
    again.restore(state)
    assert again.state() == state and [drawn(again) for _ in range(3)] == [[1, 4]] * 3
    with raises(DataError, match="expected numbers from 0"):
        again.restore({**state, "solved": "1,2"})
    assert cursor.all_solved is None
    see(dict.fromkeys(range(5), (1.0, 1.0)))
    with raises(
        DataError,
        match=r"all 5 prompts are solved \(data.easy_threshold\): nothing is left to sample; give",
    ):
        drawn(cursor)


def test_the_end_token_is_always_a_stop_token(tokenizer):
    params = sampling_params(SamplingConfig(stop_token_ids=(7,)), tokenizer)
    assert params.stop_token_ids == (7, tokenizer.eos_token_id)


@mark.parametrize(("given", "expected"), [(5, [5]), ([4, 5], [4, 5]), ([5, 10**6, -1], [5]), (None, [])])
def test_end_tokens_of_the_models_generation_config_stop_too(tokenizer, tmp_path, given, expected):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))
    params = sampling_params(SamplingConfig(stop_token_ids=(4,)), tokenizer, model=str(tmp_path))
    assert params.stop_token_ids == (4, tokenizer.eos_token_id, *[one for one in expected if one != 4])


def test_a_model_without_a_generation_config_has_the_tokenizers_end_token(tokenizer, tmp_path):
    assert sampling_params(SamplingConfig(), tokenizer, model=str(tmp_path)).stop_token_ids == (
        tokenizer.eos_token_id,
    )
    (tmp_path / "generation_config.json").write_text("{")
    with raises(ModelError, match=r"generation_config\.json, which names the end tokens"):
        sampling_params(SamplingConfig(), tokenizer, model=str(tmp_path))


def test_packed_prompts_are_the_prompts(tokenizer):
    prompts = [
        Prompt(
            prompt_id=n,
            token_ids=np.arange(n % 5),
            text="x" * n,
            messages=(("user", str(n)),),
            fields={"n": n},
        )
        for n in range(2500)
    ]
    packed = PackedPrompts(prompts)
    assert len(packed) == 2500 and packed.max_tokens == 4
    for number in (0, 1023, 1024, 2499, -1):
        one, other = packed[number], prompts[number]
        assert one.token_ids.tolist() == other.token_ids.tolist() and one.token_ids.dtype == np.int64
        assert (one.prompt_id, one.text, one.messages, one.fields) == (
            other.prompt_id, other.text, other.messages, other.fields,
        )  # fmt: skip
    assert [p.prompt_id for p in packed[1020:1030]] == list(range(1020, 1030))
    with raises(IndexError):
        packed[2500]
    assert PackedPrompts(packed).fingerprint == packed.fingerprint
    sent = pickle.loads(pickle.dumps(packed))
    assert sent.fingerprint == packed.fingerprint and len(sent) == 2500, (
        "a plan goes to a server with its prompts"
    )


@mark.parametrize(
    "change", [{"text": "b"}, {"reference": "b"}, {"token_ids": np.array([1, 2])}, {"fields": {"a": 1}}]
)
def test_the_fingerprint_tells_prompts_apart(change):
    one = Prompt(prompt_id=0, token_ids=np.array([1]), text="a", reference="a")
    two = replace(one, **change)
    assert PackedPrompts([one]).fingerprint != PackedPrompts([two]).fingerprint
    assert PackedPrompts([one, two]).fingerprint != PackedPrompts([two, one]).fingerprint
