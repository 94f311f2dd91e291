"""The running batch: committed tokens of every running sample, slot by slot, on the host.

Arrays are [S, ...] over slots; running samples stand in slots 0..B-1. A sample's root is its last committed
token: it is in no cache yet, and every decode step computes it first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from ...core.records import SampleKey, SampleRequest, WeightSpan
from ...core.sample_state import SampleState
from ..attention.visibility import count_up
from ..upload import upload
from .noise import Noise, NoiseSource, key_words, row_words
from .sampling_rule import RowSampling
from .stop_strings import StopStrings

NO_STOP = -1
LAST_TOKENS = 4
"Committed tokens of a sample that a decode step may ask for on the device."
BEFORE_THE_END = np.arange(-LAST_TOKENS, 0)
NO_WORDS = torch.empty(2, 0, 0, dtype=torch.int32)
MAX_NOISE_AHEAD = 1 << 18
"Values of noise computed at once beyond what the next step needs."
MAX_STEPS_AHEAD = 16
MAX_DEPTH_COUNTED = 255
"Deeper ones count as this."


@dataclass(slots=True, kw_only=True)
class SampleCounters:
    """What a sample has seen so far, for its completion record."""

    num_decode_steps: int = 0
    num_accepted_tokens: int = 0
    weight_spans: tuple[WeightSpan, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """What a decode step reads of the batch on the device."""

    lengths: Int[Tensor, " B"]
    "committed tokens"
    last_tokens: Int[Tensor, "B k"]
    "the last k = LAST_TOKENS committed tokens; of shorter samples the first ones are 0"
    words: Int[Tensor, "2 rows D"]
    "two hash words of each of the next D positions of B rows; empty where noise is made ahead"


class RunningBatch:
    """Tokens, log-probabilities and limits of the running samples."""

    def __init__(
        self, *, num_slots: int, max_total_tokens: int, device: torch.device, noise: NoiseSource
    ) -> None:
        self.device = device
        self._make_noise = noise
        self.requests: list[SampleRequest] = []
        self.counters: list[SampleCounters] = []
        self.tokens = np.zeros((num_slots, max_total_tokens), dtype=np.int64)
        self.policy_logprobs = np.zeros((num_slots, max_total_tokens), dtype=np.float32)
        self.sampling_logprobs = np.zeros((num_slots, max_total_tokens), dtype=np.float32)
        self.draft_depths = np.zeros((num_slots, max_total_tokens), dtype=np.uint8)
        self.lengths = np.zeros(num_slots, dtype=np.int64)
        "committed tokens, prompt and root included"
        self.context_tokens = 0
        "of all running samples together"
        self.prompt_lengths = np.zeros(num_slots, dtype=np.int64)
        self.limits = np.zeros(num_slots, dtype=np.int64)
        "length at which the sample ends"
        self.words = np.zeros((num_slots, 2), dtype=np.int32)
        self.stop_ids = np.full((num_slots, 1), NO_STOP, dtype=np.int64)
        "stop tokens of each sample, padded"
        self.stop_strings: StopStrings | None = None
        self.text_starts = np.zeros(num_slots, dtype=np.int64)
        "where the stretch of sampled tokens begins that a sample goes on with: stop strings are looked for in it"
        self._sampling: RowSampling | None = None
        self._inputs: StepInputs | None = None
        self._rows = np.arange(num_slots)[:, None]
        self._noise: Noise | None = None
        self._noise_start = self._noise_end = self.lengths

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, state: SampleState) -> int:
        """Put a sample into the next slot, with what has been generated of it; returns the slot."""
        request = state.request
        slot, prompt, length = len(self.requests), request.prompt.token_ids, state.num_committed_tokens
        self.requests.append(request)
        self.counters.append(
            SampleCounters(
                num_decode_steps=state.num_decode_steps,
                num_accepted_tokens=state.num_accepted_tokens,
                weight_spans=state.weight_spans,
            )
        )
        self.tokens[slot, : len(prompt)] = prompt
        response = slice(len(prompt), length)
        self.tokens[slot, response] = state.token_ids
        self.policy_logprobs[slot, response] = state.policy_logprobs
        self.sampling_logprobs[slot, response] = state.sampling_logprobs
        self.draft_depths[slot, response] = 0 if state.draft_depths is None else state.draft_depths
        self.lengths[slot], self.prompt_lengths[slot] = length, len(prompt)
        self.context_tokens += length
        self.limits[slot] = len(prompt) + request.sampling.max_new_tokens
        self.words[slot] = key_words(request.key, prompt)
        self._set_stop_ids(slot, request.sampling.stop_token_ids)
        given = [] if request.history is None else np.flatnonzero(~request.history.sampled)
        self.text_starts[slot] = len(prompt) + (given[-1] + 1 if len(given) else 0)
        self._sampling = self._noise = self._inputs = None
        return slot

    def state(self, slot: int, *, weight_version: int) -> SampleState:
        """Return what is known of a running sample."""
        response = slice(int(self.prompt_lengths[slot]), int(self.lengths[slot]))
        return SampleState(
            request=self.requests[slot],
            weight_version=weight_version,
            token_ids=self.tokens[slot, response].copy(),
            policy_logprobs=self.policy_logprobs[slot, response].copy(),
            sampling_logprobs=self.sampling_logprobs[slot, response].copy(),
            draft_depths=self.draft_depths[slot, response].copy(),
            num_decode_steps=self.counters[slot].num_decode_steps,
            num_accepted_tokens=self.counters[slot].num_accepted_tokens,
            weight_spans=self.counters[slot].weight_spans,
        )

    def take_up(self, slot: int, weight_version: int) -> None:
        """Note who goes on with a sample that was just added, see `SampleState.taken_up`."""
        counters, position = self.counters[slot], int(self.lengths[slot] - self.prompt_lengths[slot])
        counters.weight_spans = SampleState.taken_up(counters.weight_spans, position, weight_version)

    def slot_of(self, key: SampleKey) -> int | None:
        """Return the slot of a running sample; None when it does not run here."""
        return next((slot for slot, request in enumerate(self.requests) if request.key == key), None)

    def has_ended(self, slot: int) -> bool:
        """True when a sample stands at its limit or behind a stop token."""
        length = int(self.lengths[slot])
        if length == self.prompt_lengths[slot]:
            return False
        return bool(length == self.limits[slot]) or self.has_stopped(slot)

    def has_stopped(self, slot: int) -> bool:
        """True when a sample stands behind a stop token or string, wherever its limit is."""
        length = int(self.lengths[slot])
        if length == self.prompt_lengths[slot]:
            return False
        last = self.tokens[slot, length - 1 : length]
        return bool(last[0] in self.stop_ids[slot]) or self._text_end(slot, length - 1, last) is not None

    def remove(self, slot: int) -> int:
        """Take a sample out; the last one moves into its slot. Returns the slot it came from."""
        last = len(self.requests) - 1
        self.context_tokens -= int(self.lengths[slot])
        self.requests[slot] = self.requests[last]
        self.counters[slot] = self.counters[last]
        for array in (
            self.tokens,
            self.policy_logprobs,
            self.sampling_logprobs,
            self.draft_depths,
            self.lengths,
            self.prompt_lengths,
            self.limits,
            self.words,
            self.stop_ids,
            self.text_starts,
        ):
            array[slot] = array[last]
        self.requests.pop()
        self.counters.pop()
        self._sampling = self._noise = self._inputs = None
        return last

    def append(
        self,
        token_ids: np.ndarray,
        policy_logprobs: np.ndarray,
        sampling_logprobs: np.ndarray,
        num_accepted: np.ndarray,
    ) -> tuple[int, np.ndarray, np.ndarray]:
        """Commit what a decode step emitted, cut behind stop tokens and strings, and at limits.

        Args:
            token_ids: [B, D]; entries up to num_accepted[b] are emitted.
            policy_logprobs: of them.
            sampling_logprobs: of them.
            num_accepted: [B].

        Returns:
            The number of tokens committed, the slots whose sample is finished, and those of which a committed token
            was chosen by logits that are NaN, +inf, or -inf throughout: it has no finite log-probability.
        """
        live = len(self)
        lengths = self.lengths[:live]
        count = np.minimum(num_accepted + 1, self.limits[:live] - lengths)
        column = np.arange(token_ids.shape[1])
        stops = (token_ids[:, :, None] == self.stop_ids[:live, None]).any(-1) & (column < count[:, None])
        for slot, length in enumerate(lengths.tolist()):
            end = self._text_end(slot, length, token_ids[slot, : count[slot]])
            if end is not None:
                stops[slot, end] = True
        stopped = stops.any(1)
        count = np.where(stopped, stops.argmax(1) + 1, count)
        row, taken = np.nonzero(column < count[:, None])
        target = lengths[row] + taken
        self.tokens[row, target] = token_ids[row, taken]
        policy, sampling = policy_logprobs[row, taken], sampling_logprobs[row, taken]
        self.policy_logprobs[row, target] = policy
        self.sampling_logprobs[row, target] = sampling
        depths = np.where(taken < num_accepted[row], taken + 1, 0)
        self.draft_depths[row, target] = np.minimum(depths, MAX_DEPTH_COUNTED)
        self.lengths[:live] += count
        self._inputs = None
        self.context_tokens += len(row)
        for counters, accepted in zip(self.counters, num_accepted.tolist(), strict=True):
            counters.num_decode_steps += 1
            counters.num_accepted_tokens += accepted
        # a sum is finite only where both are: log-probabilities are never +inf
        broken = row[~np.isfinite(policy + sampling)]
        finished = np.nonzero(stopped | (self.lengths[:live] == self.limits[:live]))[0]
        return len(row), finished, np.unique(broken) if len(broken) else broken

    def _text_end(self, slot: int, length: int, new: np.ndarray) -> int | None:
        """Return which of `new` tokens behind the first `length` completes a stop string first; None: none does."""
        stop = self.requests[slot].sampling.stop
        if not stop or self.stop_strings is None:
            return None
        return self.stop_strings.first_end(self.tokens[slot, self.text_starts[slot] : length], new, stop)

    def _set_stop_ids(self, slot: int, stop_ids: tuple[int, ...]) -> None:
        wider = len(stop_ids) - self.stop_ids.shape[1]
        if wider > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, wider)), constant_values=NO_STOP)
        self.stop_ids[slot] = NO_STOP
        self.stop_ids[slot, : len(stop_ids)] = stop_ids

    @property
    def sampling(self) -> RowSampling:
        """Sampling parameters of the running samples, rebuilt when the batch changes."""
        if self._sampling is None:
            self._sampling = RowSampling.of([r.sampling for r in self.requests], self.device)
        return self._sampling

    def noise(self, levels: int, vocab_size: int) -> Noise:
        """Return the noise of the next `levels` positions of every sample.

        That of a small vocabulary is computed for a few decode steps ahead, as far as MAX_NOISE_AHEAD allows: its cost
        is mostly that of calling. Where one kernel hashes and chooses, nothing is computed ahead.
        """
        live = len(self)
        lengths = self.lengths[:live]
        if not self._make_noise.ahead:
            return self._make_noise.of_words(self.inputs(levels).words, vocab_size)
        ahead = min(MAX_NOISE_AHEAD // (live * vocab_size), MAX_STEPS_AHEAD * levels)
        if ahead <= levels:
            return self._make_noise(self.words[:live], lengths[:, None] + np.arange(levels), vocab_size)
        if self._noise is None or (lengths + levels > self._noise_end).any():
            positions = lengths[:, None] + np.arange(ahead)
            self._noise = self._make_noise(self.words[:live], positions, vocab_size)
            self._noise_start, self._noise_end = lengths.copy(), lengths + ahead
        offset = lengths - self._noise_start
        first = int(offset[0])
        if (offset == first).all():
            return self._noise[:, first : first + levels]
        (index,) = upload([offset[:, None] + np.arange(levels)], self.device)
        return self._noise[count_up(live, self.device)[:, None], index]

    def inputs(self, num_words: int = 0) -> StepInputs:
        """Return what a decode step reads on the device: one copy a step, made when first asked for.

        Args:
            num_words: positions whose hash words are wanted, where noise is made of them.
        """
        num_words = 0 if self._make_noise.ahead else num_words
        if self._inputs is None or (num_words and self._inputs.words.shape[2] < num_words):
            on_device = upload(self.host_inputs(num_words), self.device)
            words = on_device[2] if num_words else NO_WORDS
            self._inputs = StepInputs(lengths=on_device[0], last_tokens=on_device[1], words=words)
        return self._inputs

    def host_inputs(self, num_words: int) -> list[np.ndarray]:
        """Return the same as arrays: lengths [B], last tokens [B, k], words [2, B, D] where D = `num_words` > 0."""
        live = len(self)
        lengths = self.lengths[:live]
        columns = np.maximum(lengths[:, None] + BEFORE_THE_END, 0)
        arrays = [lengths.copy(), self.tokens[self._rows[:live], columns]]
        if num_words:
            arrays.append(self.host_words(num_words))
        return arrays

    def host_words(self, levels: int) -> np.ndarray:
        """Return the hash words of every sample's next positions, int32 [2, B, D]."""
        live = len(self)
        return row_words(self.words[:live], self.lengths[:live, None] + np.arange(levels))

    @property
    def noise_source(self) -> NoiseSource:
        """What makes the noise."""
        return self._make_noise

    @property
    def remaining_tokens(self) -> np.ndarray:
        """Tokens each running response may still get, [B]."""
        live = len(self)
        return self.limits[:live] - self.lengths[:live]
