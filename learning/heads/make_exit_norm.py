"""Trains the norm of an early exit: the target's first layers learn nothing, one gain does, from own responses.

The loss is that of the target's distribution under the exit's, position by position: what the last layers will say is
asked of the first ones' state through the target's own output.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from core.errors import ConfigError, DataError
from core.records import Prompt, SamplingParams
from engine.drafters.exit_norm import ExitNorm
from engine.drafters.head.feature_sequence import FeatureSequence
from engine.numerics import on_threads
from learning.heads.operations import fastest_dtype
from learning.heads.own_responses import Responder
from learning.heads.target_parts import TargetParts

STEP_POSITIONS = 256
LEARNING_RATE = 0.02
"Of the gain over the last norm's."
MAX_PASSES = 3
GENERATE_SHARE = 0.65
"Of the budget, at most."
HELD_OUT = 12
"One in so many responses is not learned from."


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeExitNorm:
    """A norm and what is known of it."""

    norm: ExitNorm
    num_tokens: int
    "positions that were there to be learned from"
    num_steps: int
    before: float
    "share of held-out positions where the exit with the target's last norm guesses the sampled token"
    after: float
    "the same with the trained norm"
    seconds: float


def make_exit_norm(
    target: PreTrainedModel,
    prompts: Sequence[Prompt],
    *,
    num_layers: int,
    sampling: SamplingParams,
    vocab_size: int,
    budget_s: float,
    num_tokens: int = 36_000,
    seed: int = 0,
    num_threads: int = 1,
    progress: Callable[[str, float], None] = lambda stage, share: None,
    clock: Callable[[], float] = time.perf_counter,
) -> MadeExitNorm:
    """Make it within about `budget_s` seconds; arguments as of `learning.heads.make_head.make_head`.

    Raises:
        ModelError: the target's layers are not Llama's or its kin's, or its context is too short.
        DataError: fewer than two prompts.
        ConfigError: there are not so many layers, or the budget is over before two responses are there.
        NotFiniteError: the target's logits are not.
    """
    parts = TargetParts.of(target, taps=(num_layers,) * 3)
    have = int(target.config.get_text_config().num_hidden_layers)
    if not 1 <= num_layers < have:
        raise ConfigError(
            f"expected an exit behind 1 to {have - 1} layers, less than the target's, got {num_layers}"
        )
    if len(prompts) < 2:
        raise DataError(f"expected two prompts at least, one of them held out, got {len(prompts)}")
    began_s, count = clock(), 0
    responder = Responder(
        target,
        parts.taps,
        vocab_size=vocab_size,
        max_total_tokens=max(len(prompt.token_ids) for prompt in prompts) + sampling.max_new_tokens,
    )

    def enough() -> bool:
        progress("own responses", min((clock() - began_s) / budget_s, 1.0))
        return count >= num_tokens or clock() - began_s >= GENERATE_SHARE * budget_s

    responses = []
    for response in responder.responses(prompts, sampling, seed=seed, should_stop=enough):
        responses.append(response)
        count += response.num_tokens
    if len(responses) < 2:
        raise ConfigError(
            f"expected two responses at least, one of them held out; {budget_s:g} s were enough for "
            f"{len(responses)}; give --budget more seconds, or lower --max-new-tokens"
        )
    responses.sort(key=lambda each: each.key.sample_index)
    every = min(HELD_OUT, len(responses))
    held_out = [each.sequence for each in responses[::every]]
    learned_from = [each.sequence for place, each in enumerate(responses) if place % every]
    with on_threads(num_threads):
        exit_ = _Exit(parts, vocab_size, sampling.temperature or 1.0)
        before = exit_.share_right(held_out, seed)
        steps = exit_.train(
            learned_from,
            seed=seed,
            is_over=lambda: clock() - began_s >= budget_s,
            tick=lambda: progress("training", min((clock() - began_s) / budget_s, 1.0)),
        )
        after = exit_.share_right(held_out, seed)
    return MadeExitNorm(
        norm=ExitNorm(num_layers=num_layers, num_target_layers=have, gain=exit_.gain.detach().cpu()),
        num_tokens=sum(len(sequence.last) for sequence in learned_from),
        num_steps=steps,
        before=before,
        after=after,
        seconds=clock() - began_s,
    )


class _Exit:
    def __init__(self, parts: TargetParts, vocab_size: int, temperature: float) -> None:
        self._eps, self._temperature = parts.final_norm_eps, temperature
        self._last_gain = parts.final_norm_gain.float()
        device = self._last_gain.device
        self._dtype = fastest_dtype() if device.type == "cpu" else torch.bfloat16
        self._output = parts.output_weight[:vocab_size].to(self._dtype)
        self._scale = torch.ones_like(self._last_gain, requires_grad=True)

    @property
    def gain(self) -> Float[Tensor, " H"]:
        """The norm's."""
        return self._last_gain * self._scale

    def train(
        self,
        sequences: Sequence[FeatureSequence],
        *,
        seed: int,
        is_over: Callable[[], bool],
        tick: Callable[[], None],
    ) -> int:
        """Passes over all positions in random order, at a falling rate; returns the optimizer steps."""
        states, last = _positions(sequences)
        random = torch.Generator().manual_seed(seed)
        adam = torch.optim.Adam([self._scale], lr=LEARNING_RATE)
        order = torch.cat([torch.randperm(len(states), generator=random) for _ in range(MAX_PASSES)])
        packs = order.split(STEP_POSITIONS)
        steps = 0
        for pack in packs:
            if is_over():
                break
            tick()
            adam.param_groups[0]["lr"] = LEARNING_RATE * (1.0 - 0.95 * steps / len(packs))
            with torch.no_grad():
                wanted = self._logits(last[pack], self._last_gain).softmax(-1)
            loss = -(wanted * self._logits(states[pack], self.gain).log_softmax(-1)).sum(-1).mean()
            adam.zero_grad()
            loss.backward()
            adam.step()
            steps += 1
        return steps

    @torch.no_grad()
    def share_right(self, sequences: Sequence[FeatureSequence], seed: int) -> float:
        """Where exit and target choose alike under the same noise."""
        states, last = _positions(sequences)
        random = torch.Generator().manual_seed(seed)
        right = 0
        for some, its_last in zip(states.split(STEP_POSITIONS), last.split(STEP_POSITIONS), strict=True):
            wanted = self._logits(its_last, self._last_gain)
            uniform = torch.rand(wanted.shape, generator=random).clamp_(1e-20, 1.0 - 1e-7)
            noise = -torch.log(-torch.log(uniform)).to(wanted.device)
            guess = self._logits(some, self.gain) + noise
            right += int((guess.argmax(-1) == (wanted + noise).argmax(-1)).sum())
        return right / len(states)

    def _logits(self, states: Tensor, gain: Tensor) -> Float[Tensor, "M V"]:
        """Over the temperature, float32."""
        states = states.to(self._last_gain.device).float()
        normed = F.rms_norm(states, gain.shape, None, self._eps) * gain
        return (normed.to(self._dtype) @ self._output.t()).float() / self._temperature


def _positions(sequences: Sequence[FeatureSequence]) -> tuple[Float[Tensor, "M H"], Float[Tensor, "M H"]]:
    """States behind the exit and behind all layers, of all positions that a response's token follows."""
    hidden = sequences[0].last.shape[-1]
    states = torch.cat([each.taps[each.first :, :hidden] for each in sequences])
    return states, torch.cat([each.last for each in sequences])
