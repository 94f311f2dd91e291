"""Where a response ends by its text: behind the first token that completes a stop string."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Int
from tokenizers import Tokenizer

_PART_OF_A_CHARACTER = "\ufffd"
_MORE_TOKENS = 8
"That a window has beyond one a byte: of some tokenizers the first token's text depends on what is before it."
_MOST_KEPT = 64
"Sets of stop strings whose last tokens are known: a byte for each token of the vocabulary."


class StopStrings:
    """Finds stop strings in what is sampled: a pure function of a response's tokens, however many a step emits.

    In the text with special tokens and, where readers see none of them, in what they see. Every other token has a byte
    of text at least, so the tokens that a stop string spans are at most its bytes.
    """

    def __init__(self, decoder: Tokenizer, num_ids: int, *, hides_special: bool = False) -> None:
        """`learning.data.chat.end_tokens.stop_strings` makes them of a tokenizer with `num_ids` ids."""
        self._decoder, self._num_ids = decoder, num_ids
        self._may_complete: dict[tuple[str, ...], Bool[np.ndarray, " V"]] = {}
        added = decoder.get_added_tokens_decoder() if hides_special else {}
        self._special = [one for one, token in added.items() if token.special]

    def first_end(
        self, before: Int[np.ndarray, " T"], new: Int[np.ndarray, " N"], stop: tuple[str, ...]
    ) -> int | None:
        """Return the place in `new` of the first token that completes a stop string; None: none does.

        Args:
            before: what was sampled before, without a gap.
            new: what was sampled now.
            stop: the stop strings.
        """
        window = max(len(text.encode()) for text in stop) + _MORE_TOKENS
        ids = np.concatenate([before[-window:], new])
        num_before = len(ids) - len(new)
        for place in np.flatnonzero(self._candidates(stop)[new]).tolist():
            end = num_before + place
            shown = ids[max(end - window, 0) : end + 1]
            if self._completes(shown, stop):
                return place
            hidden = np.isin(shown, self._special)
            if hidden.any() and not hidden[-1]:
                whole = np.concatenate([before, new[: place + 1]])
                if self._completes(whole[~np.isin(whole, self._special)][-window - 1 :], stop):
                    return place
        return None

    def _completes(self, ids: Int[np.ndarray, " T"], stop: tuple[str, ...]) -> bool:
        text, without = self._text(ids.tolist()), self._text(ids[:-1].tolist())
        return any(text.rfind(one) > without.rfind(one) for one in stop)

    def _text(self, ids: list[int]) -> str:
        return self._decoder.decode(ids, skip_special_tokens=False)

    def _candidates(self, stop: tuple[str, ...]) -> Bool[np.ndarray, " V"]:
        """Tokens whose text has a stop string's last character, or a part of one: no other completes it."""
        if stop not in self._may_complete:
            ends = {_PART_OF_A_CHARACTER, *(text[-1] for text in stop)}
            # twice: the first token of a text may lose the space before it
            texts = self._decoder.decode_batch(
                [[one, one] for one in range(self._num_ids)], skip_special_tokens=False
            )
            while len(self._may_complete) >= _MOST_KEPT:
                del self._may_complete[next(iter(self._may_complete))]
            self._may_complete[stop] = np.array([not ends.isdisjoint(text) for text in texts])
        return self._may_complete[stop]
