"""A reward from a Hugging Face sequence-classification model with one output.

Source: Ouyang et al. 2022, section 3.5 (a reward model reads prompt and response and gives a scalar).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification
from transformers.configuration_utils import PretrainedConfig

from core.errors import ModelError, RewardError
from core.records import Prompt, Reward
from engine.weights.loading import load_model, load_tokenizer
from learning.rewards.rendering import render


class ModelReward:
    """Scores prompt + response text in batches, padded to the longest."""

    def __init__(self, model: str, *, batch_size: int, device: str = "cpu") -> None:
        self.name = model
        self.batch_size = batch_size
        try:
            self._tokenizer = load_tokenizer(model)
            self._model = load_model(AutoModelForSequenceClassification, model).to(device)  # type: ignore[arg-type]
        except ModelError as error:
            raise ModelError(f"cannot load reward.model: {error}") from error
        require_one_output(model, self._model.config)
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        # the head finds the last real token by this id
        self._model.config.pad_token_id = self._tokenizer.pad_token_id

    @torch.inference_mode()
    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[Reward]:
        """Score one response a prompt, in order. Raises RewardError when a score is not finite."""
        limit = self._tokenizer.model_max_length
        ids = [
            render(self._tokenizer, prompt.text, prompt.messages, response, max_tokens=limit)
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        rewards: list[Reward] = []
        for start in range(0, len(ids), self.batch_size):
            batch: Any = self._tokenizer.pad(
                {"input_ids": ids[start : start + self.batch_size]}, return_tensors="pt"
            ).to(self._model.device)
            scores = self._model(**batch).logits[:, 0].float().tolist()
            for offset, score in enumerate(scores):
                if not math.isfinite(score):
                    prompt = prompts[start + offset]
                    raise RewardError(
                        f"reward model {self.name} gave {score} for sample {start + offset} "
                        f"(prompt {prompt.prompt_id}); expected a finite number; check the model"
                    )
                rewards.append(Reward(value=score))
        return rewards


def require_one_output(name: str, config: PretrainedConfig) -> None:
    """Raise ModelError when a reward model gives more than one number."""
    if config.num_labels != 1:
        raise ModelError(
            f"reward.model '{name}' must have one output, it has {config.num_labels}; "
            "use a model trained with num_labels=1"
        )
