"""Model pairs the project makes itself: the embedded demo pair (cached) and pairs from a user's text."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ...core.errors import ConfigError, DataError
from ...engine.numerics import on_threads
from ...engine.weights.causal_lm import PreTrainedModel
from .demo_pair import DemoPairMaker, DemoRecipe
from .text_pair import TextPairMaker, TextRecipe, read_examples


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPaths:
    """Folders of two Hugging Face checkpoints with the same tokenizer files in both."""

    target: Path
    draft: Path

    @property
    def complete(self) -> bool:
        """True when both folders hold weights; the draft is written last."""
        return all((folder / "model.safetensors").is_file() for folder in (self.target, self.draft))


def make_demo_pair(
    cache_dir: Path,
    *,
    seed: int = 0,
    progress: Callable[[str, float], None] | None = None,
    recipe: DemoRecipe | None = None,
) -> PairPaths:
    """Return the demo pair, made on the first call and cached under its recipe's hash.

    `progress` gets a line of text and the share done. Two processes that make it at once do not
    disturb each other. Raises ConfigError when the cache cannot be written, RlhfSpecError when training
    does not reach its accuracy.
    """
    recipe = recipe or DemoRecipe()
    described = json.dumps({**dataclasses.asdict(recipe), "seed": seed}, sort_keys=True)
    name = "demo-pair-" + hashlib.sha256(described.encode()).hexdigest()[:12]
    home = Path(cache_dir).expanduser() / name
    pair = PairPaths(target=home / "target", draft=home / "draft")
    if pair.complete:
        return pair
    require_writable(home, "run.cache_dir")
    maker = DemoPairMaker(recipe, seed=seed, progress=progress or _silent)
    with on_threads(1):
        narrow, target = maker.make_target()
        draft = maker.make_draft(narrow)
    notes = {"recipe": dataclasses.asdict(recipe), "seed": seed, "accuracy": maker.accuracy}
    _publish(home, target, draft, maker.tokenizer, notes)
    return pair


def make_pair_from_text(
    data: Sequence[Path],
    out_dir: Path,
    *,
    prompt_field: str = "question",
    answer_field: str = "answer",
    budget_s: float = 180.0,
    seed: int = 0,
    progress: Callable[[str, float], None] | None = None,
    recipe: TextRecipe | None = None,
) -> PairPaths:
    """Make tokenizer, target and draft from question/answer JSONL or plain text within about `budget_s`.

    Raises DataError: a file that cannot be read, is malformed or empty, or `out_dir` holding
    something already; ConfigError: `out_dir` cannot be written.
    """
    out_dir = Path(out_dir).expanduser()
    if out_dir.exists() and any(out_dir.iterdir()):
        raise DataError(
            f"{out_dir} is not empty; expected a new folder for the pair; remove it or name another"
        )
    require_writable(out_dir, "--out")
    examples = read_examples(data, prompt_field=prompt_field, answer_field=answer_field)
    recipe = recipe or TextRecipe()
    maker = TextPairMaker(recipe, examples, seed=seed, budget_s=budget_s, progress=progress or _silent)
    with on_threads(1):
        narrow, target = maker.make_target()
        draft = maker.make_draft(narrow)
    notes = {"recipe": dataclasses.asdict(recipe), "seed": seed, "data": [Path(p).name for p in data]}
    _publish(out_dir, target, draft, maker.tokenizer, notes)
    return PairPaths(target=out_dir / "target", draft=out_dir / "draft")


def require_writable(home: Path, setting: str) -> None:
    """Find out before minutes of work whether a new folder can be written; leaves nothing behind."""
    parent = next(folder for folder in home.absolute().parents if folder.exists())
    try:
        # a folder as `_publish` makes it: permission bits do not tell for root, or a read-only disk
        with tempfile.TemporaryDirectory(prefix=home.name + ".", dir=parent):
            pass
    except OSError as error:
        raise ConfigError(
            f"{home} cannot be written: {parent} takes no new folder ({error.strerror}); "
            f"set {setting} to a folder you may write to"
        ) from error


def _publish(
    home: Path,
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    notes: dict[str, object],
) -> None:
    """Write both checkpoints beside `home` and move them there at once."""
    home.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=home.name + ".", dir=home.parent))
    try:
        for name, model in (("target", target), ("draft", draft)):
            model.save_pretrained(scratch / name)
            tokenizer.save_pretrained(scratch / name)
        (scratch / "recipe.json").write_text(json.dumps(notes, indent=2, default=str) + "\n")
        scratch.chmod(0o755)
        if home.is_dir() and not any(home.iterdir()):
            home.rmdir()
        try:
            os.rename(scratch, home)
        except OSError:
            # another process was first: its pair is as good as ours
            if not PairPaths(target=home / "target", draft=home / "draft").complete:
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _silent(_text: str, _share: float) -> None:
    pass
