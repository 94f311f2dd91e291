"""What is between instances and trainer, as files of a run's state: a Parquet file a batch, as rollouts are kept.

batch_000007.parquet            its scored responses
batch_000007_unscored.parquet   its whole responses that waited for a reward: they are scored again
batch_000007_open.parquet       its responses so far that are no whole ones; they have no reward either
ended.json                      free schedule: group and number of those that are scored, in the order of their end
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np

from ...core.errors import DataError
from ...core.files import write_whole
from ...core.records import (
    Completion,
    Prompt,
    Reward,
    Rollout,
    SampleKey,
    SampleRequest,
    SamplingParams,
    WeightSpan,
    as_asked,
)
from ...learning.data.prompts import PromptDataset
from ...policies.staleness.rollout_schedule import InFlight, OpenSample
from ..folder.rollouts import locations_in, read_recorded, write_rollouts

ENDED = "ended.json"
_OPEN, _UNSCORED = "_open", "_unscored"


def write_in_flight(folder: Path, in_flight: InFlight) -> None:
    """Write a new folder. Raises StorageError."""
    folder.mkdir()
    for batch, ready in in_flight.ready.items():
        write_rollouts(_file(folder, batch), list(ready.values()))
    for suffix, samples in ((_OPEN, in_flight.open_samples), (_UNSCORED, in_flight.unscored)):
        by_batch: dict[int, list[Rollout]] = defaultdict(list)
        for one in samples.values():
            prompt, so_far = one.request.prompt, one.so_far or _unbegun(one)
            rollout = Rollout(prompt=prompt, completion=so_far, response_text="", reward=Reward(value=0.0))
            by_batch[one.batch].append(rollout)
        for batch, rollouts in by_batch.items():
            write_rollouts(_file(folder, batch, suffix), rollouts)
    if in_flight.ended:
        write_whole(folder / ENDED, json.dumps(in_flight.ended).encode())


def read_in_flight(folder: Path, dataset: PromptDataset, sampling: SamplingParams) -> InFlight:
    """Read a folder back; nothing is in flight where there is none.

    Raises DataError: a file cannot be read, is of an unknown kind, or holds a prompt that is not in the data set.
    """
    ready: dict[int, dict[SampleKey, Rollout]] = {}
    waiting: dict[str, dict[SampleKey, OpenSample]] = {_OPEN: {}, _UNSCORED: {}}
    prompts = {prompt.prompt_id: prompt for prompt in dataset.prompts}
    for file in sorted(folder.glob("batch_*.parquet")) if folder.is_dir() else []:
        found = re.fullmatch(rf"batch_(\d+)({_OPEN}|{_UNSCORED})?", file.stem)
        if found is None:
            raise DataError(
                f"{file} holds samples of a kind that this version does not know; expected batch_N, batch_N{_OPEN} or "
                f"batch_N{_UNSCORED}: go on with the version that wrote it"
            )
        batch = int(found[1])
        for one in read_recorded(locations_in(file)):
            rollout, key = one.rollout, one.location.key
            if found[2] is None:
                ready.setdefault(batch, {})[key] = rollout
                continue
            prompt, group_id = _known(rollout.prompt, prompts, file), rollout.completion.group_id
            request = SampleRequest(key=key, prompt=prompt, sampling=sampling, group_id=group_id)
            has_begun = found[2] == _UNSCORED or rollout.completion.num_tokens > 0
            so_far = rollout.completion if has_begun else None
            waiting[found[2]][key] = OpenSample(batch=batch, request=request, so_far=so_far, num_turns=1)
        ready.setdefault(batch, {})
    ended = _read_ended(folder / ENDED)
    return InFlight(open_samples=waiting[_OPEN], unscored=waiting[_UNSCORED], ready=ready, ended=ended)


def _read_ended(file: Path) -> tuple[tuple[int, int], ...]:
    if not file.is_file():
        return ()
    try:
        return tuple((int(group_id), int(begun)) for group_id, begun in json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(
            f"{file} does not tell which groups have ended: {type(error).__name__}: {error}"
        ) from error


def _unbegun(one: OpenSample) -> Completion:
    """A response without a token: files name a version for every one."""
    return replace(
        as_asked(one.request), weight_spans=(WeightSpan(weight_version=one.batch, first_position=0),)
    )


def _known(recorded: Prompt, prompts: dict[int, Prompt], file: Path) -> Prompt:
    """The data set's prompt, which has what files do not keep."""
    prompt = prompts.get(recorded.prompt_id)
    if prompt is None or not np.array_equal(prompt.token_ids, recorded.token_ids):
        raise DataError(
            f"cannot go on with the samples of {file}: prompt {recorded.prompt_id} is another one in the data; resume "
            "with the data of the run"
        )
    return prompt


def _file(folder: Path, batch: int, suffix: str = "") -> Path:
    return folder / f"batch_{batch:06d}{suffix}.parquet"
