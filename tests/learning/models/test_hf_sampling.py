"""Sampling while a pair is made: padding and batches do not matter, nothing outside is touched."""

import numpy as np
import pytest
import torch

from rlhfspec.learning.models.demo_pair import sample_responses

EOS, PAD = 1, 0
PROMPTS = [np.array([3]), np.array([4, 5, 6, 7]), np.array([8, 9]), np.array([10, 11, 12])]


def sample(model, prompts=PROMPTS, *, new: int = 6, **settings):
    settings = {"eos_token_id": EOS, "pad_token_id": PAD} | settings
    return sample_responses(model, prompts, max_new_tokens=new, **settings)


def greedy(model, prompt: np.ndarray, *, eos: int = EOS) -> list[int]:
    ids = prompt.tolist()
    for _ in range(6):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == eos:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("batch_size", [1, 3, 4])
def test_nearly_greedy_sampling_is_the_argmax_of_each_prompt_alone(model, batch_size):
    responses = sample(model, temperature=1e-4, batch_size=batch_size)
    assert [r.tolist() for r in responses] == [greedy(model, prompt) for prompt in PROMPTS]


def test_a_response_ends_with_its_first_end_token_and_holds_no_padding(model):
    # some token that ends one response early and not every one
    eos = greedy(model, PROMPTS[0])[1]
    expected = [greedy(model, prompt, eos=eos) for prompt in PROMPTS]
    assert len({len(tokens) for tokens in expected}) > 1, "all of one length: the case proves nothing"
    assert [r.tolist() for r in sample(model, temperature=1e-4, eos_token_id=eos)] == expected


def test_the_seed_decides(model):
    one, again, other = ([r.tolist() for r in sample(model, seed=s)] for s in (3, 3, 4))
    assert one == again and one != other


def test_training_mode_and_the_global_random_state_come_back(model):
    model.train()
    torch.manual_seed(11)
    before = torch.random.get_rng_state()
    sample(model)
    assert model.training and torch.equal(torch.random.get_rng_state(), before)
    sample(model.eval())
    assert not model.training
