"""Training on padded batches: loss on responses only, each example once, bounded batches, warm-up."""

from functools import partial

import numpy as np
import pytest
import torch

from rlhfspec.core.errors import NotFiniteError
from rlhfspec.learning.training.objectives.padded_batches import Example, next_token_loss, supervised_batches
from rlhfspec.learning.training.trainer_core import OneForward, small_trainer


def example(tokens: list[int], num_prompt_tokens: int) -> Example:
    return Example(token_ids=np.array(tokens), num_prompt_tokens=num_prompt_tokens)


def batches(examples, *, max_tokens: int = 64, seed: int = 0):
    return supervised_batches(
        examples, max_tokens=max_tokens, pad_token_id=0, rng=np.random.default_rng(seed)
    )


def test_the_predicted_tokens_are_the_responses_and_never_prompt_or_padding():
    # 0 is the padding id and a real token of the second response at once
    (batch,) = batches([example([5, 6, 7, 8, 1], 3), example([9, 0, 1], 1)])
    predicted = [ids[1:][where].tolist() for ids, where in zip(batch.ids, batch.where, strict=True)]
    assert sorted(predicted) == [[0, 1], [8, 1]]


def test_every_example_comes_once_in_batches_of_at_most_so_many_padded_tokens():
    examples = [example([2 + i, *[3] * (i % 5), 1], 1) for i in range(17)]
    made = batches(examples, max_tokens=20)
    assert all(batch.ids.numel() <= 20 for batch in made)
    assert sorted(int(row[0]) for batch in made for row in batch.ids) == [2 + i for i in range(17)]


def test_the_order_of_batches_is_a_matter_of_the_seed_alone():
    examples = [example([2 + i, 3, 1], 1) for i in range(12)]
    first, again, other = (
        [b.ids.tolist() for b in batches(examples, max_tokens=6, seed=s)] for s in (1, 1, 2)
    )
    assert first == again and first != other and sorted(first) == sorted(other)


def test_the_loss_is_the_mean_surprise_of_the_response_tokens(model):
    (batch,) = batches([example([5, 6, 7, 1], 2), example([9, 8, 1], 1)])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(batch.ids).logits, dim=-1)
    # the shorter example comes first; 9 predicts 8, 9 8 predicts the end, 5 6 predicts 7, 5 6 7 the end
    assert batch.ids.tolist() == [[9, 8, 1, 0], [5, 6, 7, 1]]
    by_hand = -(logprobs[0, 0, 8] + logprobs[0, 1, 1] + logprobs[1, 1, 7] + logprobs[1, 2, 1]) / 4
    loss = next_token_loss(model, batch)
    assert float(loss) == pytest.approx(float(by_hand), rel=1e-5)


def test_training_on_one_batch_learns_it(model):
    trainer = small_trainer(model, learning_rate=1e-2, warmup_steps=1)
    (batch,) = batches([example([5, 6, 7, 1], 2), example([9, 8, 1], 1)])
    losses = []
    for _ in range(15):
        forward = OneForward(partial(next_token_loss, batch=batch))
        trainer.learn(forward, "of a test")
        losses.append(forward.value)
    assert losses[-1] < 0.1 * losses[0]


def the_sum(model, *, factor: float) -> torch.Tensor:
    return factor * sum(p.sum() for p in model.parameters())


def test_the_learning_rate_rises_linearly_and_then_stays(model):
    trainer = small_trainer(model, learning_rate=0.8, warmup_steps=4)
    seen = []
    for _ in range(6):
        trainer.learn(OneForward(partial(the_sum, factor=1.0)), "of a test")
        seen.append(trainer.optimizer.param_groups[0]["lr"])
    assert seen == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])


def test_the_gradient_is_clipped_to_norm_one(model):
    trainer, norms = small_trainer(model, learning_rate=1e-6), []

    def note(*_) -> None:
        norms.append(float(torch.stack([p.grad.norm() for p in model.parameters()]).norm()))

    trainer.optimizer.register_step_pre_hook(note)
    before = trainer.learn(OneForward(partial(the_sum, factor=1000.0)), "of a test")
    assert before > 1000.0 and norms == pytest.approx([1.0], rel=1e-4)


@pytest.mark.parametrize("factor", [float("nan"), 0.0])
def test_nothing_is_stepped_by_a_loss_that_is_not_finite_or_teaches_nothing(model, factor):
    trainer = small_trainer(model, learning_rate=1e-2)
    before = [p.clone() for p in model.parameters()]
    forward = OneForward(partial(the_sum, factor=factor))
    if factor == 0.0:
        assert trainer.learn(forward, "of a test") == 0.0
    else:
        with pytest.raises(NotFiniteError, match="the loss is nan"):
            trainer.learn(forward, "of a test")
    assert trainer.num_steps == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
