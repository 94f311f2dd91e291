"""Makes the demo pair: a target that solves the chain task about half the time, and its draft.

The target learns from demonstrations that slip: a wrong letter now and then, at a rate chosen so that
a perfect imitator would be right in about half its samples. So accuracy at T = 1 approaches the middle
instead of jumping over it, whatever the seed, and the room that is left is what PPO can win: the right
letter is nearly always the likeliest. Training stops on measured accuracy, never on time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, PreTrainedTokenizerFast

from ...core.errors import RlhfSpecError
from ...core.records import Prompt
from ...engine.weights.causal_lm import PreTrainedModel
from ..tasks.chain_task import ALPHABET as CHAIN_ALPHABET
from ..tasks.chain_task import (
    MAX_RESPONSE_TOKENS,
    ChainProblem,
    chain_reward,
    draw_problem,
    solution,
)
from ..training.objectives.padded_batches import (
    Example,
    SupervisedBatch,
    distilled_loss,
    next_token_loss,
    supervised_batches,
)
from ..training.trainer_core import OneForward, small_trainer
from .net2net import deepen, new_llama, widen
from .tokenization import character_tokenizer, token_id

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRecipe:
    """Everything the pair depends on besides the seed; part of the cache key."""

    version: int = 5
    "raise it when the task or the code below changes"
    hidden_size: int = 128
    num_layers: int = 2
    head_dim: int = 32
    grown_width: int = 2
    grown_layers: int = 8
    draft_hidden_size: int = 96
    learning_rate: float = 2e-3
    batch_tokens: int = 512
    slip_rate: float = 0.16
    min_accuracy: float = 0.37
    max_accuracy: float = 0.55
    min_steps: int = 600
    max_steps: int = 2400
    steps_between_checks: int = 25
    num_check_prompts: int = 256
    draft_steps: int = 600
    draft_learning_rate: float = 4e-3


class DemoPairMaker:
    """Trains target and draft; deterministic given seed, recipe and thread count."""

    def __init__(self, recipe: DemoRecipe, *, seed: int, progress: Progress) -> None:
        self.recipe = recipe
        self.seed = seed
        self.progress = progress
        self.tokenizer: PreTrainedTokenizerFast = character_tokenizer(CHAIN_ALPHABET)
        self.slip_rate = recipe.slip_rate
        self.accuracy = self.estimate = 0.0
        self._rng = np.random.default_rng([seed, 0x9A18])

    def make_target(self) -> tuple[PreTrainedModel, PreTrainedModel]:
        """Train the narrow target until its measured accuracy fits; return (narrow, grown).

        Raises RlhfSpecError when it does not get there within the recipe's steps.
        """
        recipe = self.recipe
        narrow = self._model(recipe.hidden_size, recipe.num_layers, recipe.head_dim)
        trainer = small_trainer(narrow.train(), learning_rate=recipe.learning_rate)
        for step, batch in enumerate(self._batches(recipe.max_steps), start=1):
            # the last third at a lower rate: what is learned wrongly now, PPO would have to unlearn
            trainer.learning_rate = recipe.learning_rate * (0.3 if step > recipe.min_steps * 2 // 3 else 1.0)
            trainer.learn(OneForward(partial(next_token_loss, batch=batch)), f"of step {step}")
            self.progress("training the demo target", 0.7 * step / recipe.max_steps)
            if step % recipe.steps_between_checks or step < recipe.min_steps:
                continue
            self._steer(self.estimate_accuracy(narrow, recipe.num_check_prompts), step)
            if self._fits(self.estimate) and self._fits(
                self.measure_accuracy(narrow, recipe.num_check_prompts)
            ):
                wide = widen(narrow, factor=recipe.grown_width, seed=self.seed)
                return narrow, deepen(wide, num_layers=recipe.grown_layers, seed=self.seed)
        raise RlhfSpecError(
            f"the demo target reached accuracy {self.estimate:.2f} in {recipe.max_steps} steps; expected "
            f"{recipe.min_accuracy} to {recipe.max_accuracy}; try another run.seed"
        )

    def make_draft(self, teacher: PreTrainedModel) -> PreTrainedModel:
        """Distil the one-layer draft from the teacher."""
        recipe = self.recipe
        draft = self._model(recipe.draft_hidden_size, 1, recipe.draft_hidden_size // 2)
        trainer = small_trainer(draft.train(), learning_rate=recipe.draft_learning_rate)
        teacher.eval()
        for step, batch in enumerate(self._batches(recipe.draft_steps), start=1):
            trainer.learning_rate = recipe.draft_learning_rate * (1.0 - 0.9 * step / recipe.draft_steps)
            trainer.learn(OneForward(partial(distilled_loss, teacher=teacher, batch=batch)), "of the draft")
            self.progress("distilling the demo draft", 0.7 + 0.3 * step / recipe.draft_steps)
        return draft.eval()

    @torch.inference_mode()
    def estimate_accuracy(self, model: PreTrainedModel, num_prompts: int) -> float:
        """Mean probability of the right solution, letter by letter: cheap, and without sampling noise.

        It misses only samples that are right in spite of a slip, so it is a little low.
        """
        model.eval()
        total = 0.0
        for batch in self._collate([self._solved(p) for p in self.check_problems(num_prompts)]):
            logits = model(input_ids=batch.ids, use_cache=False).logits[:, :-1]
            logprobs = torch.log_softmax(logits, dim=-1).gather(-1, batch.ids[:, 1:, None]).squeeze(-1)
            total += float((logprobs * batch.where).sum(dim=1).exp().sum())
        model.train()
        return total / num_prompts

    def measure_accuracy(self, model: PreTrainedModel, num_prompts: int) -> float:
        """Share of right answers in samples at T = 1 on problems of the task's own distribution."""
        problems = self.check_problems(num_prompts)
        prompts = [
            Prompt(prompt_id=i, token_ids=np.asarray(self.tokenizer.encode(p.prompt)), text=p.prompt)
            for i, p in enumerate(problems)
        ]
        responses = sample_responses(
            model,
            [prompt.token_ids for prompt in prompts],
            max_new_tokens=MAX_RESPONSE_TOKENS + 8,
            eos_token_id=token_id(self.tokenizer, "eos"),
            pad_token_id=token_id(self.tokenizer, "pad"),
            seed=self.seed,
        )
        texts = [
            str(self.tokenizer.decode(tokens.tolist(), skip_special_tokens=True)) for tokens in responses
        ]
        rewards = [chain_reward(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
        self.accuracy = float(np.mean([reward.parts["correct"] for reward in rewards]))
        return self.accuracy

    def _fits(self, accuracy: float) -> bool:
        return self.recipe.min_accuracy <= accuracy <= self.recipe.max_accuracy

    def _steer(self, estimate: float, step: int) -> None:
        """Slip more where the imitator is too good, less where it stays too weak for long."""
        self.estimate = estimate
        if estimate > self.recipe.max_accuracy:
            self.slip_rate = min(0.25, self.slip_rate * 1.2)
        elif estimate < self.recipe.min_accuracy and step > self.recipe.max_steps // 3:
            self.slip_rate *= 0.9

    def check_problems(self, num: int) -> list[ChainProblem]:
        """The held-out problems of every check; the seed decides them."""
        rng = np.random.default_rng([self.seed, 0xACC])
        return [draw_problem(rng) for _ in range(num)]

    def _model(self, hidden_size: int, num_layers: int, head_dim: int) -> PreTrainedModel:
        return new_llama(llama_config(self.tokenizer, hidden_size, num_layers, head_dim), self.seed)

    def _batches(self, num: int) -> Iterator[SupervisedBatch]:
        given = 0
        while given < num:
            problems = [draw_problem(self._rng) for _ in range(256)]
            for batch in self._collate([self._solved(p, slip_rate=self.slip_rate) for p in problems]):
                if given < num:
                    given += 1
                    yield batch

    def _collate(self, examples: list[Example]) -> list[SupervisedBatch]:
        return supervised_batches(
            examples,
            max_tokens=self.recipe.batch_tokens,
            pad_token_id=token_id(self.tokenizer, "pad"),
            rng=self._rng,
        )

    def _solved(self, problem: ChainProblem, *, slip_rate: float = 0.0) -> Example:
        prompt = self.tokenizer.encode(problem.prompt)
        answer = self.tokenizer.encode(solution(problem, slip_rate=slip_rate, rng=self._rng))
        return Example(
            token_ids=np.asarray([*prompt, *answer, token_id(self.tokenizer, "eos")]),
            num_prompt_tokens=len(prompt),
        )


def demo_configs(recipe: DemoRecipe | None = None) -> tuple[LlamaConfig, LlamaConfig]:
    """Configs of target and draft as they will be made: their sizes are known before."""
    recipe = recipe or DemoRecipe()
    tokenizer = character_tokenizer(CHAIN_ALPHABET)
    wide = recipe.hidden_size * recipe.grown_width
    return (
        llama_config(tokenizer, wide, recipe.grown_layers, recipe.head_dim),
        llama_config(tokenizer, recipe.draft_hidden_size, 1, recipe.draft_hidden_size // 2),
    )


def llama_config(
    tokenizer: PreTrainedTokenizerFast, hidden_size: int, num_layers: int, head_dim: int, **settings: Any
) -> LlamaConfig:
    """Half as many key-value heads as query heads, untied; `settings` of transformers for what is otherwise."""
    usual = {"intermediate_size": hidden_size * 11 // 4, "max_position_embeddings": 1024}
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // head_dim,
        num_key_value_heads=max(1, hidden_size // head_dim // 2),
        head_dim=head_dim,
        bos_token_id=None,
        eos_token_id=token_id(tokenizer, "eos"),
        pad_token_id=token_id(tokenizer, "pad"),
        tie_word_embeddings=False,
        **{**usual, "initializer_range": 0.06, **settings},
    )


@torch.inference_mode()
def sample_responses(
    model: PreTrainedModel,
    prompts: Sequence[np.ndarray],
    *,
    max_new_tokens: int,
    eos_token_id: int,
    pad_token_id: int,
    temperature: float = 1.0,
    seed: int = 0,
    batch_size: int = 128,
) -> list[np.ndarray]:
    """Sample one response a prompt; int64 tokens, the end token included, padding cut off.

    The model's training mode and the global random state come back as they were.
    """
    was_training = model.training
    model.eval()
    responses: list[np.ndarray] = []
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for start in range(0, len(prompts), batch_size):
            batch = prompts[start : start + batch_size]
            longest = max(len(prompt) for prompt in batch)
            ids = torch.full((len(batch), longest), pad_token_id, dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for row, prompt in enumerate(batch):
                ids[row, longest - len(prompt) :] = torch.from_numpy(prompt)
                mask[row, longest - len(prompt) :] = 1
            output = model.generate(  # type: ignore[operator]
                ids,
                attention_mask=mask,
                do_sample=True,
                temperature=temperature,
                top_k=0,
                top_p=1.0,
                max_new_tokens=max_new_tokens,
                pad_token_id=pad_token_id,
                eos_token_id=eos_token_id,
            )
            responses += [_cut(row[longest:].numpy(), eos_token_id) for row in output]
    model.train(was_training)
    return responses


def _cut(tokens: np.ndarray, eos_token_id: int) -> np.ndarray:
    ends = np.flatnonzero(tokens == eos_token_id)
    return tokens[: ends[0] + 1] if len(ends) else tokens
