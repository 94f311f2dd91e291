"""The automaton holds every substring of texts that grow in turn, and no other; what follows is counted."""

import random

from rlhfspec.engine.drafters.suffix_automaton import ROOT, SuffixAutomaton


def accepted(automaton: SuffixAutomaton) -> set[tuple[int, ...]]:
    found, open_paths = set(), [(ROOT, ())]
    while open_paths:
        state, path = open_paths.pop()
        for token, to in automaton.next[state].items():
            found.add((*path, token))
            open_paths.append((to, (*path, token)))
    return found


def substrings(texts: list[list[int]]) -> set[tuple[int, ...]]:
    return {
        tuple(text[begin:end])
        for text in texts
        for begin in range(len(text))
        for end in range(begin + 1, len(text) + 1)
    }


def longest_that_goes_on(text: list[int], texts: list[list[int]]) -> list[int]:
    for begin in range(len(text)):
        ending = text[begin:]
        if any(
            other[at : at + len(ending)] == ending and at + len(ending) < len(other)
            for other in texts
            for at in range(len(other))
        ):
            return ending
    return []


def test_texts_that_grow_in_turn_are_held_whole_and_matched_by_their_longest_ending():
    draw = random.Random(0)
    for _ in range(60):
        texts: list[list[int]] = [[] for _ in range(draw.randint(1, 4))]
        states, automaton = [ROOT] * len(texts), SuffixAutomaton()
        for _ in range(draw.randint(1, 40)):
            which, token = draw.randrange(len(texts)), draw.randrange(3)
            texts[which].append(token)
            states[which] = automaton.write(states[which], token)
            for text, state in zip(texts, states, strict=True):
                ending, at = longest_that_goes_on(text, texts), ROOT
                for each in ending:
                    at = automaton.next[at][each]
                assert automaton.elsewhere(state) == at
        assert accepted(automaton) == substrings(texts)
        assert len(automaton) <= 2 * sum(map(len, texts)) + 1


def test_what_followed_most_often_is_proposed_with_its_share():
    automaton = SuffixAutomaton()
    for text in ([1, 2, 3], [1, 2, 3], [1, 2, 4], [1, 2, 3]):
        state = ROOT
        for token in text:
            state = automaton.write(state, token)
    state = automaton.next[automaton.next[ROOT][1]][2]
    best = automaton.best_next(state)
    assert best is not None and (best[0], best[2]) == (3, 0.75)
    assert automaton.best_next(best[1]) is None
