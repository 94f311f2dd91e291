"""Log-probabilities of finished responses by the engine's own forward: those of the sampler, bit for bit.

A library forward of the same weights rounds otherwise, so a policy ratio that ought to be 1 is not. Here the values
come from the forward that sampled, fed with the finished responses, and the gradient from the library's forward:
the loss is what it would be if the two were one. The rule that makes it exact is the engine's invariance: what a
token's logits round to depends on its own prefix alone.

Source: He et al. 2025, 'Defeating nondeterminism in LLM inference', section 'Truly on-policy RL'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ...core.config import EngineConfig
from ...core.errors import ConfigError
from ...engine.build import build_scoring_runner
from ...engine.decoding.logprobs import token_logprobs
from ...engine.model.prefill import fill_committed, prefill_packs
from ...engine.model.prefill_plan import PrefillPiece, PrefillPlan, packed_inputs
from ...engine.numerics import describe_numerics, on_threads, resolve_device, resolve_numerics
from ...engine.weights.causal_lm import CausalLM
from .experience import Experience
from .training_forward import note_forward

MOST_SLOTS = 16
"Responses whose caches are held at once."
_LOGITS = 1 << 24
"Of one forward: 64 MiB of float32."

Weights = Iterable[tuple[str, Tensor]]


def require_engine_scoring(engine: EngineConfig, trainer_device: torch.device) -> None:
    """Raise ConfigError where the engine's forward is not promised to give the sampler's bits again."""
    what_to_do = "set trainer.scoring: model, which scores with the learner's own forward"
    if trainer_device.type != "cpu":
        raise ConfigError(
            f"trainer.scoring engine scores with the engine's invariant forward, which is the CPU's; the trainer is "
            f"on {trainer_device.type}; {what_to_do}, or trainer.device: cpu"
        )
    device = resolve_device(engine.device)
    if device.type != "cpu" or resolve_numerics(engine, device) != "invariant":
        raise ConfigError(
            "trainer.scoring engine needs instances with invariant numerics on the CPU; here they are "
            f"{describe_numerics(engine, device)}; set engine.device: cpu with engine.num_threads: 1, or {what_to_do}"
        )


class EngineScorer:
    """An engine's forward over a copy of the published weights; it generates nothing."""

    def __init__(
        self,
        model: CausalLM,
        *,
        engine: EngineConfig,
        max_total_tokens: int,
        vocab_size: int,
        temperature: float,
    ) -> None:
        """Build the forward as the instances do.

        Args:
            model: the target as an instance holds it; owned from here on.
            engine: as the instances have it.
            max_total_tokens: the longest prompt plus the longest response.
            vocab_size: token ids that take part.
            temperature: that responses were sampled at.

        Raises:
            ConfigError: numerics are not invariant.
            ModelError, NumericsError: as `build_engine`.
        """
        require_engine_scoring(engine, model.device)
        self._temperature = temperature
        self._max_total_tokens = max_total_tokens
        self._max_tokens = engine.max_prefill_tokens
        self.holds: str | None = None
        "whose weights were loaded last, by the name that `load` was given"
        with on_threads(1):
            self._runner = build_scoring_runner(
                model,
                engine=engine,
                num_slots=min(engine.max_running_samples, MOST_SLOTS),
                max_total_tokens=max_total_tokens,
                vocab_size=vocab_size,
            )

    def load(self, weights: Weights, *, name: str | None = None) -> None:
        """Score with these weights from here on, rounded to what they are published in. Raises WeightsError."""
        self.holds = None
        with on_threads(1):
            self._runner.load(dict(weights))
        self.holds = name

    def logprobs(self, experience: Experience, rows: Sequence[int] | None = None) -> Float[Tensor, "B R"]:
        """Unfiltered log-probabilities at the sampler's temperature of some samples' response tokens; zeros elsewhere.

        Raises ConfigError for a sample longer than the scorer was built for.
        """
        chosen = list(range(len(experience.lengths)) if rows is None else rows)
        # of all samples: trainers that share them out must fail together
        longest = max(experience.lengths, default=0)
        if longest > self._max_total_tokens:
            raise ConfigError(
                f"a sample of {longest} tokens was to be scored by an engine built for {self._max_total_tokens}; "
                "raise data.max_prompt_tokens or sampling.max_new_tokens to what was sampled"
            )
        out = torch.zeros(experience.mask.shape)
        slots = self._runner.pool.num_slots
        with on_threads(1), torch.inference_mode():
            for start in range(0, len(chosen), slots):
                self._score(experience, chosen[start : start + slots], out)
        self._runner.pool.memory.hold(np.zeros(0, dtype=np.int64))
        return out

    def _score(self, experience: Experience, rows: list[int], out: Tensor) -> None:
        """Score one sample a slot. The last prompt token's logits are those of the first response token."""
        runner = self._runner
        lengths = np.array([experience.lengths[row] for row in rows])
        firsts = np.array([experience.prompt_lengths[row] for row in rows]) - 1
        ids = experience.ids[rows].numpy()
        runner.pool.memory.hold(lengths)
        prompts = [
            PrefillPiece(slot=slot, start=0, length=int(first)) for slot, first in enumerate(firsts) if first
        ]
        fill_committed(runner, ids, prompts, self._max_tokens, cached=np.zeros(len(rows), dtype=np.int64))
        responses = [
            PrefillPiece(slot=slot, start=int(first), length=int(length - 1 - first))
            for slot, (first, length) in enumerate(zip(firsts, lengths, strict=True))
        ]
        per_forward = max(1, min(self._max_tokens, _LOGITS // runner.vocab_size))
        for pack in prefill_packs(responses, per_forward):
            note_forward()
            inputs, positions = packed_inputs(ids, pack)
            plan = PrefillPlan(pool=runner.pool, attention=runner.attention, pieces=pack)
            logits = runner.logits(torch.from_numpy(inputs), torch.from_numpy(positions), plan).float()
            if self._temperature != 1.0:
                # divided as the sampler divides: by a float32 number
                logits = logits / torch.tensor([[self._temperature]], dtype=torch.float32)
            targets = np.concatenate([ids[p.slot, p.start + 1 : p.start + 1 + p.length] for p in pack])
            scored = token_logprobs(logits, torch.from_numpy(targets), 1.0)
            for piece, values in zip(pack, scored.split([p.length for p in pack]), strict=True):
                row, stop = rows[piece.slot], piece.start + piece.length
                sampled = experience.where[row, piece.start : stop]
                begin = int(experience.where[row, : piece.start].sum())
                out[row, begin : begin + int(sampled.sum())] = values[sampled]


class EngineValues:
    """The policy's log-probabilities during one update, by the engine; scored anew after each optimizer step."""

    def __init__(
        self,
        scorer: EngineScorer,
        experience: Experience,
        weights: Callable[[], Iterator[tuple[str, Tensor]]],
        at_start: Float[Tensor, "B R"],
    ) -> None:
        """Begin with the values under the weights before any step; `weights` are as they are when called."""
        self._scorer, self._experience, self._weights = scorer, experience, weights
        self._at_start: Tensor | None = at_start
        equal = at_start == experience.sampler_logprobs
        self.bit_equal_share = float(equal[experience.mask].float().mean())
        "of response tokens whose log-probability is the sampler's, bit for bit"

    def of(self, rows: Sequence[int]) -> Float[Tensor, "B R"]:
        """Values under the weights as they are now, at this trainer's rows. Collective."""
        if self._at_start is not None:
            return self._at_start
        self._scorer.load(self._weights())
        return self._scorer.logprobs(self._experience, rows)

    def changed(self) -> None:
        """The weights changed."""
        self._at_start = None
        if self._scorer.holds == "engine":
            self._scorer.holds = None


def with_values(logprobs: Float[Tensor, " M"], values: Float[Tensor, " M"]) -> Float[Tensor, " M"]:
    """`values` exactly, with the gradient of `logprobs`."""
    # the bracket is 0 to the bit; logprobs + (values - logprobs) would round
    return values + (logprobs - logprobs.detach())
