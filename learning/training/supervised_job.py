"""A whole supervised training as one job: batches in a seeded order, evaluations, checkpoints; the same in one process
and in each of several actors.

    FOLDER/model          the last checkpoint, Hugging Face format; FOLDER/model_0100 of step 100
    FOLDER/adapter        the PEFT adapter beside it, where trainer.lora is set
    FOLDER/best           the model of the lowest eval/loss, by trainer.keep_best; FOLDER/best_adapter likewise
    FOLDER/state_0100     what --resume goes on from (torch.distributed.checkpoint) with trained_on.json, what it was
                          learned from, config.yaml and a manifest of checksums; the last two are kept
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ...core.checkpoint_manifest import state_folders, verify_checkpoint, write_manifest
from ...core.errors import ConfigError, ModelError, NotAsLearned, WeightsError
from ...core.files import partial_of, whole_folder
from ...core.settings.supervised import (
    DpoLossConfig,
    PreferenceLossConfig,
    SftLossConfig,
    SupervisedModelConfig,
    SupervisedTrainerConfig,
)
from ...engine.model.support import refuse_changing_rope
from ...engine.weights.causal_lm import DTYPES, PreTrainedModel
from ...engine.weights.loading import load_causal_lm, num_token_ids
from ..data.prompts import EpochOrder, Source
from .finished_model import ModelForm, save_model, write_adapter_folder
from .learning_rate import step_rule
from .objectives.direct_preferences import DirectPreferences, Values, response_values
from .objectives.supervised_objectives import ForwardSettings, MeanBatch, NextTokens, Preferences
from .parallel import OneTrainer
from .reloaded import few_of
from .reward_head import HEAD, load_scorer, set_pad_token
from .trainer_core import Trainer
from .training_forward import compute_dtype_on, prepare_for_training, require_packs

Objective = NextTokens | Preferences | DirectPreferences
_TRAINED_ON = "trained_on.json"
"In a state's folder."
CONFIG_FILE = "config.yaml"
"In a state's folder: the config of the run."
_KEPT_STATES = 2
_WATCHED_STEPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedJob:
    """Everything that a trainer needs, as it can be sent to another process."""

    kind: Literal["sft", "reward", "dpo"]
    model: SupervisedModelConfig
    "its name a path or hub name that every trainer can read"
    trainer: SupervisedTrainerConfig
    loss: PreferenceLossConfig | DpoLossConfig | SftLossConfig
    seed: int
    tokenizer: PreTrainedTokenizerBase
    train: Sequence[Any]
    held_out: Sequence[Any]
    folder: Path
    "of checkpoints; one that all trainers share"
    resume: Path | None = None
    "a state folder to go on from"
    config_text: str = ""
    "YAML of the run's config, which its states keep"
    sources: tuple[Source, ...] = ()
    "that `train` is of, one behind the other; empty: one"
    eval_losses: tuple[float, ...] = ()
    "up to the state that is gone on from, in their order"

    @property
    def order(self) -> EpochOrder:
        """Of the places in `train`; every epoch has as many."""
        counts = [source.num_prompts for source in self.sources] or [len(self.train)]
        visits = [round(source.num_prompts * source.repeats) for source in self.sources] or counts
        repeats = [Fraction(times, max(size, 1)) for times, size in zip(visits, counts, strict=True)]
        return EpochOrder(counts, repeats, seed=self.seed, shuffle=True)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps over all rows once, or as often as their sources weigh; the last has what is left of them."""
        return math.ceil(self.order.length / self.trainer.batch_size)

    @property
    def total_steps(self) -> int:
        """Optimizer steps in all."""
        return self.trainer.max_steps or self.trainer.epochs * self.steps_per_epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one optimizer step did; step 0 is an evaluation before the first."""

    step: int
    metrics: dict[str, float]
    saved: str | None = None
    "a folder that was written after it"
    unmoved: tuple[str, ...] = ()
    "tensors that ought to learn and had no gradient so far; told once"


def run_job(
    job: SupervisedJob, *, device: torch.device, trainers: OneTrainer | None = None
) -> Iterator[StepReport]:
    """Train, and report each step. Collective: every trainer runs the same job to its end.

    Raises ModelError, ConfigError, NotFiniteError, StorageError, PeerLost.
    """
    trainers = trainers or OneTrainer()
    torch.set_num_threads(job.trainer.num_threads)
    model, form = _load(job)
    # what is held in 4 bits is moved so
    stays = trainers.is_sharded or (job.trainer.lora is not None and job.trainer.lora.base_bits is not None)
    learner = SupervisedLearner(
        model if stays else model.to(device),  # type: ignore[arg-type]
        _objective(job),
        job.trainer,
        total_steps=job.total_steps,
        seed=job.seed,
        head=HEAD if job.kind == "reward" else None,
        compute_dtype=compute_dtype_on(device, DTYPES[job.model.dtype], job.trainer.compute_dtype),
        trainers=trainers,
        device=device,
    )
    # before a state is loaded: the reference is the model that the run began with
    job = replace(job, train=learner.with_reference(job.train), held_out=learner.with_reference(job.held_out))
    if job.resume is not None:
        learner.load(job.resume)
        if learner.num_steps >= job.total_steps:
            raise ConfigError(
                f"{job.resume} is of step {learner.num_steps}, and the config asks for {job.total_steps} in all; raise "
                "trainer.epochs or trainer.max_steps to go on"
            )
    losses = list(job.eval_losses)
    if job.held_out and job.resume is None:
        metrics = _named("eval", learner.evaluate(job.held_out))
        losses.append(metrics["eval/loss"])
        yield StepReport(step=0, metrics=metrics)
    # all rows are read for it
    trained_on = _trained_on(job) if job.trainer.checkpoint_every and trainers.rank == 0 else {}
    first = learner.num_steps
    is_last = False
    while not is_last:
        batch = batch_of(job, learner.num_steps)
        began_s = time.perf_counter()
        metrics = _named("train", learner.step(batch))
        seconds = time.perf_counter() - began_s
        metrics["train/tokens_per_s"] = sum(item.num_tokens for item in batch) / seconds
        metrics["train/epoch"] = learner.num_steps / job.steps_per_epoch
        metrics["time/step_s"] = seconds
        is_last = learner.num_steps == job.total_steps
        if job.held_out and (is_last or _is_due(learner.num_steps, job.trainer.eval_every)):
            metrics |= _named("eval", learner.evaluate(job.held_out))
            losses.append(metrics["eval/loss"])
            is_last = is_last or num_not_better(losses) >= (job.trainer.early_stopping_patience or math.inf)
            if job.trainer.keep_best and not num_not_better(losses):
                _save_model(learner, form, job, trained_on, "best", "best_adapter", says=job.kind != "reward")
        saved = _save(learner, form, job, trained_on, is_last=is_last)
        # once: all that a gradient reaches has had one by then
        is_due = learner.num_steps == min(first + _WATCHED_STEPS, job.total_steps)
        unmoved = tuple(learner.unmoved()) if is_due else ()
        yield StepReport(step=learner.num_steps, metrics=metrics, saved=saved, unmoved=unmoved)


def num_not_better(losses: Sequence[float]) -> int:
    """Evaluations since the one with the lowest loss, of equal ones the first; numbers that are none are never it."""
    best = min(range(len(losses)), key=lambda at: losses[at] if losses[at] == losses[at] else math.inf)
    return len(losses) - 1 - best


def batch_of(job: SupervisedJob, step: int) -> list[Any]:
    """The items of a step, counted from 0: each once an epoch, in an order drawn from (seed, epoch)."""
    epoch, place = divmod(step, job.steps_per_epoch)
    order = job.order.order(epoch)
    first = place * job.trainer.batch_size
    return [job.train[index] for index in order[first : first + job.trainer.batch_size]]


def last_state(folder: Path, note: Callable[[str], None]) -> Path:
    """The newest whole state in a folder of checkpoints; `note` is told of damaged ones.

    Raises ConfigError when there is none.
    """
    for path in state_folders(folder):
        if not (path / _TRAINED_ON).is_file():
            continue
        try:
            verify_checkpoint(path)
        except ModelError as error:
            note(f"{path.name} is passed over: {error}")
            continue
        return path
    raise ConfigError(
        f"{folder} holds no whole state to go on from; expected state_STEP, which trainer.checkpoint_every writes; "
        "start anew, with trainer.checkpoint_every above 0"
    )


def require_same(job: SupervisedJob, state: Path) -> None:
    """Raise ConfigError where a state was learned from other rows, or in another order, than the job has."""
    try:
        then = json.loads((state / _TRAINED_ON).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"cannot read {state / _TRAINED_ON}: {error}; go on from another state") from error
    now = _trained_on(job)
    changed = [
        f"{key} was {then.get(key)}, now {now.get(key)}"
        for key in sorted({*then, *now})
        if then.get(key) != now.get(key)
    ]
    if changed:
        raise ConfigError(
            f"{state} was learned from something else: {'; '.join(changed)}; expected the same rows in the same order: "
            f"put it back, or begin a new run with --model {state.parent / 'model'}"
        )


def _trained_on(job: SupervisedJob) -> dict[str, Any]:
    """What decides which examples come at which step, and what they are; by the keys of the config that set it."""
    digest = hashlib.sha256()
    for item in job.train:
        digest.update(item.identity)
    sources = {f"data.sources: {i}, {one.name}": one.repeats for i, one in enumerate(job.sources)}
    has_reference = isinstance(job.loss, DpoLossConfig) and job.loss.type != "orpo"
    keeps_base = job.trainer.lora is not None or has_reference
    base = {"model.name": job.model.name} if keeps_base else {}
    return {
        "run.seed": job.seed,
        "trainer.batch_size": job.trainer.batch_size,
        "data: number of examples": len(job.train),
        "data: their tokens": digest.hexdigest()[:16],
        **sources,
        **base,
    }


def _load(job: SupervisedJob) -> tuple[PreTrainedModel, ModelForm]:
    name, trust = job.model.name, job.model.trust_remote_code
    if job.kind == "reward":
        model, _ = load_scorer(name, job.tokenizer, seed=job.seed, trust_remote_code=trust)
    else:
        model = load_causal_lm(name, "float32", trust_remote_code=trust)
        if model.config.pad_token_id is None:
            set_pad_token(model, job.tokenizer)
    longest = max(len(ids) for item in (*job.train, *job.held_out) for ids in item.sequences)
    refuse_changing_rope(model, longest, "a row", "data.max_tokens")
    return model, ModelForm.of(model, is_classifier=job.kind == "reward", dtype=job.model.dtype)


def _objective(job: SupervisedJob) -> Objective:
    if isinstance(job.loss, DpoLossConfig):
        return DirectPreferences(loss=job.loss, vocab_size=num_token_ids(job.tokenizer))
    if isinstance(job.loss, PreferenceLossConfig) and job.kind == "reward":
        return Preferences(center_coefficient=job.loss.center_rewards_coefficient)
    is_dynamic = isinstance(job.loss, SftLossConfig) and job.loss.type == "dft"
    return NextTokens(vocab_size=num_token_ids(job.tokenizer), is_dynamic=is_dynamic)


def _save(
    learner: SupervisedLearner,
    form: ModelForm,
    job: SupervisedJob,
    trained_on: dict[str, Any],
    *,
    is_last: bool,
) -> str | None:
    is_due = _is_due(learner.num_steps, job.trainer.checkpoint_every)
    if not (is_last or is_due):
        return None
    mark = "" if is_last else f"_{learner.num_steps:04d}"
    says = job.kind != "reward" and is_last
    folder = _save_model(learner, form, job, trained_on, f"model{mark}", f"adapter{mark}", says=says)
    if is_due:
        # last: who finds it finds the model of its step too
        _save_state(learner, job, trained_on)
    return folder


def _save_model(
    learner: SupervisedLearner,
    form: ModelForm,
    job: SupervisedJob,
    trained_on: dict[str, Any],
    name: str,
    adapter_name: str,
    *,
    says: bool,
) -> str:
    folder = job.folder / name
    is_first = learner.trainers.rank == 0
    adapter = None if learner.adapter is None else job.folder / adapter_name
    if adapter is not None:
        # before anything is merged, which could fail
        if is_first:
            files = learner.adapter_files(base_model=job.model.name)
            write_adapter_folder(files, adapter, weight_version=learner.num_steps, merged_checksum="")
        else:
            _accompany(learner)
    said = learner.say() if says else None
    refused = None
    try:
        checksum = save_model(learner, form, job.tokenizer, folder, said) if is_first else _accompany(learner)
    except NotAsLearned as error:
        refused, checksum = str(error), ""
    for why in learner.trainers.gather(refused):
        if why is not None:
            _save_state(learner, job, trained_on or _trained_on(job))
            raise NotAsLearned(why)
    if adapter is not None and is_first:
        write_manifest(
            adapter, model="adapter", weight_version=learner.num_steps, parameter_checksum=checksum
        )
    return str(folder)


def _save_state(learner: SupervisedLearner, job: SupervisedJob, trained_on: dict[str, Any]) -> None:
    """Write the state, whole or not at all, with a checksum of every file; the one before it stays too."""
    folder = job.folder / f"state_{learner.num_steps:04d}"
    if learner.trainers.rank:
        learner.trainers.gather(None)
        learner.save(partial_of(folder))
        learner.trainers.gather(None)
        return
    with whole_folder(folder) as partial:
        # all write into it
        learner.trainers.gather(None)
        learner.save(partial)
        learner.trainers.gather(None)
        (partial / _TRAINED_ON).write_text(json.dumps(trained_on, indent=1))
        if job.config_text:
            (partial / CONFIG_FILE).write_text(job.config_text, encoding="utf-8")
        write_manifest(partial, model="state", weight_version=learner.num_steps, parameter_checksum="")
    for old in state_folders(job.folder)[_KEPT_STATES:]:
        with suppress(OSError):
            shutil.rmtree(old)


def _accompany(learner: SupervisedLearner) -> str:
    learner.accompany_weights()
    return ""


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _named(area: str, metrics: dict[str, float]) -> dict[str, float]:
    return {f"{area}/{name}": value for name, value in metrics.items()}


class SupervisedLearner(Trainer):
    """Learns what an objective says of its items; a step is a weight version."""

    def __init__(
        self,
        model: PreTrainedModel,
        objective: Objective,
        trainer: SupervisedTrainerConfig,
        *,
        total_steps: int,
        seed: int,
        head: str | None = None,
        compute_dtype: torch.dtype = torch.float32,
        trainers: OneTrainer | None = None,
        device: torch.device | None = None,
    ) -> None:
        """See `Trainer`; the schedule falls towards `total_steps`."""
        prepare_for_training(model, gradient_checkpointing=trainer.gradient_checkpointing)
        require_packs(model)
        super().__init__(
            model,
            trainer,
            seed=seed,
            rate_factor=step_rule(trainer, total_steps),
            compute_dtype=compute_dtype,
            trainers=trainers,
            head=head,
            device=device,
        )
        self.objective = objective
        self._forward = ForwardSettings(
            compute_dtype=compute_dtype,
            keeps_casts=not self.trainers.is_sharded,
            max_tokens=trainer.max_tokens_per_forward,
        )

    def step(self, items: Sequence[Any]) -> dict[str, float]:
        """Take one optimizer step on the mean over a batch; its means, learning rate and gradient norm. Collective.

        Raises NotFiniteError when loss or gradient is not finite: no step is taken then.
        """
        batch = self.batch(items)
        self.lately = few_of(ids for item in items for ids in item.sequences)
        norm = self.learn(batch, f"of step {batch.step}")
        # a batch without a gradient is over too
        self.weight_version = self.num_steps = batch.step
        return batch.means | {"learning_rate": self.rate_at(batch.step), "grad_norm": norm}

    @torch.no_grad()
    def evaluate(self, items: Sequence[Any]) -> dict[str, float]:
        """Means over held-out items. Collective."""
        batch = self.batch(items)
        for pack in batch.packs:
            batch.loss(self.model, pack)
        batch.finish()
        return batch.means

    def with_reference(self, items: Sequence[Any]) -> Sequence[Any]:
        """The items with what this model says of them, where the objective compares with it. Collective."""
        objective = self.objective
        if not isinstance(objective, DirectPreferences) or objective.loss.type == "orpo":
            return items
        return objective.with_reference(items, self._values(objective.vocab_size))

    def batch(self, items: Sequence[Any]) -> MeanBatch:
        """What the next step would learn from these items. Collective."""
        objective = self.objective
        if isinstance(objective, DirectPreferences):
            objective = objective.of_batch(items, self._values(objective.vocab_size))
        return MeanBatch(objective, items, self._forward, self.trainers, self.num_steps + 1)

    def _values(self, vocab_size: int) -> Values:
        return partial(response_values, self.model, vocab_size, self._forward, self.trainers)
