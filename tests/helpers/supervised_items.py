"""Tiny models and items for supervised learners, and what each process of a group does with them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from trainer_group import trainers_of
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedModel

from rlhfspec.core.settings.supervised import DpoLossConfig, SupervisedTrainerConfig
from rlhfspec.core.settings.trainer import LoraConfig
from rlhfspec.learning.data.feedback import Feedback, with_unrelated
from rlhfspec.learning.data.preferences import PreferencePair
from rlhfspec.learning.data.supervised_rows import Demonstration
from rlhfspec.learning.training.objectives.direct_preferences import DirectPreferences
from rlhfspec.learning.training.objectives.supervised_objectives import NextTokens, Preferences
from rlhfspec.learning.training.parallel import OneTrainer
from rlhfspec.learning.training.reward_head import HEAD
from rlhfspec.learning.training.supervised_job import SupervisedLearner

VOCABULARY, PAD = 20, 0
KINDS = ("sft", "reward", "dpo")
CASES = {
    (kind, form): LoraConfig(rank=4) if form == "lora" else None
    for kind in KINDS
    for form in ("full", "lora")
}
OBJECTIVES = {
    "sft": NextTokens(vocab_size=VOCABULARY),
    "reward": Preferences(center_coefficient=0.01),
    "dpo": DirectPreferences(vocab_size=VOCABULARY, loss=DpoLossConfig(type="kto")),
}
STRATEGIES = ("ddp", "fsdp2")
STEPS, SAVED_AFTER, BATCH = 4, 2, 5


def tiny(kind: str, seed: int = 0) -> PreTrainedModel:
    """Two layers, far from uniform, so that a mistake shows."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        pad_token_id=PAD,
        eos_token_id=1,
        initializer_range=0.3,
        num_labels=1,
    )
    torch.manual_seed(seed)
    return (LlamaForSequenceClassification if kind == "reward" else LlamaForCausalLM)(config).eval()


def items_of(kind: str, num: int = 9, seed: int = 0) -> list:
    """Sequences of unlike lengths; of demonstrations the last half is learned, of pairs some have a margin."""
    rng = np.random.default_rng(seed)

    def ids() -> np.ndarray:
        return rng.integers(2, VOCABULARY, size=int(rng.integers(3, 12)))

    if kind == "reward":
        return [
            PreferencePair(chosen_ids=ids(), rejected_ids=ids(), margin=0.5 * (i % 2)) for i in range(num)
        ]
    if kind == "dpo":
        return feedback_items(num, seed)
    found = [ids() for _ in range(num)]
    return [Demonstration(token_ids=one, is_learned=np.arange(len(one)) >= len(one) // 2) for one in found]


def feedback_items(num: int, seed: int, *, single: bool = False, unrelated: bool = True) -> list[Feedback]:
    """Pairs, or responses that are desirable or not, with a reference far from any model."""
    rng = np.random.default_rng(seed)

    def response(prompt: np.ndarray) -> Demonstration:
        ids = np.concatenate([prompt, rng.integers(2, VOCABULARY, size=int(rng.integers(2, 8)))])
        return Demonstration(token_ids=ids, is_learned=np.arange(len(ids)) >= len(prompt))

    items = []
    for index in range(num):
        prompt = rng.integers(2, VOCABULARY, size=3 + index % 4)
        both = tuple(response(prompt) for _ in range(1 if single else 2))
        is_chosen = (bool(index % 3),) if single else (True, False)
        items.append(Feedback(responses=both, is_chosen=is_chosen))
    items = with_unrelated(items, items, 64) if unrelated else items
    return [
        replace(
            one,
            reference=tuple(
                (-3.0 * rng.random(len(one.responses) + len(one.unrelated)).astype(np.float32)).tolist()
            ),
        )
        for one in items
    ]


def new_learner(
    kind: str, lora: LoraConfig | None, trainers: OneTrainer | None = None, **settings
) -> SupervisedLearner:
    """Packs of a few sequences, so that several trainers have unlike numbers of them."""
    given = {
        "learning_rate": 1e-2,
        "max_tokens_per_forward": 24,
        "schedule": "cosine",
        "warmup_steps": 1,
        "lora": lora,
    }
    return SupervisedLearner(
        tiny(kind),
        OBJECTIVES[kind],
        SupervisedTrainerConfig(**given | settings),
        total_steps=STEPS,
        seed=5,
        head=HEAD if kind == "reward" else None,
        trainers=trainers,
    )


def learn(learner: SupervisedLearner, items: list, save_as: Path | None = None):
    """The remaining steps; the weights, and the last figures with those of held-out items."""
    metrics: dict[str, float] = {}
    while learner.num_steps < STEPS:
        if save_as is not None and learner.num_steps == SAVED_AFTER:
            learner.save(save_as)
        start = learner.num_steps % 2 * (len(items) - BATCH)
        metrics = learner.step(items[start : start + BATCH])
    held_out = {f"eval/{name}": value for name, value in learner.evaluate(items[:3]).items()}
    return {name: tensor.clone().numpy() for name, tensor in learner.weights()}, metrics | held_out


def learn_in_group(rank: int, folder: Path, resumed_from: Path):
    """Every case each way, saved on the way; and gone on with from what one trainer saved."""
    found = {}
    for strategy in STRATEGIES:
        for (kind, form), lora in CASES.items():
            learner = new_learner(kind, lora, trainers_of(strategy))
            found[strategy, kind, form] = learn(learner, items_of(kind), folder / f"{strategy}-{kind}-{form}")
            resumed = new_learner(kind, lora, trainers_of(strategy))
            resumed.load(resumed_from / f"{kind}-{form}")
            found["resumed", strategy, kind, form] = learn(resumed, items_of(kind))
    return found
