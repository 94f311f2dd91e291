"""BPE by the book from a GGUF file's own lists, to hold a converted tokenizer against: slow, no library's tokenizer.

The split is that of llama.cpp for `smollm` (src/llama-vocab.cpp, LLAMA_VOCAB_PRE_TYPE_SMOLLM): digits first, then
GPT-2's expression on what is left of the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import regex

_DIGIT = regex.compile(r"\p{N}")
_GPT2 = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def reference_ids(
    text: str, tokens: Sequence[str], merges: Sequence[str], control: Sequence[str]
) -> list[int]:
    """Token ids of `text`; control tokens are one id each."""
    ids = {token: index for index, token in enumerate(tokens)}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
    found = []
    for part in regex.split("(" + "|".join(map(regex.escape, control)) + ")", text):
        if part in control:
            found.append(ids[part])
        else:
            found += [ids[piece] for word in _words(part) for piece in _merged(word, ranks)]
    return found


def _words(text: str) -> Iterator[str]:
    place = 0
    for digit in _DIGIT.finditer(text):
        yield from (match[0] for match in _GPT2.finditer(text[place : digit.start()]))
        yield digit[0]
        place = digit.end()
    yield from (match[0] for match in _GPT2.finditer(text[place:]))


def _merged(word: str, ranks: dict[tuple[str, ...], int]) -> list[str]:
    letters = _byte_letters()
    pieces = [letters[byte] for byte in word.encode()]
    while True:
        pairs = [(ranks[pair], i) for i, pair in enumerate(pairwise(pieces)) if pair in ranks]
        if not pairs:
            return pieces
        _, i = min(pairs)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]


def _byte_letters() -> dict[int, str]:
    """GPT-2's printable letter for each byte (Radford et al. 2019, encoder.py)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(other)}
