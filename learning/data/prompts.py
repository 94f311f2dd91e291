"""Prompts: read from a task, files or data sets, made into what the model sees, tokenised, and kept."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from ...core.config import DataConfig, SamplingConfig
from ...core.errors import DataError
from ...core.records import Prompt, SamplingParams
from ..tasks.chain_task import draw_problem
from ..tasks.one_sentence import draw_prompts
from .chat.end_tokens import model_end_tokens
from .chat.messages import Tools, whole_text
from .left_out import LeftOut, Remarks, RowFilter, Seen
from .packed_prompts import PackedPrompts
from .prompt_rows import Row, iter_rows, with_tools
from .prompt_tokens import PromptEncoder, Rendered, longest_token
from .raw_records import ReadProgress
from .record import Record

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

    prompts: PackedPrompts = field(default_factory=PackedPrompts)
    sources: tuple[Source, ...] = ()
    "empty: one source"
    left_out: LeftOut | None = None
    remarks: tuple[str, ...] = ()
    "what a user should know of rows that were taken as they are"

    def __len__(self) -> int:
        return len(self.prompts)

    def only(self, places: Sequence[int]) -> PromptDataset:
        """The same without some prompts: those at `places`, ascending, of which each keeps its source's weight."""
        ends = np.cumsum([source.num_prompts for source in self.sources])
        counts = np.diff(np.searchsorted(places, ends), prepend=0)
        rows = zip(self.sources, counts, strict=True)
        sources = tuple(replace(source, num_prompts=int(count)) for source, count in rows)
        return replace(self, prompts=PackedPrompts(self.prompts[place] for place in places), sources=sources)

    @property
    def pass_prompts(self) -> float:
        """Prompts of one epoch: weighted sources come as often as they say."""
        visits = (source.num_prompts * source.repeats for source in self.sources)
        return sum(visits) if self.sources else len(self.prompts)

    @property
    def max_prompt_tokens(self) -> int:
        """Length of the longest prompt."""
        return self.prompts.max_tokens

    @property
    def has_conversations(self) -> bool:
        """Whether the chat template has rendered any of them."""
        return self.prompts.has_conversations

    @property
    def fingerprint(self) -> str:
        """Of all prompts in their order."""
        return self.prompts.fingerprint

    def notes(self) -> list[str]:
        """What a user should know beside the number of prompts: what was left out, and what an epoch is made of."""
        lines = list(self.remarks)
        if self.left_out and (said := self.left_out.describe()):
            lines.append(f"prompts left out: {said}")
        return [*lines, *source_notes(self.sources, "prompts")]


def source_notes(sources: Sequence[Source], what: str) -> list[str]:
    """What an epoch is made of, where there are several."""
    visits = [source.num_prompts * source.repeats for source in sources]
    return [
        f"source {source.name}: {source.num_prompts:,} {what}, each {source.repeats:g} times an epoch, "
        f"{count / sum(visits):.1%} of it"
        for source, count in zip(sources, visits, strict=True)
        if len(sources) > 1
    ]


def load_prompts(
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    tick: Tick | None = None,
    tools: Tools = (),
) -> PromptDataset:
    """Read and tokenise the prompts that `data` describes.

    `seed` draws the problems of a generated task; files do not depend on it. Chat templates are told of `tools` behind
    those of a row.
    Raises DataError naming file and line (or row): missing file, malformed record, missing field, chat template
    that refuses, empty data set, prompt longer than `max_prompt_tokens`; ConfigError for `data.filter`.
    """
    most = data.max_prompt_tokens * longest_token(tokenizer)
    reader = PromptReader(data, tokenizer, seed=seed, tick=tick, max_chars=most, tools=tools)
    prompts, counts, left_out = PackedPrompts(), list[int](), reader.left_out
    for source in data.each_source():
        taken = reader.read(source)
        if source.order_by is not None:
            taken = sorted(taken, key=lambda one: one[0].place)
        for row, rendered, token_ids in taken:
            prompts.add(
                Prompt(
                    prompt_id=reader.first_id + row.index,
                    token_ids=np.asarray(token_ids, dtype=np.int64),
                    text=row.prompt,
                    reference=row.reference,
                    messages=rendered.messages,
                    turns=rendered.turns if whole_text(rendered.turns) else (),
                    tools=row.tools,
                    fields=row.fields,
                    rendered=rendered.plain if rendered.plain != row.prompt else "",
                    prefill=rendered.prefill,
                    teacher_ids=row.teacher_ids,
                )
            )
        counts.append(len(prompts) - sum(counts))
    if not len(prompts):
        raise DataError(
            f"no prompt left of {' and '.join(source.name for source in data.each_source())}: left out "
            f"{left_out.describe() or 'none'} (data.max_prompt_tokens {data.max_prompt_tokens}, min_prompt_tokens "
            f"{data.min_prompt_tokens}); expected at least one; check data.path and data.limit"
        )
    idle = [key for key in ("chat_template", "chat_template_kwargs") if getattr(data, key)]
    if idle and not prompts.has_conversations:
        raise DataError(f"data.{idle[0]} is of conversations: no prompt is one; set data.chat or take it out")
    weights = [source.weight for source in data.sources] or [1.0]
    repeats = repeats_of(counts, weights, weight_of=data.weight_of, stopping=data.stopping)
    rows = zip(data.each_source(), counts, repeats, strict=True)
    sources = tuple(Source(name=one.name, num_prompts=count, repeats=times) for one, count, times in rows)
    return PromptDataset(prompts=prompts, sources=sources, left_out=left_out, remarks=reader.remarks())


class PromptReader:
    """Reads one source after the other; what was seen before is so over all of them, what is left out is counted."""

    def __init__(
        self,
        data: DataConfig,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        seed: int,
        tick: Tick | None = None,
        max_chars: int | float = math.inf,
        tools: Tools = (),
    ) -> None:
        """Without a tokenizer nothing is too long or too short; a text of more than `max_chars` is too long anyway."""
        self.left_out = LeftOut()
        self.num_rows = 0
        "so far, without those that data.filter left out"
        self.lengths = array("q")
        "of all prompts that were tokenised, too long ones too; in characters without a tokenizer"
        self.first_id = 0
        "of the source that is being read: its row 0"
        self._data, self._tokenizer, self._seed, self._tick = data, tokenizer, seed, tick
        self._max_chars, self._tools = max_chars, tools
        self._seen = Seen(data.deduplicate) if data.deduplicate != "none" else None
        self._next_id = 0
        self._remarks = Remarks(tokenizer)

    def fault(self, error: DataError) -> None:
        """Hear what is wrong with a row, or ends a source; here it is raised."""
        raise error

    def remarks(self) -> tuple[str, ...]:
        """What is to be said of the rows that were taken."""
        self._remarks.notes(self.left_out.notes)
        return self._remarks.lines

    def read(self, source: DataConfig) -> Iterator[tuple[Row, Rendered, Sequence[Any]]]:
        """Yield a source's rows that are prompts, with their token ids, or characters where there is no tokenizer."""
        encoder, progress = PromptEncoder(source, self._tokenizer), ReadProgress()
        self.first_id = self._next_id
        waiting: list[tuple[Row, Rendered]] = []
        num_chars = 0
        try:
            rows: Iterator[Row | DataError] = iter_rows(source, self.left_out, progress)
            if source.task is not None:
                rows = _drawn_rows(source, self._seed, self.left_out)
            for item in rows:
                self.num_rows += 1
                if (rendered := self._rendered(item, encoder)) is None:
                    continue
                waiting.append(rendered)
                num_chars += len(rendered[1].text)
                if len(waiting) == _ROWS_AT_ONCE or num_chars > _CHARS_AT_ONCE:
                    yield from self._taken(waiting, encoder)
                    waiting, num_chars = [], 0
                    if self._tick is not None:
                        self._tick(f"prompts of {source.name}", progress.fraction)
        except DataError as error:
            self.fault(error)
        yield from self._taken(waiting, encoder)
        self._remarks.notes(encoder.notes)
        self._remarks.heads(encoder.unbegun_heads)

    def _rendered(self, item: Row | DataError, encoder: PromptEncoder) -> tuple[Row, Rendered] | None:
        if isinstance(item, DataError):
            return self.fault(item)
        self._next_id = self.first_id + item.index + 1
        if self._seen is not None and self._seen.before(item.prompt, item.messages, item.more):
            self.left_out.duplicates += 1
            return None
        try:
            item = with_tools(item, self._tools)
            rendered = encoder.render(item)
            if self._tools and not rendered.turns:
                raise DataError(
                    f"{item.origin}: environment.tools needs a conversation, got plain text; set data.chat to true"
                )
        except DataError as error:
            return self.fault(error)
        self._remarks.turns(rendered.turns, item.origin)
        # a second for a million tokens: what is too long anyway is not tokenised
        if len(rendered.text) > self._max_chars:
            most = f"{self._data.max_prompt_tokens} (at most {self._max_chars:,} characters)"
            return self._pass_over(item, f"{len(rendered.text):,} characters", most)
        return item, rendered

    def _taken(
        self, waiting: list[tuple[Row, Rendered]], encoder: PromptEncoder
    ) -> Iterator[tuple[Row, Rendered, Sequence[Any]]]:
        data, has_limits = self._data, self._tokenizer is not None
        texts = [rendered for _, rendered in waiting]
        found = encoder.token_ids(texts) if has_limits else [rendered.text for rendered in texts]
        of_teacher = encoder.teacher_ids(texts) if has_limits else [()] * len(texts)
        for (row, rendered), tokens, teacher_ids in zip(waiting, found, of_teacher, strict=True):
            self.lengths.append(len(tokens))
            if not tokens or (has_limits and rendered.for_teacher is not None and not teacher_ids):
                whose = "the teacher's prompt" if tokens else "the prompt"
                self.fault(DataError(f"{row.origin}: {whose} is empty; expected at least one token"))
            elif has_limits and max(len(tokens), len(teacher_ids)) > data.max_prompt_tokens:
                whose = " for the teacher" if len(teacher_ids) > data.max_prompt_tokens else ""
                many = max(len(tokens), len(teacher_ids))
                self._pass_over(row, f"{many} tokens{whose}", f"{data.max_prompt_tokens}")
            elif has_limits and len(tokens) < data.min_prompt_tokens:
                self.left_out.too_short += 1
            else:
                yield replace(row, teacher_ids=teacher_ids) if teacher_ids else row, rendered, tokens

    def _pass_over(self, row: Row, got: str, most: str) -> None:
        if self._data.on_long_prompt == "skip":
            self.left_out.too_long += 1
            return
        self.fault(
            DataError(
                f"{row.origin}: the prompt has {got}, data.max_prompt_tokens is {most}; raise it, or set "
                "data.on_long_prompt to skip"
            )
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
        min_p=sampling.min_p,
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
        yield Row(
            prompt=prompt,
            filled=filled,
            filled_for_teacher=Record(origin=origin).for_teacher(data, prompt, reference),
            reference=reference,
            origin=origin,
            index=index,
        )


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

    def __init__(
        self, sizes: Sequence[int], repeats: Sequence[float | Fraction], *, seed: int, shuffle: bool
    ) -> None:
        self._sizes = tuple(sizes)
        self._repeats = tuple(repeats)
        self._seed = seed
        self._shuffle = shuffle

    @property
    def length(self) -> int:
        """Of an epoch; where repeats are fractions of the sizes, of every one."""
        return sum(math.floor(size * times) for size, times in zip(self._sizes, self._repeats, strict=True))

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
