"""Computes recorded rewards again, where they are a function of prompt and response."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ...core.config import EnvironmentConfig, RewardConfig
from ...core.errors import DataError, InputError
from ...core.records import Completion, Prompt, ResponseFacts, Reward, Unscored
from ...learning.data.prompts import load_prompts
from ...learning.rewards.reward_function import build_reward
from ..folder.rollouts import Recorded, locations_in, read_recorded
from ..plan.reward_plan import resolved_reward
from .choice import RecordedRun
from .verification import Difference, reward_differences

_RULES = ("chain", "one_sentence", "gsm8k", "format")
"Read text and reference alone, which rollout files keep."


class RewardsAgain:
    """The run's reward function, and its prompts by number."""

    def __init__(
        self, run: RecordedRun, tokenizer: PreTrainedTokenizerBase, *, to_the_bit: bool = True
    ) -> None:
        """Build both. Raises InputError: they are not to be had here; its message says why."""
        config = run.config
        on_gpu = to_the_bit and config.cluster.reward.num_gpus > 0
        if why := _why_not(config.reward, config.environment, on_gpu=on_gpu):
            raise InputError(why)
        # whoever cannot be scored is a difference, and no end
        reward = resolved_reward(config.reward, config.sampling.max_new_tokens).model_copy(
            update={"on_error": "skip"}
        )
        self._stage = build_reward(reward, fields=None, template_time=config.run.template_time)
        self._file: tuple[Path, list[Recorded]] | None = None
        "read last"
        self.prompts: dict[int, Prompt] = {}
        try:
            dataset = load_prompts(config.data, tokenizer, seed=config.run.seed)
            self.prompts = {prompt.prompt_id: prompt for prompt in dataset.prompts}
        except InputError as error:
            if any(scorer.kind not in _RULES for scorer in config.reward.scorers):
                raise InputError(f"the run's prompts cannot be read here: {error}") from error

    def differences(
        self, file: str, samples: Sequence[Recorded], completions: Sequence[Completion], texts: Sequence[str]
    ) -> list[Difference]:
        """Compare prompts with the data set's, and rewards with those of these responses."""
        found: list[Difference] = []
        prompts = []
        for sample in samples:
            recorded = sample.rollout.prompt
            prompt = self.prompts.get(recorded.prompt_id, recorded)
            prompts.append(prompt)
            found += _prompt_differences(file, sample.location.key.sample_index, recorded, prompt)
        if self._stage.in_groups and samples:
            # the rest of each group as it was recorded
            chosen = {sample.location.key for sample in samples}
            group_ids = {completion.group_id for completion in completions}
            where = samples[0].location.file
            if self._file is None or self._file[0] != where:
                self._file = where, read_recorded(locations_in(where))
            for one in self._file[1]:
                if one.location.key not in chosen and one.rollout.completion.group_id in group_ids:
                    prompts.append(self.prompts.get(one.rollout.prompt.prompt_id, one.rollout.prompt))
                    texts = [*texts, one.rollout.response_text]
                    completions = [*completions, one.rollout.completion]
        for sample, again in zip(samples, self._score(prompts, texts, completions), strict=False):
            index, recorded = sample.location.key.sample_index, sample.rollout.reward
            if isinstance(again, Reward):
                found += reward_differences(file, index, recorded, again)
            else:
                found.append(
                    Difference(
                        file=file, sample=index, what="reward", expected=again.reason, got=str(recorded.value)
                    )
                )
        return found

    def of(self, samples: Sequence[Recorded]) -> list[Reward | Unscored]:
        """The rewards of recorded responses; of one that cannot be scored, why.

        Raises DataError: the data is no longer what the samples were asked with.
        """
        rollouts = [sample.rollout for sample in samples]
        prompts = [self.prompts.get(one.prompt.prompt_id, one.prompt) for one in rollouts]
        for sample, prompt in zip(samples, prompts, strict=True):
            index, recorded = sample.location.key.sample_index, sample.rollout.prompt
            for one in _prompt_differences(sample.location.file.name, index, recorded, prompt):
                raise DataError(
                    f"sample {index} of {one.file}: the {one.what} is {one.expected[:60]}, recorded was "
                    f"{one.got[:60]}; give the run's own file with --set data.path=FILE"
                )
        texts = [one.response_text for one in rollouts]
        return self._score(prompts, texts, [one.completion for one in rollouts])

    def _score(
        self, prompts: Sequence[Prompt], texts: Sequence[str], completions: Sequence[Completion]
    ) -> list[Reward | Unscored]:
        return self._stage.score_each(prompts, texts, [ResponseFacts.of(one) for one in completions])


def _why_not(reward: RewardConfig, environment: EnvironmentConfig, *, on_gpu: bool) -> str:
    """Why rewards cannot be computed again to the bit; empty where they can."""
    if environment.kind is not None:
        return "an environment took part, and what it said or gave cannot be asked for again"
    if any(scorer.kind == "serve" for scorer in reward.scorers):
        return "a reward server gave them (reward.kind serve)"
    if reward.models and on_gpu:
        return "a reward model on a GPU gave them, whose scores depend on the batch by rounding"
    return ""


def _prompt_differences(file: str, index: int, recorded: Prompt, prompt: Prompt) -> list[Difference]:
    rows = [
        ("reference of the data", recorded.reference, prompt.reference),
        ("prompt of the data", recorded.text, prompt.text),
    ]
    found = [
        Difference(file=file, sample=index, what=what, expected=repr(expected), got=repr(got))
        for what, got, expected in rows
        if got != expected
    ]
    if not np.array_equal(recorded.token_ids, prompt.token_ids):
        what = f"token ids of prompt {prompt.prompt_id}"
        expected, got = (str(ids.tolist()) for ids in (prompt.token_ids, recorded.token_ids))
        found.append(Difference(file=file, sample=index, what=what, expected=expected, got=got))
    return found
