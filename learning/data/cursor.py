"""Hands out prompts with keys that are never reused."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import fmean

from ...core.errors import DataError
from ...core.outside import quote
from ...core.records import Prompt, Rollout, SampleKey, SampleRequest, SamplingParams, Stream
from .prompts import EpochOrder, PromptDataset


class PromptCursor:
    """Hands out prompts epoch by epoch; gives every sample its index before anything else sees it.

    The order of epoch e follows from (run_seed, e) and the sources' weights (`learning.data.prompts`), so `state()`
    is a few numbers, and the prompts that are solved, and `restore` replays nothing.
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
        self._solved: set[int] = set()
        "ids of prompts that are passed over"
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
        the same run: that is then the same sample again. Raises DataError: all prompts are solved.
        """
        requests: list[SampleRequest] = []
        if self.all_solved is not None:
            raise DataError(
                f"{self.all_solved}; give the run harder prompts, or a higher data.easy_threshold"
            )
        for _ in range(num_prompts):
            prompt = self._next_prompt()
            while prompt.prompt_id in self._solved:
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

    def _next_prompt(self) -> Prompt:
        while self._position >= len(self._order):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._epochs.order(self._epoch)
        self._position += 1
        return self.dataset.prompts[int(self._order[self._position - 1])]

    def leave_out_solved(self, rollouts: Iterable[Rollout], easy_threshold: float) -> None:
        """Hand out no more those prompts whose last group here has so high a mean; again those that have less now."""
        scores: dict[tuple[int, int], list[float]] = defaultdict(list)
        for rollout in rollouts:
            reward = rollout.reward
            score = reward.parts.get("correct", reward.parts.get("unshaped", reward.value))
            scores[rollout.completion.group_id, rollout.prompt.prompt_id].append(score)
        for (_, prompt_id), of_group in sorted(scores.items()):
            (self._solved.add if fmean(of_group) >= easy_threshold else self._solved.discard)(prompt_id)

    @property
    def num_left(self) -> int:
        """Prompts that are not solved."""
        return len(self.dataset) - len(self._solved)

    @property
    def all_solved(self) -> str | None:
        """Says so where no prompt is left to hand out."""
        if self.num_left:
            return None
        return (
            f"all {len(self.dataset):,} prompts are solved (data.easy_threshold): nothing is left to sample"
        )

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
        is_known = not self._solved and repeats <= 1.0 and self._position + num_prompts <= len(self._order)
        return num_prompts > 0 and not is_known

    def state(self) -> dict[str, int | str]:
        """Return what a checkpoint keeps, JSON values."""
        return self._identity() | {
            "epoch": self._epoch,
            "position": self._position,
            "next_sample_index": self._next_sample_index,
            "next_group_id": self._next_group_id,
            **({"solved": " ".join(map(str, sorted(self._solved)))} if self._solved else {}),
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
        solved = str(state.get("solved", "")).split()
        if min(epoch, position, sample_index, group_id) < 0 or not all(map(str.isdecimal, solved)):
            raise DataError(
                f"cannot resume the prompt cursor: expected numbers from 0, got {quote(dict(state))}"
            )
        self._epoch, self._position = epoch, position
        self._next_sample_index, self._next_group_id = sample_index, group_id
        self._solved = set(map(int, solved))
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
