"""Prompts: read from a task, files or data sets, made into what the model sees, tokenised, and kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from ...core.config import DataConfig, SamplingConfig
from ...core.errors import DataError
from ...core.records import Prompt, SamplingParams
from ..tasks.chain_task import draw_problem
from ..tasks.one_sentence import draw_prompts
from .chat.end_tokens import model_end_tokens
from .chat.messages import whole_text
from .encoding import PromptEncoder, Rendered, longest_token
from .left_out import LeftOut, Remarks, RowFilter, Seen
from .packed_prompts import PackedPrompts, PromptPacker
from .prompt_rows import Row, iter_rows
from .raw_records import ReadProgress

DRAWN_PROMPTS = 4096
"""Prompts a generated task draws when data.limit says nothing."""
_ROWS_AT_ONCE = 1024
_CHARS_AT_ONCE = 4_000_000

Tick = Callable[[str, float], None]
"Told a stage and how much of it is done, from 0 to 1."


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One source of a data set: its prompts follow those of the source before it."""

    name: str
    num_prompts: int
    repeats: float = 1.0
    "how often an epoch gives each of its prompts"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptDataset:
    """All prompts of a run, tokenised, in the order of their sources."""

    prompts: Sequence[Prompt]
    sources: tuple[Source, ...] = ()
    "empty: one source"
    left_out: LeftOut | None = None
    remarks: tuple[str, ...] = ()
    "what a user should know of rows that were taken as they are"

    def __post_init__(self) -> None:
        if not isinstance(self.prompts, PackedPrompts):
            object.__setattr__(self, "prompts", PackedPrompts.of(self.prompts))

    def __len__(self) -> int:
        return len(self.prompts)

    def only(self, places: Sequence[int]) -> PromptDataset:
        """The same without some prompts: those at `places`, ascending, of which each keeps its source's weight."""
        ends = np.cumsum([source.num_prompts for source in self.sources])
        counts = np.diff(np.searchsorted(places, ends), prepend=0)
        sources = tuple(
            replace(source, num_prompts=int(count))
            for source, count in zip(self.sources, counts, strict=True)
        )
        return replace(self, prompts=[self.prompts[place] for place in places], sources=sources)

    @property
    def num_skipped(self) -> int:
        """Prompts left out because they were too long (data.on_long_prompt: skip)."""
        return self.left_out.too_long if self.left_out else 0

    @property
    def max_prompt_tokens(self) -> int:
        """Length of the longest prompt."""
        return self._packed.max_tokens

    @property
    def has_conversations(self) -> bool:
        """Whether the chat template has rendered any of them."""
        return self._packed.has_conversations

    @property
    def fingerprint(self) -> str:
        """Of all prompts in their order."""
        return self._packed.fingerprint

    def notes(self) -> list[str]:
        """What a user should know beside the number of prompts: what was left out, and what an epoch is made of."""
        lines = list(self.remarks)
        if self.left_out and (said := self.left_out.describe()):
            lines.append(f"prompts left out: {said}")
        if len(self.sources) > 1:
            visits = [source.num_prompts * source.repeats for source in self.sources]
            lines += [
                f"source {source.name}: {source.num_prompts:,} prompts, each {source.repeats:g} times an epoch, "
                f"{count / sum(visits):.1%} of it"
                for source, count in zip(self.sources, visits, strict=True)
            ]
        return lines

    @property
    def _packed(self) -> PackedPrompts:
        assert isinstance(self.prompts, PackedPrompts)
        return self.prompts


def load_prompts(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int, tick: Tick | None = None
) -> PromptDataset:
    """Read and tokenise the prompts that `data` describes.

    `seed` draws the problems of a generated task; files do not depend on it.
    Raises DataError naming file and line (or row): missing file, malformed record, missing field, chat template
    that refuses, empty data set, prompt longer than `max_prompt_tokens`; ConfigError for `data.filter`.
    """
    loader = _Loader(data, tokenizer, seed, tick or (lambda stage, fraction: None))
    counts = [loader.load(source) for source in data.each_source()]
    prompts, left_out = loader.packer.packed(), loader.left_out
    if not len(prompts):
        raise DataError(
            f"no prompt left of {' and '.join(source.name for source in data.each_source())}: left out "
            f"{left_out.describe() or 'none'} (data.max_prompt_tokens {data.max_prompt_tokens}, min_prompt_tokens "
            f"{data.min_prompt_tokens}); expected at least one; check data.path and data.limit"
        )
    weights = [source.weight for source in data.sources] or [1.0]
    repeats = repeats_of(counts, weights, weight_of=data.weight_of, stopping=data.stopping)
    sources = tuple(
        Source(name=source.name, num_prompts=count, repeats=times)
        for source, count, times in zip(data.each_source(), counts, repeats, strict=True)
    )
    return PromptDataset(prompts=prompts, sources=sources, left_out=left_out, remarks=loader.remarks())


def source_rows(
    data: DataConfig, seed: int, left_out: LeftOut, progress: ReadProgress | None = None
) -> Iterator[Row | DataError]:
    """Yield the rows of a single source, drawn or read, and the faults in the place of rows; see `iter_rows`."""
    if data.task is None:
        return iter_rows(data, left_out, progress)
    return iter(_drawn_rows(data, seed, left_out))


class _Loader:
    """Reads one source after the other into one packer; what is seen before is so over all of them."""

    def __init__(self, data: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int, tick: Tick) -> None:
        self.packer = PromptPacker()
        self.left_out = LeftOut()
        self._data = data
        self._tokenizer = tokenizer
        self._seed = seed
        self._tick = tick
        self._seen = Seen(data.deduplicate) if data.deduplicate != "none" else None
        self._max_chars = data.max_prompt_tokens * longest_token(tokenizer)
        self._first_id = 0
        self._remarks = Remarks(tokenizer)

    def remarks(self) -> tuple[str, ...]:
        """What is to be said of the rows that were taken."""
        self._remarks.notes(self.left_out.notes)
        return self._remarks.lines

    def load(self, data: DataConfig) -> int:
        """Read a source; returns how many prompts it gave."""
        before, progress = len(self.packer), ReadProgress()
        encoder = PromptEncoder(data, self._tokenizer)
        waiting: list[tuple[Row, Rendered]] = []
        last, num_chars = -1, 0
        for item in source_rows(data, self._seed, self.left_out, progress):
            if isinstance(item, DataError):
                raise item
            last = item.index
            if self._seen is not None and self._seen.before(item.prompt, item.messages, item.more):
                self.left_out.duplicates += 1
                continue
            rendered = encoder.render(item)
            self._remarks.turns(rendered.turns, item.origin)
            # a second for a million tokens: what is too long anyway is not tokenised
            if len(rendered.text) > self._max_chars:
                self._pass_over(item, f"{len(rendered.text):,} characters")
                continue
            waiting.append((item, rendered))
            num_chars += len(rendered.text)
            if len(waiting) == _ROWS_AT_ONCE or num_chars > _CHARS_AT_ONCE:
                self._take(waiting, encoder)
                waiting, num_chars = [], 0
                self._tick(f"prompts of {data.name}", progress.fraction)
        self._take(waiting, encoder)
        self._remarks.notes(encoder.notes)
        self._remarks.heads(encoder.unbegun_heads)
        self._first_id += last + 1
        return len(self.packer) - before

    def _take(self, waiting: list[tuple[Row, Rendered]], encoder: PromptEncoder) -> None:
        all_ids = encoder.token_ids([rendered for _, rendered in waiting])
        for (row, rendered), token_ids in zip(waiting, all_ids, strict=True):
            if not token_ids:
                raise DataError(f"{row.origin}: the prompt is empty; expected at least one token")
            if len(token_ids) > self._data.max_prompt_tokens:
                self._pass_over(row, f"{len(token_ids)} tokens")
            elif len(token_ids) < self._data.min_prompt_tokens:
                self.left_out.too_short += 1
            else:
                self.packer.add(
                    Prompt(
                        prompt_id=self._first_id + row.index,
                        token_ids=np.asarray(token_ids, dtype=np.int64),
                        text=row.prompt,
                        reference=row.reference,
                        messages=rendered.messages,
                        turns=rendered.turns if whole_text(rendered.turns) else (),
                        tools=row.tools,
                        fields=row.fields,
                        rendered=rendered.plain if rendered.plain != row.prompt else "",
                        prefill=rendered.prefill,
                    )
                )

    def _pass_over(self, row: Row, got: str) -> None:
        if self._data.on_long_prompt == "skip":
            self.left_out.too_long += 1
            return
        limit = f"{self._data.max_prompt_tokens}"
        if got.endswith("characters"):
            limit += f" (at most {self._max_chars:,} characters)"
        raise DataError(
            f"{row.origin}: the prompt has {got}, data.max_prompt_tokens is {limit}; raise it, or set "
            "data.on_long_prompt to skip"
        )


def sampling_params(
    sampling: SamplingConfig, tokenizer: PreTrainedTokenizerBase, *, model: str | None = None
) -> SamplingParams:
    """Sampling settings as the engine takes them, the end tokens among the stop tokens.

    These are `end_token_ids`, as a run has found them (`chat.end_tokens`); where it is null the tokenizer's
    and, where `model` is given (path or hub name), those of its generation_config.json or config.json.
    """
    ends = sampling.end_token_ids
    known = model_end_tokens(tokenizer, model) if ends is None else ends
    stops = list(dict.fromkeys((*sampling.stop_token_ids, *known)))
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        max_new_tokens=sampling.max_new_tokens,
        stop_token_ids=tuple(stops),
        stop=sampling.stop,
    )


def _drawn_rows(data: DataConfig, seed: int, left_out: LeftOut) -> Iterator[Row]:
    rng = np.random.default_rng([seed, 0xC4A1])
    count = data.skip_rows + (data.limit or DRAWN_PROMPTS)
    if data.task == "chain":
        drawn = [(problem.prompt, problem.answer) for problem in (draw_problem(rng) for _ in range(count))]
    else:
        drawn = draw_prompts(count, rng)
    keep = RowFilter(data.filter) if data.filter is not None else None
    for index, (prompt, reference) in enumerate(drawn):
        origin = f"{data.task} problem {index}"
        if index < data.skip_rows:
            continue
        if keep is not None and not keep.keeps({"question": prompt, "answer": reference}, origin):
            left_out.filtered += 1
            continue
        filled = data.prompt_template.replace("{prompt}", prompt) if data.chat else prompt
        yield Row(prompt=prompt, filled=filled, reference=reference, origin=origin, index=index)


MAX_EPOCH_PROMPTS = 200_000_000
_EXTRA_STREAM = 0xE87A
"Keeps the permutations of partial rounds apart from those of epochs."


def repeats_of(
    sizes: Sequence[int],
    weights: Sequence[float],
    *,
    weight_of: Literal["prompt", "source"],
    stopping: Literal["all_exhausted", "first_exhausted"],
) -> tuple[float, ...]:
    """Return how often an epoch gives each prompt of each source; 0 for a source without prompts.

    Args:
        sizes: prompts of each source.
        weights: above 0; only their ratios count.
        weight_of: prompt: visits of a prompt are in the ratio of the weights; source: visits of all its prompts
            are, as `datasets.interleave_datasets(probabilities=...)` draws.
        stopping: as in `datasets.interleave_datasets`. all_exhausted: every prompt comes at least once an epoch;
            first_exhausted: none comes twice.

    Raises:
        DataError: an epoch would be longer than 200 million prompts.
    """
    rates = [
        weight / (size if weight_of == "source" else 1) if size else 0.0
        for size, weight in zip(sizes, weights, strict=True)
    ]
    present = [rate for rate in rates if rate > 0]
    if not present:
        return tuple(rates)
    unit = min(present) if stopping == "all_exhausted" else max(present)
    repeats = tuple(rate / unit for rate in rates)
    total = sum(size * times for size, times in zip(sizes, repeats, strict=True))
    if total > MAX_EPOCH_PROMPTS:
        raise DataError(
            f"the weights of data.sources make an epoch of {total:,.0f} prompts, as the rarest come at least once; "
            f"expected at most {MAX_EPOCH_PROMPTS:,}; bring the weights closer together, or set data.stopping to "
            "first_exhausted"
        )
    return repeats


class EpochOrder:
    """Prompts of an epoch, by their places in the data set, where sources follow one another: from (seed, epoch) alone.

    Where all repeats are 1, an epoch is every prompt exactly once. Of 1.5, every epoch gives each prompt once and every
    second one again, the others in the next epoch: what is left of whole rounds is taken from a stream of permutations
    of the source that goes on over the epochs, so after any number of epochs two prompts of a source differ by at most
    one visit a round begun.
    """

    def __init__(self, sizes: Sequence[int], repeats: Sequence[float], *, seed: int, shuffle: bool) -> None:
        self._sizes = tuple(sizes)
        self._repeats = tuple(repeats)
        self._seed = seed
        self._shuffle = shuffle

    def order(self, epoch: int) -> np.ndarray:
        """Return [V] int64, the places visited in epoch `epoch`, counted from 0; any epoch costs the same."""
        starts = np.cumsum([0, *self._sizes[:-1]])
        visits = [int(start) + self._visits(source, epoch) for source, start in enumerate(starts)]
        if self._shuffle:
            return np.random.default_rng([self._seed, epoch]).permutation(np.concatenate(visits))
        # each source evenly over the epoch, in its own order
        at = np.concatenate([(np.arange(len(one)) + 0.5) / max(len(one), 1) for one in visits])
        return np.concatenate(visits)[np.argsort(at, kind="stable")]

    def _visits(self, source: int, epoch: int) -> np.ndarray:
        size, times = self._sizes[source], self._repeats[source]
        whole = math.floor(times)
        a_round = np.arange(size, dtype=np.int64)
        extra = (times - whole) * size
        first, last = math.floor(epoch * extra), math.floor((epoch + 1) * extra)
        parts = [a_round] * whole
        while first < last:
            number, begin = divmod(first, size)
            taken = min(size - begin, last - first)
            parts.append(self._round(source, number)[begin : begin + taken])
            first += taken
        return np.concatenate(parts) if parts else a_round[:0]

    def _round(self, source: int, number: int) -> np.ndarray:
        size = self._sizes[source]
        if not self._shuffle:
            return np.arange(size)
        return np.random.default_rng([self._seed, source, number, _EXTRA_STREAM]).permutation(size)
