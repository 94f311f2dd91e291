"""The unrolled loss is that of a head that drafts step by step from every anchor, one cell after another."""

import numpy as np
import pytest
import torch
from tiny_heads import random_sequences, tiny_head, trainer_of
from tiny_llama import tiny_llama
from torch import Tensor
from torch.nn import functional as F

from rlhfspec.engine.drafters.head.feature_recorder import FeatureSequence
from rlhfspec.engine.drafters.head.head_weights import HeadWeights
from rlhfspec.learning.drafts.features import PackedFeatures
from rlhfspec.learning.drafts.head import HeadModule
from rlhfspec.learning.drafts.head_trainer import LEVEL_WEIGHT
from rlhfspec.learning.drafts.unrolled import unroll

LEVELS = 3
SHAPES = [(3, 9), (1, 6), (5, 2), (2, 1), (1, 1), (4, 7)]
"Prompts of one token, responses that are too short for a level, and one without an anchor."


class Drafter:
    """One draft: cells are added one by one, and the newest cell's query looks at all of them."""

    def __init__(self, tensors: dict[str, Tensor], head: HeadWeights, embedding: Tensor) -> None:
        self.tensors, self.config, self.embedding = tensors, head.config, embedding
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt() * self.tensors[name]

    def turn(self, x: Tensor, position: int) -> Tensor:
        half = self.config.head_size // 2
        theta = self.config.rope_parameters["rope_theta"]
        angles = position / theta ** (torch.arange(half) / half)
        low, high = x[..., :half], x[..., half:]
        return torch.cat(
            [low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], -1
        )

    def cell(self, token: int, hidden: Tensor, position: int) -> Tensor:
        """Add a cell; its layer output."""
        weight = {name.removeprefix("midlayer."): value for name, value in self.tensors.items()}
        x = torch.cat(
            [
                self.norm(self.embedding[token], "midlayer.input_layernorm.weight"),
                self.norm(hidden, "midlayer.hidden_norm.weight"),
            ]
        )
        size = self.config.head_size
        query = self.turn((weight["self_attn.q_proj.weight"] @ x).view(-1, size), position)
        self.keys.append(self.turn((weight["self_attn.k_proj.weight"] @ x).view(-1, size), position))
        self.values.append((weight["self_attn.v_proj.weight"] @ x).view(-1, size))
        keys, values = torch.stack(self.keys, 1), torch.stack(self.values, 1)
        group = self.config.num_heads // self.config.num_kv_heads
        out = []
        for head in range(self.config.num_heads):
            scores = keys[head // group] @ query[head] / size**0.5
            out.append(scores.softmax(0) @ values[head // group])
        hidden = hidden + weight["self_attn.o_proj.weight"] @ torch.cat(out)
        x = self.norm(hidden, "midlayer.post_attention_layernorm.weight")
        inner = F.silu(weight["mlp.gate_proj.weight"] @ x) * (weight["mlp.up_proj.weight"] @ x)
        return hidden + weight["mlp.down_proj.weight"] @ inner

    def logits(self, state: Tensor) -> Tensor:
        return self.tensors["lm_head.weight"] @ self.norm(state, "norm.weight")


def drafted(
    tensors: dict[str, Tensor], head: HeadWeights, embedding: Tensor, sequence: FeatureSequence, anchor: int
) -> list[Tensor]:
    """Logits of each level that has a token to predict, drafting the true tokens from an anchor."""
    drafter = Drafter(tensors, head, embedding)
    tokens, state = sequence.token_ids.tolist(), torch.empty(0)
    for cell in range(anchor + 1):
        state = drafter.cell(tokens[cell + 1], tensors["fc.weight"] @ sequence.taps[cell], cell)
    found = [drafter.logits(state)]
    for level in range(2, LEVELS + 1):
        if anchor + level + 1 >= len(tokens):
            break
        state = drafter.cell(tokens[anchor + level], state, anchor + level - 1)
        found.append(drafter.logits(state))
    return found


def naive_loss(
    tensors: dict[str, Tensor], head: HeadWeights, model, sequences: list[FeatureSequence], temperature: float
) -> Tensor:
    embedding, gain = model.get_input_embeddings().weight, model.base_model.norm.weight
    rows = model.get_output_embeddings().weight[head.token_ids]
    losses: list[list[Tensor]] = [[] for _ in range(LEVELS)]
    for sequence in sequences:
        for anchor in range(max(sequence.prompt_length - 2, 0), len(sequence.token_ids) - 2):
            for level, logits in enumerate(drafted(tensors, head, embedding, sequence, anchor)):
                last = sequence.last[anchor + 1 + level - sequence.first]
                normed = last / (last.pow(2).mean() + model.config.rms_norm_eps).sqrt() * gain
                wanted = (rows @ normed / temperature).log_softmax(0)
                kl = (wanted.exp() * (wanted - (logits / temperature).log_softmax(0))).sum()
                losses[level].append(kl)
    weights = [LEVEL_WEIGHT**level for level in range(LEVELS)]
    means = [torch.stack(each).mean() for each in losses]
    return sum(w * mean for w, mean in zip(weights, means, strict=True)) / sum(weights)  # type: ignore[return-value]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_loss_and_gradient_are_those_of_drafting_step_by_step(temperature: float, monkeypatch):
    monkeypatch.setattr("rlhfspec.learning.drafts.head_trainer.PACK_ANCHORS", 12)
    monkeypatch.setattr("rlhfspec.learning.drafts.stoppable.PIECE_FLOPS", {torch.float32: 4000.0})
    model = tiny_llama(initializer_range=0.3).eval()
    head = tiny_head(model)
    sequences = random_sequences(model, head, SHAPES)
    tensors = {n: v.clone().requires_grad_() for n, v in head.tensors.items() if v.is_floating_point()}
    expected = naive_loss(tensors, head, model, sequences, temperature)
    expected.backward()

    trainer = trainer_of(model, head, temperature=temperature)
    gradients: dict[str, Tensor] = {}
    step = trainer._optimizer.step

    def seen(rate, products):
        gradients.update((name, p.grad.clone()) for name, p in trainer.module.named_parameters())
        return step(rate, products)

    monkeypatch.setattr(trainer._optimizer, "step", seen)
    report = trainer.step(sequences)
    assert report is not None
    assert report.loss == pytest.approx(float(expected.detach()), rel=1e-5)
    for name, tensor in tensors.items():
        assert tensor.grad is not None
        torch.testing.assert_close(gradients[name], tensor.grad, rtol=1e-4, atol=1e-5)


def test_states_of_a_sequence_do_not_depend_on_its_neighbours():
    model = tiny_llama(initializer_range=0.3).eval()
    head = tiny_head(model)
    sequences = random_sequences(model, head, SHAPES)
    module, embedding = HeadModule(head), model.get_input_embeddings().weight
    together = unroll(module, PackedFeatures(sequences), embedding=embedding, num_levels=LEVELS)
    packed = PackedFeatures(sequences)
    places = [np.cumsum([0, *packed.level_counts(level + 1)]) for level in range(LEVELS)]
    index = 0
    for sequence in sequences:
        alone = PackedFeatures([sequence])
        if not alone.num_anchors:
            continue
        for level, states in enumerate(unroll(module, alone, embedding=embedding, num_levels=LEVELS)):
            first, end = places[level][index : index + 2]
            torch.testing.assert_close(together[level][first:end], states, rtol=1e-4, atol=1e-5)
        index += 1
    assert index == len(packed.spans)
