"""Where the engine's noise comes from on a CPU with our own code."""

from __future__ import annotations

from jaxtyping import Int
from torch import Tensor

from rlhfspec.engine.cpu.noise_on_demand import NoiseOnDemand
from rlhfspec.engine.cpu.sampling import LEAST_VOCABULARY
from rlhfspec.engine.decoding.noise import Noise, NoiseSource, id_words


class CpuNoiseSource(NoiseSource):
    """Makes noise when it is looked at, a row in one pass."""

    def of_words(self, words: Int[Tensor, "2 B D"], vocab_size: int) -> Noise:
        """See `NoiseSource`."""
        if vocab_size < LEAST_VOCABULARY:
            return super().of_words(words, vocab_size)
        return NoiseOnDemand(words.numpy(), id_words(vocab_size, self.device))
