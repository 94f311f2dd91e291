"""Sequences that begin alike, computed as a tree: what they share is there once, losses and gradients are those of each
sequence by itself.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_llama import tiny_llama
from torch import nn
from transformers import (
    Lfm2Config,
    Lfm2ForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MixtralConfig,
    MixtralForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)
from trees import doubled, gradients, prefixes, random_tree

from rlhfspec.core.config import AlgorithmConfig, TrainerConfig
from rlhfspec.core.errors import ModelError
from rlhfspec.core.settings.algorithm import ALGORITHMS
from rlhfspec.core.settings.supervised import SupervisedTrainerConfig
from rlhfspec.core.settings.trainer import LoraConfig
from rlhfspec.learning.training.batching import PackedSequences, num_unique, shared_packs
from rlhfspec.learning.training.learner import Learner
from rlhfspec.learning.training.learning_rate import Horizon
from rlhfspec.learning.training.objectives.supervised_objectives import NextTokens
from rlhfspec.learning.training.packed_attention import _attend
from rlhfspec.learning.training.parallel import OneTrainer
from rlhfspec.learning.training.supervised_job import SupervisedLearner
from rlhfspec.learning.training.training_forward import response_logits

NUM_TREES = 500


def test_every_token_of_a_tree_is_there_once_and_its_path_is_its_sequence():
    for seed in range(NUM_TREES):
        sequences = random_tree(seed)
        packed = PackedSequences.of(sequences)
        assert len(packed.ids) == num_unique(sequences) == len(prefixes(sequences))
        paths = packed.paths()
        places = torch.arange(len(packed.ids)) if paths.places is None else paths.places
        of_branch = [places[a:b] for a, b in itertools.pairwise(paths.starts.tolist())]
        for sequence, where in zip(sequences, packed.places, strict=True):
            assert packed.ids[where].tolist() == sequence.tolist()
            assert packed.position_ids[where].tolist() == list(range(len(sequence)))
            assert any(torch.equal(path[: len(where)], where) for path in of_branch)


def values_and_gradients(sequences, window, softcap, weight):
    """Attention of 2 heads over 1 in float64, of random queries, keys and values by token prefix."""
    packed = PackedSequences.of(sequences)
    generator = torch.Generator().manual_seed(len(packed.ids))
    parts = [
        torch.randn(1, heads, len(packed.ids), 4, dtype=torch.float64, generator=generator).requires_grad_()
        for heads in (2, 1, 1)
    ]
    settings = {"softcap": softcap, "sliding_window": window}

    def result(by_sequence: bool):
        if not by_sequence:
            out, _ = _attend(nn.Module(), *parts, None, packed=packed, **settings)
            outs = [out[0, where] for where in packed.places]
        else:
            # each sequence by itself, its tokens copied to it
            outs = [
                _attend(nn.Module(), *(part[:, :, where] for part in parts), None, **settings)[0][0]
                for where in packed.places
            ]
        whole = torch.cat(outs)
        return [whole, *torch.autograd.grad((whole * weight[: len(whole)]).sum(), parts)]

    return result(by_sequence=False), result(by_sequence=True)


def test_attention_over_random_trees_is_that_over_each_sequence():
    weight = torch.randn(80, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for seed in range(NUM_TREES):
        window, softcap = (None, 3)[seed % 2], (None, None, 5.0)[seed % 3]
        tree, alone = values_and_gradients(random_tree(seed), window, softcap, weight)
        for got, expected in zip(tree, alone, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


PROMPT = [5, 6, 7, 8, 9, 10]
RESPONSES = [[3, 4, 5, 6], [3, 4, 5, 7, 8], [11, 2], [3, 4, 5, 6], [3, 4], [12, 12, 13], [4], [3, 4, 5, 7]]
"Equal ones, one that another goes on from, ones that begin alike."


def grouped(make_rollouts, model, **settings):
    pairs = [(np.array(PROMPT), np.array(one)) for one in RESPONSES]
    pairs += [(np.array([*PROMPT[:4], 14]), np.array([*one, 2])) for one in RESPONSES[:4]]
    pairs += [(np.array([17, 16]), np.array(one)) for one in RESPONSES[:4]]
    return make_rollouts(
        model, len(pairs), group_size=4, pairs=pairs, reward=lambda ids: float(ids.sum() % 5), **settings
    )


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["full", "lora"])
@pytest.mark.parametrize("kind", [kind for kind in ALGORITHMS if kind != "distill"])
def test_gradients_of_every_algorithm_are_those_of_single_sequences(kind, lora, make_rollouts, monkeypatch):
    if lora is not None:
        pytest.importorskip("peft")
    trainer = TrainerConfig(
        minibatch_size=8, lora=lora, gradient_checkpointing=kind == "ppo", max_grad_norm=1e9
    )
    together, alone = (
        doubled(
            Learner(
                tiny_llama(initializer_range=0.3),
                algorithm=AlgorithmConfig(kind=kind, entropy_coef=0.01),
                trainer=trainer,
                temperature=0.7,
                seed=5,
                pad_token_id=0,
                horizon=Horizon(max_new_tokens=8),
            )
        )
        for _ in range(2)
    )
    # no two sequences fit into it
    alone._forward = replace(alone._forward, max_tokens=1)
    alone._first = replace(alone._first, forward=alone._forward)
    rollouts = grouped(make_rollouts, tiny_llama(initializer_range=0.3).eval(), temperature=0.7)
    found, report, num_tokens = gradients(together, rollouts, monkeypatch)
    expected, other, num_expected = gradients(alone, rollouts, monkeypatch)
    assert num_tokens < 0.7 * num_expected
    assert len(found) == len(expected) > 0 and any(one.any() for one in found)
    for got, one in zip(found, expected, strict=True):
        torch.testing.assert_close(got, one, rtol=0, atol=1e-10)
    assert report.metrics == pytest.approx(other.metrics, abs=1e-6)


def test_of_episodes_of_three_turns_the_unique_tokens_are_computed(make_rollouts, monkeypatch):
    """A prompt, two first turns, four second ones, eight third ones: each goes on from a whole history."""
    rng = np.random.default_rng(0)
    history = [np.array(PROMPT)]
    for _ in range(3):
        history = [np.append(one, rng.integers(2, 19, size=5)) for one in history for _ in range(2)]
    pairs = [(one[:6], one[6:]) for one in history]
    model = tiny_llama(initializer_range=0.3).eval()
    rollouts = make_rollouts(model, 8, group_size=8, pairs=pairs, reward=lambda ids: float(ids.sum()))
    learner = Learner(
        tiny_llama(initializer_range=0.3),
        algorithm=AlgorithmConfig(kind="grpo", kl_coef=0.0),
        trainer=TrainerConfig(),
        temperature=1.0,
        seed=5,
        pad_token_id=0,
    )
    _, report, num_tokens = gradients(learner, rollouts, monkeypatch)
    assert num_tokens == len(prefixes(history)) == 6 + 5 * (2 + 4 + 8)
    assert (report.cost["num_packs"], report.cost["num_tokens"]) == (1, num_tokens)
    assert report.cost["num_shared_tokens"] == sum(map(len, history)) - num_tokens


def unique_in(packs, items) -> list[int]:
    return [num_unique([sequence for row in pack.rows for sequence in items[row]]) for pack in packs]


@pytest.mark.parametrize("max_tokens", [20, 64, 1000])
@pytest.mark.parametrize("size", [1, 3])
def test_packs_are_filled_by_unique_tokens_and_groups_come_together(max_tokens, size):
    class Trainers(OneTrainer):
        pass

    rng = np.random.default_rng(0)
    prompts = [np.append([3, 4], rng.integers(0, 99, size=10)) for _ in range(6)]
    items = [[np.append(prompts[i % 6], rng.integers(0, 99, size=4))] for i in range(24)]
    items.append([np.arange(70)])
    packs = []
    for rank in range(size):
        trainers = Trainers()
        trainers.size, trainers.rank = size, rank
        packs.append(shared_packs(items, max_tokens, trainers))
    assert len({len(of_rank) for of_rank in packs}) == 1
    real = [pack for of_rank in packs for pack in of_rank if not pack.is_filler]
    assert sorted(row for pack in real for row in pack.rows) == list(range(25))
    counts = unique_in(real, items)
    assert all(count <= max_tokens or pack.rows == [24] for pack, count in zip(real, counts, strict=True))
    if max_tokens == 20:
        # a prompt of 12 and two answers of 4
        assert sum(len(pack.rows) == 2 for pack in real) == 12
    if max_tokens == 1000 and size == 1:
        assert counts == [num_unique([sequence for [sequence] in items])]
    if max_tokens == 64 and size == 1:
        # whole groups, a prompt and four answers each
        groups = [{row % 6 for row in pack.rows if row < 24} for pack in real]
        assert sum(len(group) for group in groups) == 6


def test_pairs_of_one_prompt_share_it():
    pairs = [[np.append(np.arange(20) + i, [1, 2]), np.append(np.arange(20) + i, [3])] for i in range(4)]
    packs = shared_packs(pairs, 46, OneTrainer())
    assert sorted(len(pack.rows) for pack in packs) == [2, 2] and unique_in(packs, pairs) == [46, 46]


def test_a_model_that_knows_no_trees_is_refused():
    with pytest.raises(ModelError, match=r"attends by 'sdpa'.*prepare_for_training"):
        response_logits(tiny_llama(), PackedSequences.of([np.array([3, 4])]), 19)


SMALL = {
    "vocab_size": 19,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MIXING = {
    "convolutions": lambda: Lfm2ForCausalLM(
        Lfm2Config(**SMALL, initializer_range=0.3, layer_types=["conv", "full_attention"])
    ),
    "packs not handed on": lambda: StableLmForCausalLM(StableLmConfig(**SMALL)),
    "chunks": lambda: Llama4ForCausalLM(
        Llama4TextConfig(**SMALL, intermediate_size_mlp=64, head_dim=8, attention_chunk_size=4)
    ),
}


@pytest.mark.parametrize("build", MIXING.values(), ids=MIXING)
def test_models_whose_sequences_would_see_their_neighbours_in_a_pack_are_refused(build):
    for make in (
        lambda: Learner(
            build(),
            algorithm=AlgorithmConfig(),
            trainer=TrainerConfig(),
            temperature=1.0,
            seed=0,
            pad_token_id=0,
        ),
        lambda: SupervisedLearner(
            build(), NextTokens(vocab_size=19), SupervisedTrainerConfig(), total_steps=1, seed=0
        ),
    ):
        with pytest.raises(ModelError, match=r"is not supported: .*(in a pack|chunked attention)"):
            make()


def test_a_routers_noise_stays_off_where_layers_are_checkpointed(make_rollouts):
    def model():
        torch.manual_seed(0)
        return MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=4, router_jitter_noise=0.5))

    rollouts = grouped(make_rollouts, model().eval())
    plain, checkpointed = (
        Learner(
            model(),
            algorithm=AlgorithmConfig(kind="grpo", kl_coef=0.0),
            trainer=TrainerConfig(gradient_checkpointing=gradient_checkpointing),
            temperature=1.0,
            seed=5,
            pad_token_id=0,
        ).update(rollouts)
        for gradient_checkpointing in (False, True)
    )
    assert checkpointed.metrics == pytest.approx(plain.metrics, rel=1e-6)
