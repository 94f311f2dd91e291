"""One supervised learner: packed losses are the dense ones, batches add up, schedules, adapters, state."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from supervised_items import CASES, PAD, SAVED_AFTER, STEPS, VOCABULARY, items_of, learn, new_learner, tiny
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import Phi3Config, Phi3ForCausalLM, PreTrainedTokenizerFast
from transformers.optimization import get_scheduler

from rlhfspec.core.errors import ConfigError, ModelError, NotFiniteError
from rlhfspec.core.settings.supervised import (
    PreferenceLossConfig,
    SupervisedModelConfig,
    SupervisedTrainerConfig,
)
from rlhfspec.core.settings.trainer import LoraConfig
from rlhfspec.learning.data.prompts import Source
from rlhfspec.learning.data.supervised_rows import Demonstration
from rlhfspec.learning.training.batching import PackedSequences
from rlhfspec.learning.training.objectives.supervised_objectives import NextTokens, bradley_terry_loss
from rlhfspec.learning.training.reward_head import packed_scores, scored_places
from rlhfspec.learning.training.supervised_job import SupervisedJob, batch_of, run_job


def dense_token_loss(model, items):
    """Mean over all learned tokens of the batch, one sequence at a time."""
    losses = []
    for item in items:
        ids = torch.from_numpy(item.token_ids)[None]
        logprobs = torch.log_softmax(model(ids).logits[0, :-1], dim=-1)
        own = logprobs.gather(-1, ids[0, 1:, None])[:, 0]
        losses.append(-own[torch.from_numpy(item.is_learned[1:])])
    return torch.cat(losses).mean()


def dense_scores(model, sequences):
    return torch.cat([model(torch.from_numpy(ids)[None]).logits[:, 0] for ids in sequences])


def dense_pair_loss(model, items):
    chosen = dense_scores(model, [item.chosen_ids for item in items])
    rejected = dense_scores(model, [item.rejected_ids for item in items])
    margins = torch.tensor([item.margin for item in items])
    return bradley_terry_loss(chosen, rejected, margins, center_coefficient=0.01).mean()


DENSE = {"sft": dense_token_loss, "reward": dense_pair_loss}


@pytest.mark.parametrize("kind", list(DENSE))
def test_loss_and_gradient_of_packs_are_those_of_single_sequences(kind):
    items, model = items_of(kind), tiny(kind)
    expected = DENSE[kind](model, items)
    expected.backward()
    learner = new_learner(kind, None)
    batch = learner.batch(items)
    for pack in batch.packs:
        batch.loss(learner.model, pack).backward()
    batch.finish()
    assert batch.means["loss"] == pytest.approx(expected.item(), rel=1e-5)
    for (name, one), other in zip(model.named_parameters(), learner.model.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_a_row_s_weight_multiplies_its_loss_and_not_the_number_of_tokens():
    items, model = items_of("sft"), tiny("sft")
    weights = [0.0, 2.0, 1.0, 0.5, *[1.0] * (len(items) - 4)]
    parts = [
        weight * item.num_learned * dense_token_loss(model, [item])
        for item, weight in zip(items, weights, strict=True)
    ]
    expected = torch.stack(parts).sum() / sum(item.num_learned for item in items)
    expected.backward()
    learner = new_learner("sft", None)
    weighed = [replace(item, weight=weight) for item, weight in zip(items, weights, strict=True)]
    batch = learner.batch(weighed)
    for pack in batch.packs:
        batch.loss(learner.model, pack).backward()
    batch.finish()
    assert batch.means["loss"] == pytest.approx(expected.item(), rel=1e-5)
    for (name, one), other in zip(model.named_parameters(), learner.model.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-3, atol=1e-5, msg=name)
    assert weighed[1].identity != items[1].identity and weighed[2].identity == items[2].identity


def test_sources_come_by_their_weights_in_epochs_of_equal_length():
    given = {
        "kind": "sft",
        "model": SupervisedModelConfig(name="m"),
        "loss": PreferenceLossConfig(),
        "seed": 7,
    }
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0})))
    given |= {"tokenizer": tokenizer, "held_out": (), "folder": Path("x"), "train": range(10)}
    given["trainer"] = SupervisedTrainerConfig(batch_size=4, epochs=3)
    plain = SupervisedJob(**given)
    # as every run before there were sources
    order = np.random.default_rng([7, 1]).permutation(10).tolist()
    assert [item for step in range(3, 6) for item in batch_of(plain, step)] == order
    sources = tuple(Source(name=n, num_prompts=5, repeats=times) for n, times in (("a", 1.0), ("b", 1.4)))
    mixed = SupervisedJob(**given, sources=sources)
    assert (plain.total_steps, mixed.steps_per_epoch, mixed.total_steps) == (9, 3, 9)
    seen = [[item for step in range(3 * e, 3 * e + 3) for item in batch_of(mixed, step)] for e in range(5)]
    assert all(len(epoch) == 12 and sum(item >= 5 for item in epoch) == 7 for epoch in seen)
    # what is more than whole rounds goes round
    counts = np.bincount([item for epoch in seen for item in epoch], minlength=10)
    assert counts.tolist() == [5] * 5 + [7] * 5


@pytest.mark.parametrize("kind", list(DENSE))
def test_an_evaluation_looks_at_each_row_once(kind, monkeypatch):
    learner, items = new_learner(kind, None), items_of(kind)
    weigh, weighed, rows = type(learner.objective).weight, [], []
    monkeypatch.setattr(
        type(learner.objective), "weight", lambda self, one: weighed.append(one) or weigh(self, one)
    )
    sums = type(learner.objective).sums
    monkeypatch.setattr(
        type(learner.objective),
        "sums",
        lambda self, model, some, how: rows.extend(some) or sums(self, model, some, how),
    )
    learner.evaluate(items)
    assert len(weighed) == len(rows) == len(items) > 2


def test_gradient_checkpointing_changes_nothing():
    items = items_of("reward")
    plain = new_learner("reward", None).step(items)
    checkpointed = new_learner("reward", None, gradient_checkpointing=True).step(items)
    assert checkpointed == pytest.approx(plain, rel=1e-6)


def test_a_packed_score_is_the_model_s_own_even_where_the_end_token_is_the_padding():
    model = tiny("reward")
    sequences = [np.array([5, 6, 7]), np.array([8, 9, PAD]), np.array([4, PAD, 3, PAD, PAD])]
    packed = PackedSequences.of(sequences)
    scored = {pad: [int(packed.ids[i]) for i in scored_places(packed, pad)] for pad in (PAD, None)}
    assert scored == {PAD: [7, 9, 3], None: [7, PAD, PAD]}
    with torch.no_grad():
        expected = dense_scores(model, sequences)
        learner = new_learner("reward", None)
        torch.testing.assert_close(packed_scores(learner.model, packed), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("schedule", "name"), [("constant", "constant_with_warmup"), ("linear", "linear"), ("cosine", "cosine")]
)
def test_rates_follow_the_schedules_of_transformers_and_none_is_zero(schedule, name):
    learner = new_learner("sft", None, schedule=schedule, warmup_steps=2)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1e-2)
    reference = get_scheduler(name, optimizer, num_warmup_steps=2, num_training_steps=STEPS)
    theirs, seen = [], []
    for _ in range(STEPS):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        reference.step()
        seen.append(learner.step(items_of("sft")[:2])["learning_rate"])
    # while it warms up a step earlier: transformers' first step has rate 0 and wastes its batch
    assert theirs[0] == 0.0 and seen == pytest.approx([5e-3, 1e-2, *theirs[2:]])


@pytest.mark.parametrize("kind", ["sft", "reward"])
def test_the_optimizer_is_the_config_s(kind):
    group = new_learner(kind, None).optimizer.param_groups[0]
    assert (group["betas"], group["eps"]) == ((0.9, 0.999), 1e-8)
    group = new_learner(kind, None, adam_betas=(0.8, 0.99), adam_epsilon=1e-6).optimizer.param_groups[0]
    assert (group["betas"], group["eps"]) == ((0.8, 0.99), 1e-6)


@pytest.mark.parametrize("case", list(CASES), ids="-".join)
def test_what_was_saved_is_gone_on_with_to_the_bit(case, tmp_path):
    items, lora = items_of(case[0]), CASES[case]
    weights, metrics = learn(new_learner(case[0], lora), items, tmp_path / "state")
    resumed = new_learner(case[0], lora)
    resumed.load(tmp_path / "state")
    assert resumed.num_steps == SAVED_AFTER
    again, same = learn(resumed, items)
    assert metrics == same
    assert all(np.array_equal(weights[name], again[name]) for name in weights)


def test_a_state_of_other_adapters_is_refused(tmp_path):
    new_learner("sft", None).save(tmp_path / "state")
    with pytest.raises(ConfigError, match="does not fit this trainer"):
        new_learner("sft", LoraConfig(rank=4)).load(tmp_path / "state")


def test_with_adapters_the_head_learns_whole_and_the_weights_below_stay():
    start = dict(tiny("reward").named_parameters())
    learner = new_learner("reward", LoraConfig(rank=4))
    weights, _ = learn(learner, items_of("reward"))
    assert weights.keys() == start.keys()
    moved = {name for name, weight in weights.items() if not np.array_equal(weight, start[name].detach())}
    assert "score.weight" in moved and "model.embed_tokens.weight" not in moved
    assert {name for name in start if "_proj" in name} <= moved
    held = dict(learner.model.named_parameters())
    below = "model.layers.0.mlp.up_proj"
    torch.testing.assert_close(held[f"{below}.base_layer.weight"], start[f"{below}.weight"], rtol=0, atol=0)


def test_a_loss_that_is_not_finite_takes_no_step():
    learner = new_learner("sft", None)
    with torch.no_grad():
        learner.model.get_input_embeddings().weight.fill_(float("nan"))
    with pytest.raises(NotFiniteError, match="the loss of step 1 is nan"):
        learner.step(items_of("sft"))
    assert learner.num_steps == 0


def test_a_row_at_which_rotary_positions_change_for_its_whole_pack_is_refused(tmp_path):
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    config = Phi3Config(
        **sizes,
        num_hidden_layers=1,
        pad_token_id=0,
        max_position_embeddings=64,
        original_max_position_embeddings=16,
        rope_parameters=rope,
    )
    Phi3ForCausalLM(config).save_pretrained(tmp_path)
    rows = [Demonstration(token_ids=np.arange(2, 2 + n), is_learned=np.arange(n) > 0) for n in (8, 17)]
    job = SupervisedJob(
        kind="sft",
        model=SupervisedModelConfig(name=str(tmp_path), dtype="float32"),
        trainer=SupervisedTrainerConfig(max_steps=1),
        loss=PreferenceLossConfig(),
        seed=0,
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}))),
        train=rows,
        held_out=[],
        folder=tmp_path / "out",
    )
    with pytest.raises(ModelError, match=r"more than 16 tokens, and one may have 17 here.*data\.max_tokens"):
        next(run_job(job, device=torch.device("cpu")))


def test_dynamic_fine_tuning_weighs_a_token_by_its_probability():
    """TRL's `dft`: the sum of -sg(p) log p over the learned tokens of a batch."""
    found = {}
    for is_dynamic in (False, True):
        learner, items = new_learner("sft", None), items_of("sft")[:3]
        learner.objective = NextTokens(vocab_size=VOCABULARY, is_dynamic=is_dynamic)
        batch = learner.batch(items)
        loss = sum(batch.loss(learner.model, pack) for pack in batch.packs)
        loss.backward()
        found[is_dynamic] = loss.detach(), learner.model.lm_head.weight.grad
    model, loss, total = tiny("sft"), 0.0, 0
    for item in items_of("sft")[:3]:
        ids = torch.from_numpy(item.token_ids)
        logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        learned = logprobs[torch.from_numpy(item.is_learned)[1:]]
        loss, total = loss - (learned * learned.exp().detach()).sum(), total + len(learned)
    (loss / total).backward()
    torch.testing.assert_close(found[True][0], (loss / total).detach(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found[True][1], model.lm_head.weight.grad, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(found[True][1], found[False][1], rtol=0.1)
