"""Drafts what followed the same tokens before: in the prompt, in this response, in others to the same prompt.

What a request itself brings goes first (`look_up_drafter`). What is found is learned from, verified or not.

Suffix trees over earlier responses: SuffixDecoding (arXiv 2411.04975), in RL rollouts DAS (2511.13841). Here one
automaton a prompt holds the prompt and all responses to it, those of the group that are being written among them.
What is held is bounded; the prompts that were used longest ago go first, those of running samples last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
from jaxtyping import Int

from ...core.records import SampleKey
from ..decoding.running_batch import RunningBatch
from .look_up_drafter import Found, LookUpDrafter
from .suffix_automaton import ROOT, SuffixAutomaton

STATE_BYTES = 420
"Of a state in memory: a dictionary and four numbers, 357 bytes measured over 200,000 tokens, and some room."
MOST_LEFT = 4096
"Samples that left before a stop token and may come back: their places in their texts, a few numbers each."


class _Prompt:
    """A prompt and the responses to it; without an automaton once they have been let go."""

    __slots__ = ("automaton", "key", "num_running", "state")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.automaton: SuffixAutomaton | None = SuffixAutomaton()
        self.state = ROOT
        "behind the prompt"
        self.num_running = 0
        "samples in slots"


class _Text:
    """One sample: how much of it has been written, and where its automaton stands."""

    __slots__ = ("num_written", "prompt", "state")

    def __init__(self, prompt: _Prompt, state: int, num_written: int) -> None:
        self.prompt, self.state, self.num_written = prompt, state, num_written


class SuffixDrafter(LookUpDrafter):
    """Copies what follows most often behind the longest ending that was seen before."""

    def __init__(self, vocab_size: int, *, memory_mb: float, min_match: int) -> None:
        """`min_match`: shorter matches propose nothing.

        `memory_mb` is exceeded by no more than the response that is being written. Where running samples alone need
        more, nothing is proposed for those that were admitted longest ago.
        """
        super().__init__(vocab_size)
        self._min_match = min_match
        self._most_states = int(memory_mb * 1e6 / STATE_BYTES)
        self._count = 0
        "states of all automata"
        self._idle: OrderedDict[bytes, _Prompt] = OrderedDict()
        "prompts without a running sample; the one used last is the last"
        self._running: OrderedDict[bytes, _Prompt] = OrderedDict()
        self._texts: dict[int, _Text] = {}
        self._left: OrderedDict[SampleKey, _Text] = OrderedDict()

    @property
    def num_states(self) -> int:
        """Of all automata that are held."""
        held = (*self._idle.values(), *self._running.values())
        return sum(len(prompt.automaton) for prompt in held if prompt.automaton is not None)

    @property
    def may_find(self) -> bool:
        """See `LookUpDrafter`: what was said before."""
        return True

    def remember(self, responses: Iterable[tuple[Int[np.ndarray, " P"], Int[np.ndarray, " T"]]]) -> None:
        """Take finished responses, of other instances or earlier iterations: token ids of prompt and response."""
        for token_ids, response in responses:
            prompt = self._of_prompt(token_ids)
            self._write(prompt, prompt.state, response)

    def admit(self, slots: range, batch: RunningBatch) -> None:
        """Begin with what is known of their prompts; who comes back goes on where it had left."""
        super().admit(slots, batch)
        for slot in slots:
            num_prompt, length = int(batch.prompt_lengths[slot]), int(batch.lengths[slot])
            prompt = self._of_prompt(batch.tokens[slot, :num_prompt])
            prompt.num_running += 1
            if prompt.automaton is not None:
                self._idle.pop(prompt.key, None)
                self._running[prompt.key] = prompt
            text = self._left.pop(batch.requests[slot].key.sample, None)
            if text is None or text.prompt is not prompt or text.num_written > length:
                text = _Text(prompt, prompt.state, num_prompt)
            self._texts[slot] = text

    def move_slot(self, source: int, target: int) -> None:
        """Follow a sample to its new slot."""
        super().move_slot(source, target)
        self._texts[target] = self._texts.pop(source)

    def leave(self, slot: int, batch: RunningBatch) -> None:
        """Write what was not looked up: a last step's tokens, all of them where drafting was suspended."""
        super().leave(slot, batch)
        self._catch_up(slot, batch)
        text = self._texts.pop(slot)
        prompt = text.prompt
        prompt.num_running -= 1
        if prompt.automaton is not None and not prompt.num_running:
            self._idle[prompt.key] = self._running.pop(prompt.key)
        if not batch.has_stopped(slot):
            self._left[batch.requests[slot].key.sample] = text
            if len(self._left) > MOST_LEFT:
                self._left.popitem(last=False)

    def _look_up(self, slot: int, batch: RunningBatch, count: int) -> Found:
        """Return at most `count` tokens that may follow the sample in a slot."""
        text, found = self._catch_up(slot, batch), super()._look_up(slot, batch, count)
        automaton = text.prompt.automaton
        if found.token_ids or automaton is None:
            return found
        state = automaton.elsewhere(text.state)
        match = min(automaton.length[state], text.num_written)
        if match < self._min_match:
            return found
        while len(found.token_ids) < count and (best := automaton.best_next(state)) is not None:
            token, state, share = best
            found.token_ids.append(token)
            found.match_lengths.append(match)
            found.shares.append(share)
            match += 1
        return found

    def _catch_up(self, slot: int, batch: RunningBatch) -> _Text:
        """Write what the sample in a slot has said since."""
        text, length = self._texts[slot], int(batch.lengths[slot])
        text.state = self._write(text.prompt, text.state, batch.tokens[slot, text.num_written : length])
        text.num_written = length
        return text

    def _of_prompt(self, token_ids: Int[np.ndarray, " P"]) -> _Prompt:
        key = token_ids.tobytes()
        known = self._running.get(key) or self._idle.get(key)
        if known is None:
            known = self._idle[key] = _Prompt(key)
            self._count += 1
            known.state = self._write(known, ROOT, token_ids)
        elif key in self._idle:
            self._idle.move_to_end(key)
        return known

    def _write(self, prompt: _Prompt, state: int, token_ids: Int[np.ndarray, " T"]) -> int:
        """Go on with a text of the prompt at `state`, and let go what has no room any more; its state then."""
        automaton = prompt.automaton
        if automaton is None:
            return state
        before = len(automaton)
        for token in token_ids.tolist():
            state = automaton.write(state, token)
        self._count += len(automaton) - before
        while self._count > self._most_states:
            self._let_go(prompt)
        return state

    def _let_go(self, writing: _Prompt) -> None:
        """Forget the prompt used longest ago, of those of running samples only where there is no other."""
        held = (prompt for each in (self._idle, self._running) for prompt in each.values())
        # a newcomer stays rather than who runs longest
        oldest = next((prompt for prompt in held if prompt.num_running or prompt is not writing), writing)
        (self._running if oldest.num_running else self._idle).pop(oldest.key)
        if oldest.automaton is not None:
            self._count -= len(oldest.automaton)
            # samples that stand in it, or left it, keep the rest
            oldest.automaton, oldest.key = None, b""
