"""Hands out prompts with keys that are never reused."""

from __future__ import annotations

from collections.abc import Mapping

from ...core.errors import DataError
from ...core.outside import quote
from ...core.records import SampleKey, SampleRequest, SamplingParams, Stream
from .prompts import EpochOrder, PromptDataset


class PromptCursor:
    """Hands out prompts epoch by epoch; gives every sample its index before anything else sees it.

    The order of epoch e follows from (run_seed, e) and the sources' weights (`learning.data.prompts`), so `state()`
    is a few numbers and `restore` replays nothing.
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
        sources = dataset.sources
        self._epochs = EpochOrder(
            [source.num_prompts for source in sources] or [len(dataset)],
            [source.repeats for source in sources] or [1.0],
            seed=run_seed,
            shuffle=shuffle,
        )
        self._order = self._epochs.order(0)

    def next_requests(
        self, num_prompts: int, samples_per_prompt: int, sampling: SamplingParams
    ) -> list[SampleRequest]:
        """Return num_prompts * samples_per_prompt requests, the samples of one prompt side by side.

        Sample indices count up and are never reused, not even after `restore` of an earlier state of
        the same run: that is then the same sample again.
        """
        requests: list[SampleRequest] = []
        for _ in range(num_prompts):
            while self._position >= len(self._order):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._epochs.order(self._epoch)
            prompt = self.dataset.prompts[int(self._order[self._position])]
            self._position += 1
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

    def peek(
        self, num_prompts: int, samples_per_prompt: int, sampling: SamplingParams
    ) -> list[SampleRequest]:
        """Return what `next_requests` will, and hand out nothing."""
        before = self.state()
        requests = self.next_requests(num_prompts, samples_per_prompt, sampling)
        self.restore(before)
        return requests

    @property
    def num_passes(self) -> float:
        """Passes over the prompts so far."""
        return self._epoch + self._position / max(len(self._order), 1)

    def comes_again(self, num_prompts: int) -> bool:
        """Whether one handed out of late may be among the next `num_prompts`; equal rows of the data are two."""
        repeats = max((source.repeats for source in self.dataset.sources), default=1.0)
        return num_prompts > 0 and (repeats > 1.0 or self._position + num_prompts > len(self._order))

    def state(self) -> dict[str, int | str]:
        """Return what a checkpoint keeps, JSON values."""
        return self._identity() | {
            "epoch": self._epoch,
            "position": self._position,
            "next_sample_index": self._next_sample_index,
            "next_group_id": self._next_group_id,
        }

    def restore(self, state: Mapping[str, int | str]) -> None:
        """Go on where `state` was taken.

        Raises DataError when seed, prompts, their sources or their weights are not the same, or `state` is none.
        """
        for name, own in self._identity().items():
            if state.get(name) != own:
                raise DataError(
                    f"cannot resume the prompt cursor: {name} was {state.get(name)}, now {own}; "
                    "resume with the same run.seed and data"
                )
        counts = [state.get(name) for name in ("epoch", "position", "next_sample_index", "next_group_id")]
        epoch, position, sample_index, group_id = (one if isinstance(one, int) else -1 for one in counts)
        if min(epoch, position, sample_index, group_id) < 0:
            raise DataError(
                f"cannot resume the prompt cursor: expected numbers from 0, got {quote(dict(state))}"
            )
        self._epoch, self._position = epoch, position
        self._next_sample_index, self._next_group_id = sample_index, group_id
        self._order = self._epochs.order(epoch)

    def _identity(self) -> dict[str, int | str]:
        """What must be the same for the order to be."""
        sources = " ".join(f"{source.num_prompts}x{source.repeats!r}" for source in self.dataset.sources)
        return {
            "run_seed": self.run_seed,
            "num_prompts": len(self.dataset),
            "prompts": self.dataset.fingerprint,
            "sources": sources,
            "shuffle": str(self.shuffle),
        }
