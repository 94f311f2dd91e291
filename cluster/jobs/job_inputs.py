"""From a config to a supervised job: names resolved, rows read and tokenised, everything checked that can be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import AutoModelForCausalLM
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ...core.checkpoint_manifest import has_manifest, verify_checkpoint
from ...core.config_io import config_text
from ...core.errors import ConfigError, DataError
from ...core.idle import idle_keys
from ...core.settings.supervised import (
    DemonstrationsConfig,
    DpoConfig,
    ExamplesConfig,
    FeedbackConfig,
    PreferencesConfig,
    SftConfig,
    SftLossConfig,
    SupervisedConfig,
    SupervisedModelConfig,
    TrainRewardConfig,
)
from ...engine.weights.causal_lm import max_context_tokens
from ...engine.weights.loading import load_hf_config, load_tokenizer
from ...learning.data.chat.chat_format import named_template
from ...learning.data.chat.template_time import keep_time
from ...learning.data.feedback import encode_feedback, with_unrelated
from ...learning.data.preferences import encode_preferences
from ...learning.data.prompts import Source, repeats_of, source_notes
from ...learning.data.record import Record
from ...learning.data.supervised_rows import Demonstration, encode_demonstrations, read_raw_rows
from ...learning.models.catalog import KNOWN_MODELS, KnownModel, refuse_mistyped
from ...learning.training.supervised_job import SupervisedJob
from ..observe.console import Reporter
from ..plan.inputs import require_cores
from ..plan.model_files import count_params

_KINDS: Mapping[type[SupervisedConfig], Literal["sft", "reward", "dpo"]] = {
    SftConfig: "sft",
    TrainRewardConfig: "reward",
    DpoConfig: "dpo",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A job, and what a person is told of it first."""

    job: SupervisedJob
    lines: tuple[str, ...]


def prepare(
    config: SupervisedConfig,
    folder: Path,
    report: Reporter,
    *,
    resume: Path | None = None,
    known: Mapping[str, KnownModel] = KNOWN_MODELS,
) -> Prepared:
    """Read everything that a job needs. `folder` is for its checkpoints, and is not made here.

    Raises ConfigError, ModelError, DataError: the first fault found.
    """
    require_cores(config.cluster, trainer=config.trainer.num_threads)
    model = _resolved(config, report, known)
    path = Path(model.name).expanduser()
    if has_manifest(path):
        verify_checkpoint(path)
    trust = model.trust_remote_code
    hf_config = load_hf_config(model.name, trust_remote_code=trust)
    if not isinstance(config, TrainRewardConfig):
        # whole and plain, before rows are read and the folder is made
        count_params(hf_config, AutoModelForCausalLM, model.name)
    room = max_context_tokens(hf_config)
    data = config.data
    if room is not None and data.token_limit > room:
        if data.max_tokens is not None:
            raise ConfigError(
                f"data.max_tokens is {data.max_tokens}, but the model '{model.name}' has {room} positions; lower it"
            )
        data = data.model_copy(update={"max_tokens": room})
    tokenizer = load_tokenizer(model.tokenizer or model.name, trust_remote_code=trust)
    if model.chat_template is not None:
        named = named_template(tokenizer, model.chat_template)
        tokenizer.chat_template = named if named is not None else _read_template(model.chat_template)
    keep_time(tokenizer, config.run.template_time)
    if model.eos_token is not None:
        set_end_token(tokenizer, model.eos_token)
    notes: dict[str, None] = {}
    rows, held_out_rows = read_raw_rows(data, seed=config.run.seed, note=notes.setdefault)
    is_kto = isinstance(config, DpoConfig) and config.loss.type == "kto"
    train, num_left_out = _encoded(data, rows, tokenizer, notes, is_kto=is_kto)
    held_out: Sequence[Any] = ()
    if held_out_rows:
        held_out, more = _encoded(data, held_out_rows, tokenizer, notes, is_kto=is_kto)
        num_left_out += more
    if is_kto:
        held_out, train = (with_unrelated(items, train, data.token_limit) for items in (held_out, train))
    job = SupervisedJob(
        kind=_KINDS[type(config)],
        model=model,
        trainer=config.trainer,
        loss=config.loss
        if isinstance(config, SftConfig | TrainRewardConfig | DpoConfig)
        else SftLossConfig(),
        seed=config.run.seed,
        tokenizer=tokenizer,
        train=train,
        held_out=held_out,
        folder=folder,
        resume=resume,
        config_text=config_text(config),
        sources=_sources(data, train),
    )
    what = "examples" if job.kind == "sft" else "rows" if is_kto else "pairs"
    why = "too long" if job.kind == "reward" else "too long, or with no token to learn within data.max_tokens"
    said: list[Any] = [one for item in train for one in getattr(item, "responses", (item,))]
    left_out = f", {num_left_out:,} left out: {why}" if num_left_out else ""
    num_tokens = sum(item.num_tokens for item in train)
    return Prepared(
        job=job,
        lines=(
            f"{len(train):,} {what} of {num_tokens:,} tokens, {len(held_out):,} held out{left_out}",
            f"{job.total_steps:,} steps of {config.trainer.batch_size} {what}",
            *source_notes(job.sources, what),
            *notes,
            *(f"{key} has no effect: {why}" for key, why in idle_keys(config)),
            *(open_end(said, tokenizer) if job.kind != "reward" else ()),
        ),
    )


def set_end_token(tokenizer: PreTrainedTokenizerBase, token: str) -> None:
    """Make a token the one that ends a text. Raises ConfigError: the tokenizer does not know it."""
    if token not in tokenizer.get_vocab():
        raise ConfigError(
            f"model.eos_token is '{token}', which is no token of the tokenizer; expected the one that ends a turn in "
            "its chat template, such as <|im_end|>"
        )
    tokenizer.eos_token = token


def open_end(examples: Sequence[Demonstration], tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """A line where what is learned ends with a special token that is not the tokenizer's end token, or with none."""
    known: Any = tokenizer  # such as <|im_end|> that was added and not called special
    special = {*tokenizer.all_special_ids, *known.get_added_vocab().values()}
    for example in examples:
        learned = example.token_ids[example.is_learned].tolist()
        last = next((token for token in reversed(learned) if str(tokenizer.decode(token)).strip()), -1)
        if last == tokenizer.eos_token_id:
            return ()
        if last in special:
            name = tokenizer.convert_ids_to_tokens(last)
            return (
                f"the learned turns end with {name}, but the tokenizer's end token is {tokenizer.eos_token}: the saved "
                f"generation_config.json names both where the chat template closes turns so; set model.eos_token to "
                f"'{name}' for whoever reads the tokenizer alone",
            )
    return (
        "no example learns a token that ends a turn, so what is trained may never stop; name a chat template that "
        "closes turns with one, within its {% generation %} marks (model.chat_template), or raise data.max_tokens",
    )


def _encoded(
    data: ExamplesConfig,
    rows: Sequence[Record],
    tokenizer: PreTrainedTokenizerBase,
    notes: dict[str, None],
    *,
    is_kto: bool,
) -> tuple[Sequence[Any], int]:
    if isinstance(data, DemonstrationsConfig):
        return encode_demonstrations(rows, data, tokenizer, notes.setdefault)
    if isinstance(data, PreferencesConfig):
        return encode_preferences(rows, data, tokenizer, notes.setdefault)
    if isinstance(data, FeedbackConfig):
        return encode_feedback(rows, data, tokenizer, notes.setdefault, takes_unpaired=is_kto)
    raise ConfigError("the config is none of rlhfspec sft, train-reward and dpo; use one of them")


def _sources(data: ExamplesConfig, train: Sequence[Any]) -> tuple[Source, ...]:
    """How often an epoch has the rows of each of several sources, as many visits in each."""
    if not isinstance(data, DemonstrationsConfig) or not data.sources:
        return ()
    sizes = [sum(item.source == index for item in train) for index in range(len(data.sources))]
    weights = [source.weight for source in data.sources]
    repeats = repeats_of(sizes, weights, weight_of=data.weight_of, stopping=data.stopping)
    return tuple(
        Source(
            name=source.path, num_prompts=size, repeats=max(round(size * times), 1) / size if size else 0.0
        )
        for source, size, times in zip(data.sources, sizes, repeats, strict=True)
    )


def _resolved(
    config: SupervisedConfig, report: Reporter, known: Mapping[str, KnownModel]
) -> SupervisedModelConfig:
    """The model section with an absolute path for a folder, or for a model that is known by name."""
    model = config.model
    folder = Path(model.name).expanduser()
    if folder.is_dir():
        # trainers of several may work in other folders
        return model.model_copy(update={"name": str(folder.absolute())})
    refuse_mistyped(model.name, known)
    if model.name not in known:
        return model
    from ...learning.models.get import get_model

    with report.job(f"getting {model.name}") as tick:
        found = get_model(model.name, Path(config.run.cache_dir), progress=tick, known=known)
    report.note(f"{model.name}: {found.path} (from the {found.source})")
    return model.model_copy(update={"name": str(found.path)})


def _read_template(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"cannot read model.chat_template {path}: {error}; expected a file of Jinja text, or the name of one of "
            "the tokenizer's templates"
        ) from error
