"""Samples of a page: their texts in pieces by where the tokens came from, and how deep drafts were accepted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import tokenizers

from ...core.errors import DataError
from ...core.records import Completion
from ..folder.rollouts import Recorded, locations_in, read_recorded, rollout_files
from ..folder.sample_table import SampleRow, choose_samples

SHOWN = 3
"Of an iteration: the best, the worst, one at random."
MOST_TOKENS = 600
MOST_PROMPT_CHARS = 1500
MOST_DEPTHS = 12
_HALF_A_LETTER = "\ufffd"

DRAFTED, OWN, GIVEN = "drafted", "own", "given"

Decode = Callable[[list[int]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sample as it is shown."""

    why: str
    facts: str
    prompt: str
    pieces: Sequence[tuple[str, str]]
    "text, and where it came from; one piece of no kind where that is not known"
    drafted: str
    num_left_out: int
    "tokens that are not shown"


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationSamples:
    """What the rollouts of one iteration show."""

    iteration: int
    "counted from 1"
    samples: Sequence[Sample]
    depths: Sequence[float] | None
    "share of decode steps in which 1, 2, ... drafted tokens were accepted in a row; None: not recorded"


def read_iterations(run: Path, decode: Decode | None, note: Callable[[str], None]) -> list[IterationSamples]:
    """The first and the last iteration whose rollouts can be read; `note` is told of files that cannot."""
    files = rollout_files(run)
    found: list[IterationSamples] = []
    for order in (files, files[:0:-1]):
        for file in order:
            try:
                recorded = read_recorded(locations_in(file))
            except DataError as error:
                note(str(error))
                continue
            if recorded:
                found.append(_of_iteration(recorded, decode))
                break
    return found if len({one.iteration for one in found}) == len(found) else found[:1]


def read_decoder(folders: Iterable[Path]) -> Decode | None:
    """What turns token ids into text, special tokens kept: of the first folder that has a `tokenizer.json`."""
    for file in (folder / "tokenizer.json" for folder in folders):
        if not file.is_file():
            continue
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception:  # that is all the library raises
            continue
        return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
    return None


def _of_iteration(recorded: Sequence[Recorded], decode: Decode | None) -> IterationSamples:
    number = recorded[0].location.iteration
    rows = [SampleRow.of(one.rollout, one.advantage) for one in recorded]
    by_index = {one.location.key.sample_index: one for one in recorded}
    chosen = choose_samples(rows, SHOWN, seed=number)
    return IterationSamples(
        iteration=number + 1,
        samples=[_sample(why, row, by_index[row.sample_index], decode) for why, row in chosen],
        depths=accepted_depths([one.rollout.completion for one in recorded]),
    )


def accepted_depths(completions: Sequence[Completion]) -> list[float] | None:
    """Share of the decode steps that accepted at least 1, 2, ... drafted tokens; None where that is not recorded."""
    known = [one.draft_depths for one in completions if one.draft_depths is not None]
    num_steps = sum(one.num_decode_steps for one in completions if one.draft_depths is not None)
    if not num_steps:
        return None
    counts = np.bincount(np.concatenate(known), minlength=MOST_DEPTHS + 1)
    deepest = int(counts.nonzero()[0].max(initial=0))
    return [float(count / num_steps) for count in counts[1 : min(deepest, MOST_DEPTHS) + 1]]


def _sample(why: str, row: SampleRow, recorded: Recorded, decode: Decode | None) -> Sample:
    completion = recorded.rollout.completion
    pieces = None if decode is None else text_pieces(completion, decode)
    drafted = ""
    if completion.draft_depths is not None and row.num_tokens:
        num_drafted = int((completion.draft_depths > 0).sum())
        share = num_drafted / row.num_tokens
        drafted = f"{share:.0%} of the tokens drafted, {completion.num_decode_steps} decode steps"
    cut = row.prompt if len(row.prompt) <= MOST_PROMPT_CHARS else f"{row.prompt[:MOST_PROMPT_CHARS]} ..."
    most_chars = 6 * MOST_TOKENS
    return Sample(
        why=why,
        facts=row.facts,
        prompt=cut,
        pieces=pieces or [(row.response[:most_chars], "")],
        drafted=drafted,
        num_left_out=max(0, completion.num_tokens - MOST_TOKENS)
        if pieces
        else int(len(row.response) > most_chars),
    )


def text_pieces(completion: Completion, decode: Decode) -> list[tuple[str, str]] | None:
    """The first MOST_TOKENS tokens as pieces of text of one kind each; None where depths are not known.

    A letter of several tokens belongs to the kind of its last one.
    """
    if completion.draft_depths is None:
        return None
    ids = completion.token_ids[:MOST_TOKENS].tolist()
    depths, sampled = completion.draft_depths.tolist(), completion.is_sampled.tolist()
    kinds = [
        DRAFTED if depth else OWN if is_sampled else GIVEN
        for depth, is_sampled in zip(depths, sampled, strict=True)
    ]
    pieces: list[tuple[str, str]] = []
    end, shown = 0, ""
    for kind, group in groupby(kinds[: len(ids)]):
        end += len(list(group))
        text = decode(ids[:end])
        if end < len(ids):
            text = text.rstrip(_HALF_A_LETTER)
        if not text.startswith(shown):  # a decoder that looks ahead
            return None
        if len(text) > len(shown):
            pieces.append((text[len(shown) :], kind))
        shown = text
    return pieces
