"""Every substring of some texts, and where it goes on: a suffix automaton that grows while its texts are written.

Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text"; several texts may grow in turn. A
state stands for substrings that end at the same places. One more token costs a constant number of steps in the mean.
"""

from __future__ import annotations

NO_STATE = -1
ROOT = 0
COUNTED_LINKS = 12
"Of so many ever shorter endings of what was written an occurrence is counted: those that look-ups compare."


class SuffixAutomaton:
    """Texts of token ids. Whoever writes one keeps the state that its last token led to."""

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        "state that each token leads to"
        self.link: list[int] = [NO_STATE]
        "state of the longest ending that occurs elsewhere too"
        self.length: list[int] = [0]
        "tokens of a state's longest substring"
        self.count: list[int] = [0]
        "occurrences, of rare short substrings somewhat fewer"

    def __len__(self) -> int:
        return len(self.link)

    def write(self, state: int, token: int) -> int:
        """Append a token to the text that stands at `state` (ROOT: a new text); the state that it stands at then."""
        state = self._extend(state, token)
        ending, counted = state, 0
        while ending > ROOT and counted < COUNTED_LINKS:
            self.count[ending] += 1
            ending, counted = self.link[ending], counted + 1
        return state

    def elsewhere(self, state: int) -> int:
        """The longest ending of the text at `state` that goes on somewhere; ROOT where none does."""
        while state > ROOT and not self.next[state]:
            state = self.link[state]
        return state

    def best_next(self, state: int) -> tuple[int, int, float] | None:
        """Token that follows most often, the state that it leads to, and its share; None where nothing follows."""
        following = self.next[state]
        if not following:
            return None
        count = self.count
        if len(following) == 1:
            ((token, to),) = following.items()
            return token, to, 1.0
        token, to = max(following.items(), key=lambda item: count[item[1]])
        return token, to, count[to] / max(sum(count[other] for other in following.values()), 1)

    def _extend(self, state: int, token: int) -> int:
        if token in self.next[state]:
            # another text went on like this
            return self._step(state, token)
        new = self._new({}, self.length[state] + 1, 0)
        while state != NO_STATE and token not in self.next[state]:
            self.next[state][token] = new
            state = self.link[state]
        self.link[new] = ROOT if state == NO_STATE else self._step(state, token)
        return new

    def _step(self, state: int, token: int) -> int:
        """The state of the longest substring of `state` with the token behind it, made where it has none of its own."""
        known = self.next[state][token]
        return known if self.length[known] == self.length[state] + 1 else self._split(state, token, known)

    def _split(self, state: int, token: int, known: int) -> int:
        """Give the shorter substrings of `known`, which end at more places from now on, a state of their own."""
        new = self._new(dict(self.next[known]), self.length[state] + 1, self.count[known])
        self.link[new] = self.link[known]
        self.link[known] = new
        while state != NO_STATE and self.next[state].get(token) == known:
            self.next[state][token] = new
            state = self.link[state]
        return new

    def _new(self, following: dict[int, int], length: int, count: int) -> int:
        self.next.append(following)
        self.link.append(NO_STATE)
        self.length.append(length)
        self.count.append(count)
        return len(self.link) - 1
