"""Preference pairs of samples, recorded ones or new ones: the best and the worst of each group."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ...core.errors import DataError
from ...core.files import write_whole
from ...core.records import FinishReason, Reward, Rollout, Unscored
from ...learning.data.prompt_tokens import prompt_ids
from ..folder.rollouts import locations_in, read_recorded
from ..plan.inputs import read_tokenizer
from .choice import RecordedRun
from .rescored_run import files_of
from .rewards_again import RewardsAgain


@dataclass(kw_only=True)
class RunPairs:
    """Rows for `rlhfspec dpo` and `train-reward`, in the order of groups, and what was left out."""

    rows: list[dict[str, str]] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    num_other_tokens: int = 0
    "pairs whose text is not read as the tokens that were sampled"

    def lines(self) -> list[str]:
        """What to print."""
        lines = [f"{len(self.rows):,} pairs", *(f"left out: {n:,} {why}" for why, n in self.left_out.items())]
        if self.num_other_tokens:
            lines.append(
                f"{self.num_other_tokens:,} pairs are learned as other tokens than were sampled: the tokenizer reads "
                "their text otherwise"
            )
        return lines

    def write(self, file: Path) -> None:
        """Write the rows as JSON lines. Raises StorageError."""
        write_whole(file, "".join(f"{json.dumps(row)}\n" for row in self.rows))


def pairs_of_run(
    run: RecordedRun,
    *,
    iterations: tuple[int, int] | None,
    scores_again: bool,
    tick: Callable[[str, float], None],
) -> RunPairs:
    """Rank the samples of each group by reward, the earlier of equals first, and pair the best with the worst.

    By the recorded reward, or with `scores_again` by that of the run's config, which was opened with overrides. Texts
    are the tokens, special ones among them, but for the end token, which `dpo` puts behind. Raises DataError: no group
    has a pair; and as `rescore_run`.
    """
    tokenizer = read_tokenizer(run.config.models, run.config.run.template_time)
    scorer = RewardsAgain(run, tokenizer, to_the_bit=False) if scores_again else None
    samples: list[tuple[Rollout, Reward | Unscored]] = []
    files = files_of(run, iterations)
    for number, file in enumerate(files):
        tick("ranking", number / len(files))
        recorded = read_recorded(locations_in(file))
        rewards = [one.rollout.reward for one in recorded] if scorer is None else scorer.of(recorded)
        samples += zip((one.rollout for one in recorded), rewards, strict=True)
    return pairs_of(samples, tokenizer, origin=str(run.folder))


def pairs_of(
    samples: Iterable[tuple[Rollout, Reward | Unscored]], tokenizer: PreTrainedTokenizerBase, *, origin: str
) -> RunPairs:
    """The same of samples by their rewards; `origin` is where they are from. Raises DataError: no group has a pair."""
    found = RunPairs()
    groups: dict[int, list[tuple[float, Rollout]]] = {}
    for rollout, reward in samples:
        completion = rollout.completion
        group = groups.setdefault(completion.group_id, [])
        if completion.finish_reason is not FinishReason.STOP:
            found.left_out["samples that have no end (sampling.max_new_tokens)"] += 1
        elif completion.sampled is not None and not completion.sampled.all():
            found.left_out["samples in which an environment speaks"] += 1
        elif not isinstance(reward, Reward):
            found.left_out["samples without a reward"] += 1
        else:
            group.append((reward.value, rollout))

    def text_of(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    for _, group in sorted(groups.items()):
        ranked = sorted(group, key=lambda one: (-one[0], one[1].completion.key.sample_index))
        worst = next((one for one in ranked if one[0] == ranked[-1][0]), None)
        if worst is None or worst[0] == ranked[0][0]:
            found.left_out["groups without a difference"] += 1
            continue
        prompt = ranked[0][1].prompt.token_ids.tolist()
        both = [one.completion.token_ids.tolist() for one in (ranked[0][1], worst[1])]
        both = [ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids for ids in both]
        asked, *said = map(text_of, (prompt, *both))
        if said[0] == said[1]:
            found.left_out["groups whose best and worst say the same"] += 1
            continue
        again = [*prompt_ids(tokenizer, [asked]), *tokenizer(said, add_special_tokens=False)["input_ids"]]
        found.num_other_tokens += again != [prompt, *both]
        found.rows.append({"prompt": asked, "chosen": said[0], "rejected": said[1]})
    if not found.rows:
        why = ", ".join(f"{count:,} {why}" for why, count in found.left_out.items())
        raise DataError(
            f"{origin} has no pair: {why}; expected a group with two rewards; name other iterations, or more samples"
        )
    return found
