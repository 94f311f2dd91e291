"""The tokenizers that the project makes itself: one token a character or a word, and byte-level BPE."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ...core.errors import ModelError

_LONG_RUN = re.compile(r"\S{1025}|\s{1025}")
_PIECE = re.compile(r"\S{1,256}|\s{1,256}")
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"


def character_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token a character; ids 0 and 1 are padding and end of sequence."""
    vocab = {token: index for index, token in enumerate([PAD, EOS, UNKNOWN, *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return _wrap(tokenizer)


def word_tokenizer(
    words: Sequence[str], *, special: Sequence[str] = (), end: str = EOS
) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token a word between blanks; ids 0 and 1 are padding and end of sequence."""
    vocab = {token: index for index, token in enumerate([PAD, end, UNKNOWN, *special, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = _wrap(tokenizer, end)
    wrapped.add_special_tokens({"additional_special_tokens": list(special)})
    return wrapped


def train_bpe(texts: Iterable[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer; digits stay single, so that numbers are spelled alike.

    Source: Sennrich et al. 2016 (BPE); Radford et al. 2019, section 2.2 (bytes).
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_without_long_runs(texts), trainer)
    return _wrap(tokenizer)


def _without_long_runs(texts: Iterable[str]) -> Iterator[str]:
    """Cut texts with a run of thousands of letters or blanks: training takes the square of a run's length."""
    for text in texts:
        if _LONG_RUN.search(text):
            yield from _PIECE.findall(text)
        else:
            yield text


def token_id(tokenizer: PreTrainedTokenizerBase, which: Literal["eos", "pad"]) -> int:
    """Return the id of the end or padding token. Raises ModelError when there is none."""
    number = tokenizer.eos_token_id if which == "eos" else tokenizer.pad_token_id
    if not isinstance(number, int):
        raise ModelError(f"the tokenizer has no {which} token; expected one; set it in the tokenizer's files")
    return number


def _wrap(tokenizer: Tokenizer, end: str = EOS) -> PreTrainedTokenizerFast:
    unknown = UNKNOWN if tokenizer.token_to_id(UNKNOWN) is not None else None
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=end, unk_token=unknown
    )
