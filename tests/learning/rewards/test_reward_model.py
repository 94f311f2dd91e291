"""A reward model scores prompt and response as its template writes them, and does not care who else is in the batch."""

import numpy as np
import torch
from pytest import approx, mark, raises
from tiny_reward_model import save_reward_model
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaForSequenceClassification,
)

from rlhfspec.core.config import RewardConfig
from rlhfspec.core.errors import ModelError, RewardError
from rlhfspec.core.records import Prompt, Reward, Unscored
from rlhfspec.learning.rewards.reward_function import build_reward
from rlhfspec.learning.rewards.reward_model import ModelText, _batches
from rlhfspec.learning.rewards.score_request import score_requests

TEXTS = ["h;", "h;02:h+5=m;", "#b", "h;02:h+5=m;01:m+5=b;#b" * 3, "", "a", "b"]
ROUNDING = 128 * 2.0**-24
"Of float32 sums in another order: the longest, over a text's positions, has up to 73 terms of about 1."
CHAT = (("user", "03:c+5="), ("assistant", "h;"), ("user", "02:h+5="))


def prompts(count: int, messages: tuple[tuple[str, str], ...] = ()) -> list[Prompt]:
    return [
        Prompt(prompt_id=i, token_ids=np.array([1]), text="03:c+5=", messages=messages) for i in range(count)
    ]


def plain_score(path: str, ids: list[int]) -> float:
    """By transformers alone, without padding."""
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.inference_mode():
        return float(model(input_ids=torch.tensor([ids])).logits[0, 0])


@mark.parametrize("pad", [True, False])
def test_scores_are_those_of_each_text_alone_in_order_whatever_the_batch(tmp_path, pad):
    path = save_reward_model(tmp_path, pad=pad)
    tokenizer = AutoTokenizer.from_pretrained(path)
    alone = [plain_score(path, tokenizer("03:c+5=" + text)["input_ids"]) for text in TEXTS]
    for batch_size in (1, 2, 3, 7):
        stage = build_reward(RewardConfig(kind="model", model=path))
        stage._parts[0][1].batch_size = batch_size  # type: ignore[attr-defined]  # as on a GPU
        together = [reward.value for reward in stage.score(prompts(len(TEXTS)), TEXTS)]
        assert together == approx(alone, abs=ROUNDING)
    assert len({round(value, 4) for value in alone}) == len(TEXTS)


def test_a_chat_is_written_by_the_template_with_its_roles(tmp_path):
    path = save_reward_model(tmp_path, chat=True)
    tokenizer = AutoTokenizer.from_pretrained(path)
    [score] = build_reward(RewardConfig(kind="model", model=path)).score(prompts(1, CHAT), ["m;"])
    text = "u:03:c+5=;a:h;;u:02:h+5=;a:m;;"
    assert score.value == approx(
        plain_score(path, tokenizer(text, add_special_tokens=False)["input_ids"]), abs=ROUNDING
    )
    [plain] = build_reward(RewardConfig(kind="model", model=path)).score(prompts(1), ["m;"])
    assert plain.value != approx(score.value, abs=1e-3)


def test_on_a_cpu_a_score_is_the_same_to_the_bit_whatever_is_scored_beside_it(tmp_path):
    stage = build_reward(RewardConfig(kind="model", model=save_reward_model(tmp_path)))
    together = [reward.value for reward in stage.score(prompts(len(TEXTS)), TEXTS)]
    assert together == [stage.score(prompts(1), [text])[0].value for text in TEXTS]


def test_a_token_that_the_model_does_not_know_costs_its_sample_and_says_whose_tokenizer_it_is(tmp_path):
    path = save_reward_model(tmp_path)
    config = AutoConfig.from_pretrained(path)
    config.vocab_size = AutoTokenizer.from_pretrained(path)("m")["input_ids"][-1]
    LlamaForSequenceClassification(config).save_pretrained(path)
    stage = build_reward(RewardConfig(kind="model", model=path, on_error="skip"))
    asked = [Prompt(prompt_id=i, token_ids=np.array([1]), text="") for i in range(2)]
    scored, unknown = stage.score_each(asked, ["a", "m"])
    assert isinstance(scored, Reward)
    assert isinstance(unknown, Unscored) and f"knows {config.vocab_size} ids" in unknown.reason


def test_little_of_a_batch_is_padding():
    lengths = [40, 39, 30, 29, 20, 10, 9, 1, 1, 1]
    texts = [(index, [0] * length) for index, length in enumerate(lengths)]
    batches = [[len(ids) for _, ids in batch] for batch in _batches(texts, 2)]
    assert batches == [[40, 39], [30, 29], [20], [10, 9], [1, 1], [1]]


@mark.parametrize("chat", [True, False])
def test_a_long_prompt_is_cut_on_its_left_and_the_response_stays_whole(tmp_path, chat):
    path = save_reward_model(tmp_path, chat=chat)
    tokenizer = AutoTokenizer.from_pretrained(path)
    text = ModelText(tokenizer, max_tokens=10)
    [request] = score_requests(prompts(1, CHAT), ["#bc"])
    ids = text.token_ids(request)
    whole = ModelText(tokenizer, max_tokens=None).token_ids(request)
    assert len(ids) == 10 and ids == whole[-10:]
    assert tokenizer.decode(ids).replace(" ", "").endswith("#bc;" if chat else "#bc")


def test_the_token_that_every_text_begins_with_is_kept_and_never_doubled(tmp_path):
    path = save_reward_model(tmp_path, chat=True)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.bos_token = "u"
    [request] = score_requests(prompts(1, CHAT), ["#bc"])
    ids = ModelText(tokenizer, max_tokens=10).token_ids(request)
    assert ids[0] == tokenizer.bos_token_id and ids[1] != ids[0] and len(ids) == 10


def test_a_response_that_the_model_cannot_hold_is_named_and_takes_no_other_with_it(tmp_path):
    path = save_reward_model(tmp_path, max_positions=20)
    stage = build_reward(RewardConfig(kind="model", model=path, on_error="skip"))
    first, second = stage.score_each(prompts(2), ["h" * 21, "h"])
    assert isinstance(first, Unscored) and isinstance(second, Reward)
    assert "sample 0 of the batch (prompt 0): the response has 21 tokens" in first.reason
    with raises(RewardError, match="the reward model reads 20"):
        build_reward(RewardConfig(kind="model", model=path)).score(prompts(1), ["h" * 21])


def test_a_score_that_is_not_finite_is_named(tmp_path):
    path = save_reward_model(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(path)
    with torch.no_grad():
        model.score.weight.fill_(3e38)
    model.save_pretrained(path)
    stage = build_reward(RewardConfig(kind="model", model=path, on_error="skip"))
    [fault] = stage.score_each(prompts(1), ["h"])
    assert isinstance(fault, Unscored) and "for sample 0 of the batch (prompt 0)" in fault.reason


def test_bfloat16_scores_are_near_those_of_float32(tmp_path):
    path = save_reward_model(tmp_path)
    half, full = (
        build_reward(RewardConfig(kind="model", model=path, dtype=dtype)).score(prompts(3), TEXTS[:3])
        for dtype in ("bfloat16", "float32")
    )
    assert [r.value for r in half] != [r.value for r in full]
    assert [r.value for r in half] == approx([r.value for r in full], abs=0.2)


def test_a_model_with_several_outputs_is_refused(tmp_path):
    with raises(ModelError, match="must have one output"):
        build_reward(RewardConfig(kind="model", model=save_reward_model(tmp_path, num_labels=2)))
