"""Makes a pair from any text or question/answer JSONL: BPE tokenizer, target, distilled draft.

Text is kept as it is (calculator marks such as `<<2*3=6>>` too). An example reads `prompt`, a line
break, `answer`, end token; plain text is cut into paragraphs and has no prompt. The models learn the
form of the answers in minutes on a CPU, not the mathematics: enough to run the whole loop on real data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from ...core.config import DataConfig
from ...core.errors import DataError
from ...engine.weights.causal_lm import PreTrainedModel
from ..data.prompt_rows import read_rows
from ..training.objectives.padded_batches import (
    Example,
    SupervisedBatch,
    distilled_loss,
    next_token_loss,
    supervised_batches,
)
from ..training.trainer_core import OneForward, small_trainer
from .demo_pair import llama_config
from .net2net import deepen, new_llama, widen
from .tokenization import token_id, train_bpe

SEPARATOR = "\n"
"""Between prompt and answer; `data.prompt_template` of a run on such a pair is "{prompt}\\n"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRecipe:
    """Sizes and rates; the time budget is given beside it."""

    vocab_size: int = 768
    max_tokens: int = 320
    "longer examples are left out"
    hidden_size: int = 128
    num_layers: int = 3
    head_dim: int = 32
    grown_width: int = 2
    grown_layers: int = 6
    "the trained target is grown function-preservingly, so that its cost is a target's"
    draft_hidden_size: int = 96
    draft_head_dim: int = 32
    learning_rate: float = 3e-3
    draft_learning_rate: float = 3e-3
    batch_tokens: int = 1536
    draft_share: float = 0.25
    "of the time budget"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextExample:
    """A prompt (may be empty) and what should follow it."""

    prompt: str
    answer: str


def read_examples(data: Sequence[Path], *, prompt_field: str, answer_field: str) -> list[TextExample]:
    """Read .jsonl or .parquet with both fields, or text in paragraphs from any other file.

    Raises DataError: missing, malformed or empty file.
    """
    examples: list[TextExample] = []
    for path in data:
        if Path(path).suffix in (".jsonl", ".json", ".parquet"):
            config = DataConfig(path=str(path), prompt_field=prompt_field, reference_field=answer_field)
            rows = read_rows(config)
            examples += [TextExample(prompt=row.prompt + SEPARATOR, answer=row.reference) for row in rows]
        else:
            examples += [TextExample(prompt="", answer=part) for part in _paragraphs(Path(path))]
    if not examples:
        raise DataError("no example in the data; expected at least one file with text")
    return examples


def _paragraphs(path: Path) -> list[str]:
    if not path.is_file():
        raise DataError(f"data file {path} does not exist; check --data")
    try:
        parts = path.read_text(encoding="utf-8").split("\n\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}; save it as UTF-8") from error
    parts = [part.strip() for part in parts if part.strip()]
    if not parts:
        raise DataError(f"{path} is empty; expected text")
    return parts


class TextPairMaker:
    """Trains tokenizer, target and draft; the step count follows the clock, so runs may differ."""

    def __init__(
        self,
        recipe: TextRecipe,
        examples: Sequence[TextExample],
        *,
        seed: int,
        budget_s: float,
        progress: Callable[[str, float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.recipe = recipe
        self.seed = seed
        self.budget_s = budget_s
        self.progress = progress
        self.clock = clock
        progress("training the tokenizer", 0.0)
        self.tokenizer: PreTrainedTokenizerFast = train_bpe(
            (example.prompt + example.answer for example in examples), vocab_size=recipe.vocab_size
        )
        self._rng = np.random.default_rng([seed, 0x7E87])
        self._examples = self._encode(examples)

    def make_target(self) -> tuple[PreTrainedModel, PreTrainedModel]:
        """Train the target on the answers; return it as trained (narrow) and grown."""
        recipe = self.recipe
        target = self._model(recipe.hidden_size, recipe.num_layers, recipe.head_dim)
        trainer = small_trainer(target.train(), learning_rate=recipe.learning_rate)
        for share, batch in self._timed_batches(self.budget_s * (1.0 - recipe.draft_share)):
            trainer.learning_rate = recipe.learning_rate * _cooling(share)
            trainer.learn(OneForward(partial(next_token_loss, batch=batch)), "of the target")
            self.progress("training the target", share * (1.0 - recipe.draft_share))
        wide = widen(target, factor=recipe.grown_width, seed=self.seed)
        return target.eval(), deepen(wide, num_layers=recipe.grown_layers, seed=self.seed).eval()

    def make_draft(self, teacher: PreTrainedModel) -> PreTrainedModel:
        """Distil a one-layer draft from the target as it was trained: the same function, and cheaper."""
        recipe = self.recipe
        draft = self._model(recipe.draft_hidden_size, 1, recipe.draft_head_dim)
        trainer = small_trainer(draft.train(), learning_rate=recipe.draft_learning_rate)
        for share, batch in self._timed_batches(self.budget_s * recipe.draft_share):
            trainer.learning_rate = recipe.draft_learning_rate * _cooling(share)
            trainer.learn(OneForward(partial(distilled_loss, teacher=teacher, batch=batch)), "of the draft")
            self.progress("distilling the draft", 1.0 - recipe.draft_share * (1.0 - share))
        return draft.eval()

    def _encode(self, examples: Sequence[TextExample]) -> list[Example]:
        eos = token_id(self.tokenizer, "eos")
        encoded: list[Example] = []
        # what lies beyond so many of the longest tokens is cut off anyway, and a book takes minutes to tokenise
        most_chars = (self.recipe.max_tokens + 1) * max(len(token) for token in self.tokenizer.get_vocab())
        for example in examples:
            prompt = self.tokenizer.encode(example.prompt[:most_chars]) if example.prompt else []
            answer = self.tokenizer.encode(example.answer[:most_chars])
            tokens = [*prompt, *answer, eos][: self.recipe.max_tokens + 1]
            whole = len(tokens) <= self.recipe.max_tokens
            # a prompt without its end teaches the wrong thing; of plain text any piece will do
            if whole or not prompt:
                encoded.append(
                    Example(
                        token_ids=np.asarray(tokens[: self.recipe.max_tokens]), num_prompt_tokens=len(prompt)
                    )
                )
        if not encoded:
            raise DataError(
                f"all {len(examples)} examples are longer than {self.recipe.max_tokens} tokens; "
                "expected at least one shorter"
            )
        return encoded

    def _timed_batches(self, seconds: float) -> Iterator[tuple[float, SupervisedBatch]]:
        """Yield (share of the time used, batch) until the time is used up; at least one batch."""
        start, share = self.clock(), 0.0
        while share < 1.0:
            chosen = self._rng.integers(len(self._examples), size=256)
            for batch in supervised_batches(
                [self._examples[i] for i in chosen],
                max_tokens=self.recipe.batch_tokens,
                pad_token_id=token_id(self.tokenizer, "pad"),
                rng=self._rng,
            ):
                yield share, batch
                share = (self.clock() - start) / max(seconds, 1e-9)
                if share >= 1.0:
                    return

    def _model(self, hidden_size: int, num_layers: int, head_dim: int) -> PreTrainedModel:
        config = llama_config(
            self.tokenizer,
            hidden_size,
            num_layers,
            head_dim,
            # a multiple of 32: CPU matrix products over other lengths are not batch-invariant
            intermediate_size=-(-hidden_size * 8 // 96) * 32,
            max_position_embeddings=2048,
            initializer_range=0.05,
        )
        return new_llama(config, self.seed)


def _cooling(share: float) -> float:
    """Full rate for the first third, then linearly down to a twentieth."""
    return 1.0 if share < 1 / 3 else 1.0 - 0.95 * min(1.0, (share - 1 / 3) * 1.5)
