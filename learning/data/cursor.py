"""Hands out prompts with keys that are never reused."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from core.errors import DataError
from core.records import Prompt, SampleKey, SampleRequest, SamplingParams, Stream
from learning.data.prompts import PromptDataset


class PromptCursor:
    """Hands out prompts epoch by epoch; gives every sample its index before anything else sees it.

    The order of epoch e is a permutation seeded by (run_seed, e), so `state()` is four numbers.
    """

    def __init__(
        self, dataset: PromptDataset, *, run_seed: int, shuffle: bool, stream: Stream = Stream.TRAIN
    ) -> None:
        self.dataset = dataset
        self.run_seed = run_seed
        self.shuffle = shuffle
        self.stream = stream
        self._epoch = 0
        self._position = 0
        self._next_sample_index = 0
        self._next_group_id = 0
        self._order = self._epoch_order()

    def next_requests(
        self, num_prompts: int, samples_per_prompt: int, sampling: SamplingParams
    ) -> list[SampleRequest]:
        """Return num_prompts * samples_per_prompt requests, the samples of one prompt side by side.

        Sample indices count up and are never reused, not even after `restore` of an earlier state of
        the same run: that is then the same sample again.
        """
        requests: list[SampleRequest] = []
        for _ in range(num_prompts):
            prompt = self._next_prompt()
            for _ in range(samples_per_prompt):
                key = SampleKey(
                    run_seed=self.run_seed, stream=self.stream, sample_index=self._next_sample_index
                )
                requests.append(
                    SampleRequest(key=key, prompt=prompt, sampling=sampling, group_id=self._next_group_id)
                )
                self._next_sample_index += 1
            self._next_group_id += 1
        return requests

    @property
    def num_passes(self) -> float:
        """Passes over the prompts so far."""
        return self._epoch + self._position / len(self.dataset)

    def state(self) -> dict[str, int]:
        """Return what a checkpoint keeps."""
        return {
            "run_seed": self.run_seed,
            "num_prompts": len(self.dataset),
            "epoch": self._epoch,
            "position": self._position,
            "next_sample_index": self._next_sample_index,
            "next_group_id": self._next_group_id,
        }

    def restore(self, state: Mapping[str, int]) -> None:
        """Go on where `state` was taken. Raises DataError when seed or data set are not the same."""
        for name, own in (("run_seed", self.run_seed), ("num_prompts", len(self.dataset))):
            if state[name] != own:
                raise DataError(
                    f"cannot resume the prompt cursor: {name} was {state[name]}, now {own}; "
                    "resume with the same run.seed and data"
                )
        self._epoch, self._position = state["epoch"], state["position"]
        self._next_sample_index, self._next_group_id = state["next_sample_index"], state["next_group_id"]
        self._order = self._epoch_order()

    def _next_prompt(self) -> Prompt:
        if self._position == len(self.dataset):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._epoch_order()
        prompt = self.dataset.prompts[int(self._order[self._position])]
        self._position += 1
        return prompt

    def _epoch_order(self) -> np.ndarray:
        if not self.shuffle:
            return np.arange(len(self.dataset))
        return np.random.default_rng([self.run_seed, self._epoch]).permutation(len(self.dataset))
