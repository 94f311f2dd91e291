"""The rollouts of an earlier run, by the key of the sample (`rollout.record`); its folder is only read.

A response is a function of weights, prompt and key. Where the record's came of the weights that the instances hold, it
is what they would generate: it is taken over, and they generate nothing. Else it is a draft of the sample's response.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ...core.config import Config, EngineConfig, ModelsConfig
from ...core.errors import ConfigError, DataError
from ...core.records import (
    Completion,
    FinishReason,
    SampleKey,
    SampleRequest,
    SamplingParams,
    Stream,
    WeightSpan,
)
from ...core.weight_records import WeightManifest
from ...learning.data.chat.written_text import response_text
from ...learning.data.prompts import sampling_params
from ..folder.iteration_logs import read_weights_log
from ..folder.layout import RunDir
from ..folder.rollouts import Recorded, SampleLocation, locations_in, read_recorded, rollout_files
from ..verify.choice import RecordedRun

if TYPE_CHECKING:
    from ..system.system import System


_ROUNDS = ("numerics", "attention", "forward", "kernels", "device")
"Keys of `engine` that decide how a response is rounded: with others the same weights give other bits."


def require_record(config: Config) -> None:
    """Raise ConfigError where `rollout.record` is no run folder, or shares no key with this run."""
    if config.rollout.record is None:
        return
    theirs = RecordedRun.open(Path(config.rollout.record).expanduser()).config.run.seed
    if theirs != config.run.seed:
        raise ConfigError(
            f"rollout.record {config.rollout.record} was sampled with run.seed {theirs}, this run has "
            f"{config.run.seed}: no key is the same; set run.seed={theirs}, or rollout.record=null"
        )


class RecordedRollouts:
    """Of one run folder. Files are read when a sample of theirs is asked for."""

    def __init__(
        self,
        run: RecordedRun,
        models: ModelsConfig,
        engine: EngineConfig,
        tokenizer: PreTrainedTokenizerBase,
        note: Callable[[str], None],
    ) -> None:
        """`models`, `engine`: of the run that samples are taken over by."""
        self._run, self._tokenizer, self._note = run, tokenizer, note
        self._own_rounding = _rounding(models, engine)
        self._rounding = _rounding(run.config.models, run.config.engine)
        self._sampling = sampling_params(run.config.sampling, tokenizer, model=models.target)
        self._checksums = read_weights_log(RunDir(path=run.folder).weights_file)
        self._files = iter(rollout_files(run.folder))
        self._locations: dict[SampleKey, SampleLocation] = {}
        self._said: set[str] = set()
        self._num_taken, self._first, self._last = 0, 0, 0
        "samples that were taken over, and in which iterations, from 1"
        self._is_live = False

    @classmethod
    def of(cls, system: System, note: Callable[[str], None]) -> RecordedRollouts | None:
        """The record that the config names. Raises ConfigError: it is no run folder."""
        if (record := system.config.rollout.record) is None:
            return None
        run = RecordedRun.open(Path(record).expanduser())
        return cls(run, system.config.models, system.config.engine, system.tokenizer, note)

    def split(
        self, requests: Sequence[SampleRequest], weights: WeightManifest
    ) -> tuple[list[Completion], list[SampleRequest]]:
        """What is taken over of requests, and those that are to be generated, with drafts where there is a record.

        `weights` are those that the instances hold; generation and update take turns.
        """
        if any(request.key.stream is not Stream.TRAIN for request in requests):
            return [], [*requests]
        taken: list[Completion] = []
        live: list[SampleRequest] = []
        why: dict[str, None] = {}
        for request, found in zip(requests, self._completions(requests), strict=True):
            if isinstance(found, str):
                why[found] = None
                live.append(request)
            elif differs := self._differs(request, found, weights):
                why[differs] = None
                live.append(replace(request, draft=found.token_ids))
            else:
                span = WeightSpan(weight_version=weights.weight_version, first_position=0)
                taken.append(
                    replace(
                        found,
                        prompt_id=request.prompt.prompt_id,
                        group_id=request.group_id,
                        epoch=request.epoch,
                        weight_spans=(span,),
                    )
                )
        if requests:
            self._tell(len(taken), list(why), weights.weight_version + 1)
        return taken, live

    def _completions(self, requests: Sequence[SampleRequest]) -> list[Completion | str]:
        """The recorded response to each request, or why there is none."""
        # indices grow from file to file: behind one that lies beyond all that is asked for there is nothing to find
        last, seen = max((request.key.sample_index for request in requests), default=0), -1
        while seen <= last and any(request.key not in self._locations for request in requests):
            if (file := next(self._files, None)) is None:
                break
            try:
                found_here = locations_in(file)
                seen = min((one.key.sample_index for one in found_here), default=seen)
                self._locations |= {one.key: one for one in found_here}
            except DataError as error:
                self._say(str(error))
        found: dict[SampleKey, Recorded] = {}
        places = [self._locations[request.key] for request in requests if request.key in self._locations]
        for file in dict.fromkeys(place.file for place in places):
            try:
                of_file = read_recorded([place for place in places if place.file == file])
            except DataError as error:
                self._say(str(error))
                continue
            found |= {one.location.key: one for one in of_file}
        return [self._whole(request, found.get(request.key)) for request in requests]

    def _whole(self, request: SampleRequest, recorded: Recorded | None) -> Completion | str:
        if recorded is None:
            return "samples are not in its rollouts"
        completion = recorded.rollout.completion
        if not np.array_equal(recorded.rollout.prompt.token_ids, request.prompt.token_ids):
            return "prompts of its samples are others (data, rollout.samples_per_prompt)"
        if response_text(self._tokenizer, completion) != recorded.rollout.response_text:
            return "its tokens are not its texts: the record was changed, see rlhfspec verify"
        is_whole = completion.sampled is None and completion.finish_reason is not FinishReason.CUT
        return completion if is_whole else "its samples are no single whole responses"

    def _differs(self, request: SampleRequest, found: Completion, weights: WeightManifest) -> str:
        """Why a recorded response may be another than would be generated; empty: it is the same."""
        for key, own in self._own_rounding.items():
            if self._rounding[key] != own:
                return f"its {key} is {self._rounding[key]}, here {own}"
        for field in fields(SamplingParams):
            theirs, own = (getattr(one, field.name) for one in (self._sampling, request.sampling))
            if theirs != own:
                return f"its sampling.{field.name} is {theirs}, here {own}"
        versions = {span.weight_version for span in found.weight_spans}
        checksums = {self._checksums.get(version) for version in versions}
        if checksums == {weights.checksum}:
            return ""
        shown = ", ".join(f"{version}" for version in sorted(versions))
        return f"weights are others: version {weights.weight_version} here is not its version {shown}"

    def _tell(self, num_taken: int, why: Sequence[str], iteration: int) -> None:
        """Note where samples begin to be taken over, what was not to be had between, and where that ends."""
        run = self._run.folder
        if num_taken:
            self._first = self._first or iteration
            self._last, self._num_taken = iteration, self._num_taken + num_taken
            self._say(
                f"samples of {run} are taken over while weights are equal, from iteration {self._first} on"
            )
            for reason in why:
                self._say(f"of {run} some samples are generated: {reason}")
        elif not self._is_live:
            self._is_live = True
            where = f" (iterations {self._first}-{self._last})" if self._num_taken else ""
            self._say(
                f"{self._num_taken} samples of {run} were taken over{where}; iteration {iteration} and later ones are "
                f"generated: {'; '.join(why)}"
            )

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._note(text)


def _rounding(models: ModelsConfig, engine: EngineConfig) -> Mapping[str, object]:
    return {"models.dtype": models.dtype} | {f"engine.{name}": getattr(engine, name) for name in _ROUNDS}
