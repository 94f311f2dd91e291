"""The prompts of evaluations: data of their own, or the last ones of each training source, which are then held out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ...core.config import Config
from ...core.errors import DataError, InputError
from ...core.outside import quote
from ...core.records import Prompt, SamplingParams
from ...learning.data.chat.end_tokens import find_end_tokens
from ...learning.data.prompts import PromptDataset, load_prompts, sampling_params
from ...learning.environments.tools import tool_schemas

_OTHER_PROBLEMS = 0xE7A1
"Added to the seed: a generated task draws other problems for evaluations than for training."


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPrompts:
    """What every evaluation of a run generates: the same samples each time."""

    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    samples_per_prompt: int
    run_seed: int
    lines: tuple[str, ...] = ()
    "what `check` says of them, overlaps with the training prompts among it"

    @property
    def max_total_tokens(self) -> int:
        """Longest prompt and longest response together."""
        return max(len(prompt.token_ids) for prompt in self.prompts) + self.sampling.max_new_tokens

    def require_context(self, context_tokens: int | None) -> None:
        """Raise DataError where a sample might not fit the context of one of the models, `context_tokens` long."""
        if context_tokens is not None and self.max_total_tokens > context_tokens:
            raise DataError(
                f"the longest evaluation prompt and evaluation.max_new_tokens {self.sampling.max_new_tokens} are "
                f"{self.max_total_tokens} tokens together, but the models' context holds {context_tokens}; lower "
                "evaluation.max_new_tokens, or evaluation.data.max_prompt_tokens (with on_long_prompt=skip)"
            )


def split_evaluation(
    config: Config,
    dataset: PromptDataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    end_token_ids: tuple[int, ...] | None = None,
) -> tuple[PromptDataset, EvaluationPrompts | None]:
    """Return the prompts to train on and those to evaluate on, None where `evaluation.every` is 0.

    Of held-out prompts no equal one is left in the training data. Data of their own leaves it as it is, and equal
    prompts are told. `end_token_ids`: of the training data, where they have been found.

    Raises:
        DataError: no prompt is left on one of the two sides; what reading `evaluation.data` raises, with that name
            before it.
    """
    settings = config.evaluation
    if not settings.every:
        return dataset, None
    if settings.data is None:
        dataset, prompts, lines = _hold_out(dataset, settings.holdout)
    else:
        try:
            seed, tools = config.run.seed + _OTHER_PROBLEMS, tool_schemas(config.environment)
            own = load_prompts(settings.data, tokenizer, seed=seed, tools=tools)
        except InputError as error:
            raise type(error)(f"evaluation.data: {error}") from error
        # other data may have another chat format
        prompts, end_token_ids = own.prompts, None
        lines = (*_overlap(prompts, dataset), *notes_of(own))
    evaluation = evaluation_of(config, prompts, tokenizer, lines=lines, end_token_ids=end_token_ids)
    return dataset, evaluation


def evaluation_of(
    config: Config,
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    *,
    lines: tuple[str, ...] = (),
    end_token_ids: tuple[int, ...] | None = None,
) -> EvaluationPrompts:
    """The evaluation of these prompts, or of the first `evaluation.limit`; `lines` go below what is said of it.

    `end_token_ids`: what ends their responses where the config names nothing; None: it is found for them.
    """
    settings, ends = config.evaluation, config.sampling.end_token_ids
    prompts = prompts[: settings.limit]
    sampling = config.sampling.model_copy(
        update={
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": 0,
            "min_p": 0.0,
            "max_new_tokens": settings.max_new_tokens or config.sampling.max_new_tokens,
            "end_token_ids": end_token_ids if ends is None else ends,
        }
    )
    if sampling.end_token_ids is None:
        found = find_end_tokens(
            settings.data or config.data,
            tokenizer,
            model=config.models.target,
            is_chat=any(prompt.messages for prompt in prompts),
            stop_token_ids=sampling.stop_token_ids,
        )
        sampling = sampling.model_copy(update={"end_token_ids": found.token_ids})
    how = "greedy" if settings.temperature == 0.0 else f"temperature {settings.temperature:g}"
    often = f", every {settings.every} iterations" if settings.every else ""
    first = (
        f"evaluation of {len(prompts)} prompts with {settings.samples_per_prompt} samples each ({how}){often}"
    )
    return EvaluationPrompts(
        prompts=tuple(prompts),
        sampling=sampling_params(sampling, tokenizer),
        samples_per_prompt=settings.samples_per_prompt,
        run_seed=config.run.seed,
        lines=(first, *lines),
    )


def notes_of(dataset: PromptDataset) -> list[str]:
    """What was left out and what nothing reads; how often an epoch gives a source's prompts is of no evaluation."""
    return [f"  {note}" for note in replace(dataset, sources=()).notes()]


def _hold_out(
    dataset: PromptDataset, holdout: int
) -> tuple[PromptDataset, tuple[Prompt, ...], tuple[str, ...]]:
    """Take the last prompts of every source out of the training data, and all that equal one of them."""
    places = _last_of_each([source.num_prompts for source in dataset.sources] or [len(dataset)], holdout)
    held = tuple(dataset.prompts[number] for number in places)
    texts, chosen = {_text(prompt) for prompt in held}, set(places)
    left = [number for number in range(len(dataset)) if number not in chosen]
    kept = [number for number in left if _text(dataset.prompts[number]) not in texts]
    if not kept:
        raise DataError(
            f"evaluation.holdout is {holdout} and no training prompt is left of {len(dataset)} beside them and their "
            "equals; lower evaluation.holdout, or give evaluation.data prompts of its own"
        )
    num_equal = len(left) - len(kept)
    equal = f", with {num_equal} training prompts that equal one of them" if num_equal else ""
    lines = (f"  {len(held)} prompts are held out and never trained on{equal}",)
    return dataset.only(kept), held, lines


def _last_of_each(counts: Sequence[int], holdout: int) -> list[int]:
    """Places of the last prompts of each source, as many of each as its share of all (largest remainders)."""
    total = sum(counts)
    holdout = min(holdout, total)
    shares = [count * holdout // total for count in counts]
    by_remainder = sorted(range(len(counts)), key=lambda index: -(counts[index] * holdout % total))
    for index in by_remainder[: holdout - sum(shares)]:
        shares[index] += 1
    ends = zip(accumulate(counts), shares, strict=True)
    return [place for end, share in ends for place in range(end - share, end)]


def _overlap(prompts: Sequence[Prompt], dataset: PromptDataset) -> tuple[str, ...]:
    # the words too: one file may hold messages and the other text
    trained = {_text(prompt) for prompt in dataset.prompts}
    words = {prompt.text.strip() for prompt in dataset.prompts} - {""}
    known = [prompt for prompt in prompts if _text(prompt) in trained or prompt.text.strip() in words]
    if not known:
        return ()
    return (
        f"  {len(known)} of {len(prompts)} evaluation prompts are training prompts too, the first "
        f"{quote(known[0].text)}: what they score is no measure of new ones",
    )


def _text(prompt: Prompt) -> bytes:
    return prompt.token_ids.tobytes()
