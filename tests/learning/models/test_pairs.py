"""Pairs on tiny budgets: they are cached, they load with plain transformers, faults are named."""

import json

import torch
from pytest import approx, mark, raises
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhfspec.core.errors import ConfigError, DataError, RlhfSpecError
from rlhfspec.learning.models.demo_pair import DemoPairMaker, DemoRecipe
from rlhfspec.learning.models.make import make_demo_pair, make_pair_from_text
from rlhfspec.learning.models.text_pair import TextRecipe
from rlhfspec.learning.training.objectives.padded_batches import distillation_loss

# ten steps teach next to nothing, so the accuracy asked for is next to nothing too
TINY = DemoRecipe(
    hidden_size=32,
    head_dim=16,
    num_layers=1,
    grown_layers=2,
    draft_hidden_size=16,
    min_accuracy=0.0,
    max_accuracy=1.0,
    min_steps=10,
    max_steps=10,
    steps_between_checks=10,
    num_check_prompts=4,
    draft_steps=2,
)
TINY_TEXT = TextRecipe(vocab_size=300, hidden_size=32, num_layers=1, grown_layers=2, draft_hidden_size=32)


def test_the_demo_pair_is_made_once_and_loads_with_plain_transformers(tmp_path):
    lines = []
    pair = make_demo_pair(
        tmp_path, seed=3, recipe=TINY, progress=lambda text, share: lines.append((text, share))
    )
    target = AutoModelForCausalLM.from_pretrained(pair.target)
    draft = AutoModelForCausalLM.from_pretrained(pair.draft)
    assert (target.config.num_hidden_layers, target.config.hidden_size) == (2, 64)
    assert target.config.num_key_value_heads < target.config.num_attention_heads
    assert (draft.config.num_hidden_layers, draft.config.vocab_size) == (1, target.config.vocab_size)
    vocabularies = [AutoTokenizer.from_pretrained(p).get_vocab() for p in (pair.target, pair.draft)]
    assert vocabularies[0] == vocabularies[1]
    assert lines[-1][1] == approx(1.0) and lines == sorted(lines, key=lambda line: line[1])
    changed = (pair.target / "model.safetensors").stat().st_mtime_ns
    assert make_demo_pair(tmp_path, seed=3, recipe=TINY) == pair
    assert (pair.target / "model.safetensors").stat().st_mtime_ns == changed
    assert [path.name for path in tmp_path.iterdir()] == [pair.target.parent.name]
    assert make_demo_pair(tmp_path, seed=4, recipe=TINY) != pair


def test_equal_seeds_make_equal_pairs(tmp_path):
    one, two = (make_demo_pair(tmp_path / name, recipe=TINY) for name in ("a", "b"))
    for left, right in ((one.target, two.target), (one.draft, two.draft)):
        assert (left / "model.safetensors").read_bytes() == (right / "model.safetensors").read_bytes()


def test_a_target_that_misses_its_accuracy_is_an_error(tmp_path):
    import dataclasses

    recipe = dataclasses.replace(TINY, min_accuracy=0.9, max_accuracy=1.0)
    with raises(RlhfSpecError, match=r"expected 0\.9 to 1\.0"):
        make_demo_pair(tmp_path, recipe=recipe)
    assert list(tmp_path.iterdir()) == []


def test_the_estimate_is_the_probability_of_the_solution():
    maker = DemoPairMaker(TINY, seed=0, progress=lambda text, share: None)
    narrow, _ = maker.make_target()
    with torch.no_grad():
        for parameter in narrow.parameters():
            parameter.zero_()
    # all logits equal: a response of n tokens has probability 34^-n (34 tokens in the vocabulary)
    assert len(maker.tokenizer) == 34
    expected = sum(34.0 ** -(9 * p.num_steps - 5 + 1) for p in maker.check_problems(4)) / 4
    assert maker.estimate_accuracy(narrow, 4) == approx(expected, rel=1e-3)


def test_distillation_loss_is_the_divergence_from_teacher_to_student():
    # teacher (1/2, 1/2), student (1/4, 3/4): 1/2 ln 2 + 1/2 ln(2/3)
    teacher = torch.tensor([[0.5, 0.5]]).log()
    student = torch.tensor([[0.25, 0.75]]).log()
    expected = 0.5 * torch.tensor(2.0).log() + 0.5 * torch.tensor(2 / 3).log()
    assert distillation_loss(student, teacher).item() == approx(expected.item())
    assert distillation_loss(teacher, teacher).item() == approx(0.0, abs=1e-7)


@mark.parametrize("kind", ["jsonl", "txt"])
def test_a_pair_from_text(tmp_path, kind):
    data = tmp_path / f"data.{kind}"
    rows = [{"question": f"What is {i} + {i}?", "answer": f"#### {2 * i}"} for i in range(40)]
    paragraphs = (f"The sum of {i} and {i} is {2 * i}." for i in range(40))
    data.write_text("\n".join(map(json.dumps, rows)) if kind == "jsonl" else "\n\n".join(paragraphs))
    pair = make_pair_from_text([data], tmp_path / "pair", budget_s=0.2, recipe=TINY_TEXT)
    target, tokenizer = (
        AutoModelForCausalLM.from_pretrained(pair.target),
        AutoTokenizer.from_pretrained(pair.draft),
    )
    text = "What is 12 + 12?\n#### 24"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert target.config.vocab_size == len(tokenizer) and tokenizer.eos_token_id == target.config.eos_token_id
    with raises(DataError, match="is not empty"):
        make_pair_from_text([data], tmp_path / "pair", budget_s=0.1, recipe=TINY_TEXT)


@mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"question": 1', r"a\.jsonl:1 is not valid JSON"),
        ("a.txt", " \n\n ", "is empty"),
        ("missing.txt", None, "does not exist"),
    ],
)
def test_bad_text_is_named(tmp_path, name, text, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    with raises(DataError, match=message):
        make_pair_from_text([tmp_path / name], tmp_path / "pair", recipe=TINY_TEXT)


@mark.parametrize("place", ["file/cache", "/proc/cache"])
def test_a_cache_that_cannot_be_written_is_found_before_anything_is_trained(place, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("rlhfspec.learning.models.make.DemoPairMaker", None)
    with raises(ConfigError, match=r"cannot be written.*set run\.cache_dir"):
        make_demo_pair(tmp_path / place)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
