"""A head is made from prompts alone, within its seconds, and evaluated on responses that it did not learn from."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_heads import tiny_head
from tiny_llama import tiny_llama

from rlhfspec.core.errors import ConfigError, DataError, ModelError
from rlhfspec.core.records import Prompt, SamplingParams
from rlhfspec.engine.drafters.head.head_weights import require_whole
from rlhfspec.learning.drafts.evaluate_head import Responder, evaluate_head
from rlhfspec.learning.drafts.head import TargetParts, expected_counts
from rlhfspec.learning.drafts.make_head import HeadRecipe, learn_head, make_head

SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=12, stop_token_ids=(1,))
RECIPE = HeadRecipe(num_tokens=150, draft_vocab_size=12, max_passes=2, step_anchors=40, num_levels=3)


def prompts(num: int = 40) -> list[Prompt]:
    rng = np.random.default_rng(0)
    return [
        Prompt(
            prompt_id=i,
            token_ids=rng.integers(2, 19, size=4),
            fields={"kind": "even" if i % 2 == 0 else "odd"},
        )
        for i in range(num)
    ]


class Ticking:
    """A clock that goes on by so much whenever it is looked at."""

    def __init__(self, step_s: float) -> None:
        self.now_s, self.step_s = 0.0, step_s

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


def model():
    return tiny_llama(initializer_range=0.2).eval()


def test_a_head_is_made_whole_and_judged_on_what_it_did_not_see():
    said: list[tuple[str, float]] = []
    made = make_head(
        model(),
        prompts(),
        sampling=SAMPLING,
        vocab_size=19,
        budget_s=1e6,
        recipe=RECIPE,
        progress=lambda stage, share: said.append((stage, share)),
    )
    require_whole(made.head, "made")
    assert 1 in made.head.token_ids.tolist() and len(made.head.token_ids) == 12
    assert made.num_tokens >= 0.8 * 150 and made.num_steps > 4
    assert made.num_learned_tokens <= 2 * made.num_tokens
    assert made.acceptance.num_anchors > 0
    assert all(0.0 <= share <= 1.0 for _, share in said)
    assert {stage for stage, _ in said} >= {"own responses", "pass 1 of 2", "acceptance"}


def test_equal_seeds_make_equal_heads():
    target = model()
    one, other = (
        make_head(target, prompts(), sampling=SAMPLING, vocab_size=19, budget_s=1e6, recipe=RECIPE)
        for _ in range(2)
    )
    # the rate falls with the time that is spent, but of a million seconds none is
    assert one.num_steps == other.num_steps
    for name, tensor in one.head.tensors.items():
        torch.testing.assert_close(other.head.tensors[name], tensor, rtol=1e-3, atol=1e-3)


def test_the_budget_ends_every_part():
    made = make_head(
        model(),
        prompts(),
        sampling=SAMPLING,
        vocab_size=19,
        budget_s=1000.0,
        recipe=HeadRecipe(num_tokens=10**6, draft_vocab_size=12, max_passes=10**6, step_anchors=40),
        clock=Ticking(0.25),
    )
    assert made.generate_s <= 660.0
    assert made.num_steps > 0 and made.acceptance.num_anchors > 0
    assert made.seconds <= 1010.0


@pytest.mark.parametrize(
    ("budget_s", "said"), [(2.0, "needs two responses at least"), (70.0, "before the draft head had learned")]
)
def test_too_few_seconds_are_one_clear_error(budget_s: float, said: str):
    recipe = HeadRecipe(num_tokens=10**6, draft_vocab_size=12, generate_share=0.93)
    with pytest.raises(ConfigError, match=said):
        make_head(
            model(),
            prompts(),
            sampling=SAMPLING,
            vocab_size=19,
            budget_s=budget_s,
            recipe=recipe,
            clock=Ticking(1.0),
        )


def test_one_prompt_is_too_few():
    with pytest.raises(DataError, match="two prompts at least"):
        make_head(model(), prompts(1), sampling=SAMPLING, vocab_size=19, budget_s=1e6)


def test_a_head_is_evaluated_at_every_temperature_and_by_category():
    target = model()
    head = tiny_head(target)
    greedy = SamplingParams(temperature=0.0, max_new_tokens=8, stop_token_ids=())
    warm, cold = evaluate_head(
        target,
        head,
        prompts(6),
        samplings=[SAMPLING, greedy],
        vocab_size=19,
        num_levels=3,
        category_field="kind",
    )
    assert warm.num_anchors > 0 and cold.num_anchors == 6 * 8
    assert list(cold.by_category()) == ["even", "odd"]


def test_only_steps_that_were_taken_are_learned_from_and_a_head_without_one_is_refused():
    target = model()
    responder = Responder(target, (0, 1, 1), vocab_size=19, max_total_tokens=32, num_slots=4)
    responses = list(responder.responses(prompts(8), SAMPLING, seed=0))
    recipe = replace(RECIPE, max_passes=1, step_anchors=1)

    def made(broken: int):
        learned = [
            replace(
                each, sequence=replace(each.sequence, taps=torch.full_like(each.sequence.taps, torch.inf))
            )
            if place < broken
            else each
            for place, each in enumerate(responses[1:])
        ]
        return learn_head(target, learned, responses[:1], sampling=SAMPLING, vocab_size=19, recipe=recipe)

    whole, some = made(0), made(3)
    assert some.num_steps < whole.num_steps and 0 < some.num_learned_tokens < whole.num_learned_tokens
    with pytest.raises(ConfigError, match="no step of the draft head was taken"):
        made(len(responses))


def test_a_head_of_another_target_is_refused():
    target = model()
    head = tiny_head(tiny_llama(hidden_size=16))
    with pytest.raises(ModelError, match="does not fit the target: expected hidden size 32, got 16"):
        evaluate_head(target, head, prompts(2), samplings=[SAMPLING], vocab_size=19, num_levels=2)


def test_expected_counts_are_the_targets_own_probabilities():
    target = model()
    responder = Responder(target, (0, 1, 1), vocab_size=19, max_total_tokens=32, num_slots=4)
    sequences = [each.sequence for each in responder.responses(prompts(4), SAMPLING, seed=0)]
    counts = expected_counts(sequences, TargetParts.of(target), temperature=0.7)
    expected = torch.zeros(19)
    for sequence in sequences:
        ids = torch.from_numpy(sequence.token_ids)[None]
        logits = target(ids).logits[0, sequence.first : -1]
        expected += (logits / 0.7).softmax(-1).sum(0)
    torch.testing.assert_close(counts, expected, rtol=0.05, atol=0.05)
