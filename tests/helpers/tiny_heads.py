"""A draft head of a tiny Llama and feature sequences of it, for the tests of heads."""

import numpy as np
import torch
from torch import Tensor

from rlhfspec.engine.drafters.head.feature_recorder import FeatureSequence
from rlhfspec.engine.drafters.head.head_weights import HeadWeights
from rlhfspec.learning.drafts.head import TargetParts, draft_vocabulary, fresh_head
from rlhfspec.learning.drafts.head_trainer import HeadTrainer
from tests.helpers.target_features import TargetFeatures


def tiny_head(model, size: int = 11, *, seed: int = 0, noise: float = 0.2) -> HeadWeights:
    """Over a part of the vocabulary, shaken so that no weight of it stands for nothing."""
    ids = draft_vocabulary(size, model.config.vocab_size, responses=[np.arange(3, 17)], always=[1])
    head = fresh_head(model, ids, seed=seed)
    random = torch.Generator().manual_seed(seed)
    floats = {name: value for name, value in head.tensors.items() if value.is_floating_point()}
    return head.with_trained(
        {name: value + noise * torch.randn(value.shape, generator=random) for name, value in floats.items()}
    )


def trainer_of(model, head: HeadWeights, **settings) -> HeadTrainer:
    """A trainer that reads a model's tensors."""
    return HeadTrainer(
        head,
        TargetParts.of(model, head.config.tapped_layers),
        **{"learning_rate": 0.01, **settings},
    )


def state_of(trainer: HeadTrainer) -> dict[str, Tensor]:
    """Copies of all that a step changes: weights, moments, the number of steps."""
    found = trainer.weights() | {"num_steps": torch.tensor(trainer.num_steps)}
    for name, moments in trainer._optimizer._moments.items():
        for part, value in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
            found[f"{name}.{part}"] = value.detach().clone()
    return found


def features(model, head: HeadWeights, prompt: np.ndarray, response: np.ndarray) -> FeatureSequence:
    """Hidden states of one sequence, float32."""
    with TargetFeatures(model, head.config.tapped_layers, dtype=torch.float32) as recorded:
        return recorded.of(prompt, response)


def random_sequences(model, head: HeadWeights, shapes: list[tuple[int, int]], seed: int = 0) -> list:
    """Of random tokens; `shapes` are numbers of tokens of prompts and responses."""
    rng = np.random.default_rng(seed)
    return [
        features(model, head, rng.integers(2, 19, size=prompt), rng.integers(2, 19, size=response))
        for prompt, response in shapes
    ]


def sampled_sequences(model, head: HeadWeights, num: int, length: int, seed: int = 0) -> list:
    """Responses that the model samples itself, at temperature 1, to prompts of two tokens."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 19, (num, 2), generator=random)
    with torch.no_grad():
        for _ in range(length):
            probs: Tensor = model(ids).logits[:, -1].softmax(-1)
            ids = torch.cat([ids, torch.multinomial(probs, 1, generator=random)], dim=1)
    return [features(model, head, row[:2], row[2:]) for row in ids.numpy()]
