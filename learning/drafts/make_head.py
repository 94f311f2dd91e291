"""Makes a draft head for a target from nothing but prompts: own responses, some passes, acceptance held out.

Source: Hu et al. 2025, 'TLT' (arXiv 2511.16665), section 4 (a drafter is warmed up before the first run).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...core.errors import ConfigError, DataError
from ...core.records import Prompt, SamplingParams
from ...engine.drafters.head.head_weights import HeadWeights
from ...engine.numerics import on_threads
from ...engine.weights.causal_lm import PreTrainedModel
from .evaluate_head import Acceptance, OwnResponse, Responder, drafted_response
from .features import num_anchors, pack_sequences
from .head import (
    DRAFT_VOCABULARY,
    HeadModule,
    TargetParts,
    draft_vocabulary,
    expected_counts,
    fresh_head,
)
from .head_trainer import HeadTrainer
from .stoppable import fastest_dtype

Tick = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRecipe:
    """How a head is made; the budget of seconds may end each part earlier."""

    draft_vocab_size: int = DRAFT_VOCABULARY
    num_tokens: int = 36_000
    "of own responses that are learned from"
    max_passes: int = 3
    num_unrolled: int = 3
    learning_rate: float = 2e-3
    last_rate: float = 0.05
    "of the learning rate, at the end"
    step_anchors: int = 256
    "positions of an optimizer step, but at least one response"
    generate_share: float = 0.65
    "of the budget, at most"
    evaluate_share: float = 0.06
    held_out_share: float = 0.08
    "of the responses"
    num_levels: int = 6
    "drafted for the acceptance that is told"
    num_threads: int = 1
    "of torch, for training; on a busy machine several wait for each other at every operation"


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeHead:
    """A head and what is known of it."""

    head: HeadWeights
    num_tokens: int
    "response tokens that were there to be learned from"
    num_learned_tokens: int
    "learned from, repeated ones each time"
    num_steps: int
    acceptance: Acceptance
    "on responses that it did not learn from"
    generate_s: float
    train_s: float
    seconds: float
    "in all"


def make_head(
    target: PreTrainedModel,
    prompts: Sequence[Prompt],
    *,
    sampling: SamplingParams,
    vocab_size: int,
    budget_s: float,
    seed: int = 0,
    recipe: HeadRecipe | None = None,
    progress: Tick = lambda stage, share: None,
    clock: Callable[[], float] = time.perf_counter,
) -> MadeHead:
    """Make a head within about `budget_s` seconds.

    Args:
        target: in eval mode; on the device that it is to be decoded on.
        prompts: that it answers, in their order.
        sampling: of the run that the head is for; its stop tokens are always in the draft vocabulary.
        vocab_size: real token ids of the tokenizer.
        budget_s: for all of it, loading excepted.
        seed: of responses, first weights and the order of training.
        recipe: sizes and shares.
        progress: told a stage and the share of the budget that is spent.
        clock: seconds.

    Raises:
        ModelError: the target's layers are not Llama's or its kin's, or its context is too short.
        DataError: fewer than two prompts.
        ConfigError: the budget is over before two responses are there, or before a single step; no step could be taken.
        NotFiniteError: the target's logits are not.
    """
    if len(prompts) < 2:
        raise DataError(
            f"a draft head needs two prompts at least, one to learn from and one held out, got {len(prompts)}; give "
            "hundreds"
        )
    maker = _Maker(target, sampling, recipe or HeadRecipe(), budget_s, seed, progress, clock)
    return maker.make(prompts, vocab_size)


def learn_head(
    target: PreTrainedModel,
    learned_from: Sequence[OwnResponse],
    held_out: Sequence[OwnResponse],
    *,
    sampling: SamplingParams,
    vocab_size: int,
    seed: int = 0,
    recipe: HeadRecipe | None = None,
    progress: Tick = lambda stage, share: None,
) -> MadeHead:
    """Make a head from responses that are there already, however long it takes; otherwise as `make_head`."""
    maker = _Maker(target, sampling, recipe or HeadRecipe(), math.inf, seed, progress, time.perf_counter)
    return maker.learn(learned_from, held_out, vocab_size)


class _Maker:
    def __init__(
        self,
        target: PreTrainedModel,
        sampling: SamplingParams,
        recipe: HeadRecipe,
        budget_s: float,
        seed: int,
        progress: Tick,
        clock: Callable[[], float],
    ) -> None:
        self._target, self._sampling, self._recipe = target, sampling, recipe
        self._seed, self._progress, self._clock = seed, progress, clock
        self._budget_s, self._began_s = budget_s, clock()
        self._parts = TargetParts.of(target)

    def make(self, prompts: Sequence[Prompt], vocab_size: int) -> MadeHead:
        """See `make_head`."""
        responses = list(self._responses(prompts, vocab_size))
        if len(responses) < 2:
            raise ConfigError(
                f"a draft head needs two responses at least, one to learn from and one held out; {self._budget_s:g} s "
                f"were enough for {len(responses)}; give --budget more seconds, or lower --max-new-tokens"
            )
        # they come in the order of their ends, the short ones first
        responses.sort(key=lambda each: each.key.sample_index)
        every = max(2, round(1.0 / self._recipe.held_out_share))
        held_out = responses[::every]
        learned_from = [each for place, each in enumerate(responses) if place % every]
        return self.learn(learned_from, held_out, vocab_size)

    def learn(
        self, learned_from: Sequence[OwnResponse], held_out: Sequence[OwnResponse], vocab_size: int
    ) -> MadeHead:
        """See `learn_head`."""
        generate_s = self._spent_s
        with on_threads(self._recipe.num_threads):
            trainer = self._trainer(learned_from, vocab_size)
            num_learned = self._train(trainer, learned_from)
            train_s = self._spent_s - generate_s
            acceptance = self._acceptance(trainer.module, held_out)
        return MadeHead(
            head=trainer.head,
            num_tokens=sum(each.num_tokens for each in learned_from),
            num_learned_tokens=num_learned,
            num_steps=trainer.num_steps,
            acceptance=acceptance,
            generate_s=generate_s,
            train_s=train_s,
            seconds=self._spent_s,
        )

    @property
    def _spent_s(self) -> float:
        return self._clock() - self._began_s

    def _tick(self, stage: str) -> None:
        self._progress(stage, min(self._spent_s / self._budget_s, 1.0))

    def _responses(self, prompts: Sequence[Prompt], vocab_size: int) -> Iterator[OwnResponse]:
        """Own responses until there are tokens enough, for the held-out ones too, or the share of time is spent."""
        recipe = self._recipe
        longest = max(len(prompt.token_ids) for prompt in prompts)
        responder = Responder(
            self._target,
            self._parts.taps,
            vocab_size=vocab_size,
            max_total_tokens=longest + self._sampling.max_new_tokens,
        )
        wanted, have = recipe.num_tokens / (1.0 - recipe.held_out_share), 0

        def enough() -> bool:
            self._tick("own responses")
            return have >= wanted or self._spent_s >= recipe.generate_share * self._budget_s

        for response in responder.responses(prompts, self._sampling, seed=self._seed, should_stop=enough):
            have += response.num_tokens
            yield response

    def _trainer(self, responses: Sequence[OwnResponse], vocab_size: int) -> HeadTrainer:
        self._tick("draft vocabulary")
        parts, recipe = self._parts, self._recipe
        sequences = [each.sequence for each in responses]
        counts = expected_counts(sequences, parts, temperature=self._sampling.temperature)
        token_ids = draft_vocabulary(
            min(recipe.draft_vocab_size, vocab_size),
            vocab_size,
            counts=counts,
            prompts=[np.asarray(each.prompt.token_ids) for each in responses],
            always=self._sampling.stop_token_ids,
        )
        return HeadTrainer(
            fresh_head(self._target, token_ids, taps=parts.taps, seed=self._seed),
            parts,
            learning_rate=recipe.learning_rate,
            num_unrolled=recipe.num_unrolled,
            temperature=self._sampling.temperature,
            compute_dtype=fastest_dtype() if parts.embedding.device.type == "cpu" else torch.bfloat16,
        )

    def _train(self, trainer: HeadTrainer, responses: Sequence[OwnResponse]) -> int:
        """Passes over all responses, at a falling rate, until the time for it is over; tokens learned from."""
        recipe = self._recipe
        end_s = self._budget_s * (1.0 - recipe.evaluate_share)
        began_s = self._spent_s
        total = recipe.max_passes * sum(num_anchors(each.sequence) for each in responses)
        seen, learned = 0, 0
        rng = np.random.default_rng([self._seed, 0x4EAD])
        for number in range(recipe.max_passes):
            order = [responses[index].sequence for index in rng.permutation(len(responses))]
            for pack in pack_sequences(order, recipe.step_anchors):
                # whichever ends the training first
                share = max(seen / total, (self._spent_s - began_s) / (end_s - began_s))
                trainer.learning_rate = recipe.learning_rate * (
                    1.0 - (1.0 - recipe.last_rate) * min(share, 1.0)
                )
                report = trainer.step([order[index] for index in pack], lambda: self._spent_s >= end_s)
                if report is not None:
                    seen, learned = seen + report.num_anchors, learned + report.num_learned
                    self._tick(f"pass {number + 1} of {recipe.max_passes}")
                elif self._spent_s >= end_s:
                    if not trainer.num_steps:
                        raise ConfigError(
                            f"{self._budget_s:g} s were over before the draft head had learned anything; give "
                            "--budget more seconds"
                        )
                    return learned
        if not trainer.num_steps:
            raise ConfigError(
                "no step of the draft head was taken: the gradient of every one was not finite, or no response has a "
                "position to draft from; look at the target's hidden states (a dtype that overflows) and at its "
                "responses"
            )
        return learned

    def _acceptance(self, head: HeadModule, responses: Sequence[OwnResponse]) -> Acceptance:
        """On held-out responses, as many as there is time for, but one."""
        found = []
        for response in responses:
            self._tick("acceptance")
            found.append(
                drafted_response(
                    head,
                    response.sequence,
                    response.key,
                    embedding=self._parts.embedding,
                    temperature=self._sampling.temperature,
                    num_levels=self._recipe.num_levels,
                )
            )
            if self._spent_s >= self._budget_s:
                break
        return Acceptance.of(found)
