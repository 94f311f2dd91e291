"""Drafts what followed the same tokens before: in the prompt, in this response, in others to the same prompt.

Suffix trees over earlier responses: SuffixDecoding (arXiv 2411.04975), in RL rollouts DAS (2511.13841). Here one
automaton a prompt holds the prompt and all responses to it, those of the group that are being written among them.
What is held is bounded; the prompts that were looked at longest ago go first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
from jaxtyping import Int

from engine.decoding.running_batch import RunningBatch
from engine.drafters.lookup_drafter import Found, LookupDrafter
from engine.drafters.suffix_automaton import ROOT, SuffixAutomaton

STATE_BYTES = 420
"Of an automaton's state in memory, measured: a dictionary and four numbers."


class _Text:
    """One running sample: how much of it has been written, and where its automaton stands."""

    __slots__ = ("automaton", "num_written", "state")

    def __init__(self, automaton: SuffixAutomaton, state: int, num_written: int) -> None:
        self.automaton, self.state, self.num_written = automaton, state, num_written


class SuffixDrafter(LookupDrafter):
    """Copies what follows most often behind the longest ending that was seen before."""

    def __init__(self, *, memory_mb: float, min_match: int) -> None:
        """`min_match`: shorter matches propose nothing."""
        super().__init__()
        self._min_match = min_match
        self._most_states = int(memory_mb * 1e6 / STATE_BYTES)
        self._prompts: OrderedDict[bytes, tuple[SuffixAutomaton, int]] = OrderedDict()
        "automaton, and its state behind the prompt; the one used last is the last"
        self._texts: dict[int, _Text] = {}

    @property
    def num_states(self) -> int:
        """Of all automata that are held."""
        return sum(len(automaton) for automaton, _ in self._prompts.values())

    def remember(self, responses: Iterable[tuple[Int[np.ndarray, " P"], Int[np.ndarray, " T"]]]) -> None:
        """Take finished responses, of other instances or earlier iterations: token ids of prompt and response."""
        for prompt, response in responses:
            automaton, state = self._of_prompt(prompt)
            _write(automaton, state, response.tolist())
        self._let_go()

    def admit(self, slots: range, batch: RunningBatch) -> None:
        """Begin with what is known of their prompts."""
        for slot in slots:
            num_prompt = int(batch.prompt_lengths[slot])
            automaton, state = self._of_prompt(batch.tokens[slot, :num_prompt])
            self._texts[slot] = _Text(automaton, state, num_prompt)
        self._let_go()

    def move_slot(self, source: int, target: int) -> None:
        """Follow a sample to its new slot."""
        self._texts[target] = self._texts.pop(source)

    def look_up(self, slot: int, batch: RunningBatch, count: int) -> Found:
        """See `LookupDrafter`."""
        text, length = self._texts[slot], int(batch.lengths[slot])
        automaton = text.automaton
        text.state = _write(automaton, text.state, batch.tokens[slot, text.num_written : length].tolist())
        text.num_written = length
        state = automaton.elsewhere(text.state)
        match = min(automaton.length[state], length)
        found = Found([], [], [])
        if match < self._min_match:
            return found
        while len(found.token_ids) < count and (best := automaton.best_next(state)) is not None:
            token, state, share = best
            found.token_ids.append(token)
            found.match_lengths.append(match)
            found.shares.append(share)
            match += 1
        return found

    def _of_prompt(self, prompt: Int[np.ndarray, " P"]) -> tuple[SuffixAutomaton, int]:
        key = prompt.tobytes()
        known = self._prompts.get(key)
        if known is None:
            automaton = SuffixAutomaton()
            known = automaton, _write(automaton, ROOT, prompt.tolist())
            self._prompts[key] = known
        self._prompts.move_to_end(key)
        return known

    def _let_go(self) -> None:
        """Forget the prompts that were used longest ago until the rest fits; a running sample keeps its own."""
        num_states = self.num_states
        while num_states > self._most_states and len(self._prompts) > 1:
            _, (automaton, _) = self._prompts.popitem(last=False)
            num_states -= len(automaton)


def _write(automaton: SuffixAutomaton, state: int, token_ids: list[int]) -> int:
    for token in token_ids:
        state = automaton.write(state, token)
    return state
