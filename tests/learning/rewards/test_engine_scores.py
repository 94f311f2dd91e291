"""A reward model's scores by the engine's forward: those of transformers, for every text, or no forward at all."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from pytest import approx, mark
from tiny_reward_model import save_reward_model
from transformers import (
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)

from rlhfspec.learning.rewards.engine_scores import MAX_TOKENS, NUM_SLOTS, engine_scores

PAD = 0


@pytest.fixture(autouse=True)
def one_thread():
    pytest.importorskip("llvmlite", reason="the engine's own forward needs the extra `cpu`")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny(folder, **changes) -> PreTrainedModel:
    return AutoModelForSequenceClassification.from_pretrained(save_reward_model(folder, **changes)).eval()


def texts(lengths, size=20):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, size, (length,), generator=generator).tolist() for length in lengths]


def by_transformers(model: PreTrainedModel, ids: list[list[int]]) -> list[float]:
    with torch.inference_mode():
        return [float(model(input_ids=torch.tensor([text])).logits[0, 0]) for text in ids]


def test_scores_are_transformers_however_many_texts_share_forwards_and_slots(tmp_path):
    model = tiny(tmp_path, max_positions=2 * MAX_TOKENS)
    ours = engine_scores(model, max_tokens=None)
    assert ours is not None
    many = texts([1, 2, 70, MAX_TOKENS - 30, MAX_TOKENS + 200, *range(3, 3 + NUM_SLOTS)])
    found = ours.scores(many)
    assert found == approx(by_transformers(model, many), abs=1e-5)
    assert found[::-1] == ours.scores(many[::-1]), "whatever is scored beside it, to the bit"


def test_padding_inside_a_text_counts_and_behind_it_does_not(tmp_path):
    model = tiny(tmp_path)
    pad = model.config.pad_token_id
    padded = [[3, pad, 4], [3, 4, pad, pad], [pad, pad]]
    ours = engine_scores(model, max_tokens=16)
    assert ours is not None
    assert ours.scores(padded[:2]) == approx(by_transformers(model, padded[:2]), abs=1e-5)
    assert len(ours.scores(padded[2:])) == 1


def test_qwen_is_served_too():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_labels=1,
        pad_token_id=PAD,
        max_position_embeddings=64,
    )
    model = Qwen3ForSequenceClassification(config).eval()
    ours = engine_scores(model, max_tokens=None)
    assert ours is not None
    assert ours.scores(texts([5, 40])) == approx(by_transformers(model, texts([5, 40])), abs=1e-5)


def test_positions_for_which_the_system_has_no_addresses_leave_the_librarys_forward(tmp_path):
    model = tiny(tmp_path, max_positions=1 << 45)
    assert engine_scores(model, max_tokens=None) is None
    assert engine_scores(model, max_tokens=64) is not None


def test_another_family_keeps_the_librarys_forward():
    config = GPT2Config(vocab_size=40, n_embd=32, n_layer=1, n_head=2, num_labels=1, pad_token_id=PAD)
    assert engine_scores(GPT2ForSequenceClassification(config).eval(), max_tokens=None) is None


@mark.parametrize("why", ["bfloat16", "threads", "its own arithmetic"])
def test_what_the_engine_does_not_compute_alike_keeps_the_librarys_forward(tmp_path, why):
    model = tiny(tmp_path)
    if why == "bfloat16":
        model = model.to(torch.bfloat16)
    elif why == "threads":
        torch.set_num_threads(2)
    else:
        # as a model whose head sees more than the last state
        model.register_forward_hook(lambda _, inputs, out: setattr(out, "logits", out.logits + 1.0))
    assert engine_scores(model, max_tokens=None) is None


def test_scores_keep_their_bits_in_a_thread_whose_number_of_threads_is_another(tmp_path):
    """As an actor's threads: what one has set does not hold in the next."""
    ours = engine_scores(tiny(tmp_path), max_tokens=None)
    assert ours is not None
    asked = texts((40, 17, 5))
    expected, seen = ours.scores(asked), []
    inner = ours._forward

    def forward(*arguments):
        seen.append(torch.get_num_threads())
        return inner(*arguments)

    ours._forward = forward  # type: ignore[assignment]

    def score() -> tuple[list[float], int]:
        torch.set_num_threads(2)
        return ours.scores(asked), torch.get_num_threads()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(score).result() == (expected, 2)
    assert seen and set(seen) == {1}
