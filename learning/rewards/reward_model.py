"""A reward from a Hugging Face sequence-classification model with one output.

Source: Ouyang et al. 2022, section 3.5 (a reward model reads prompt and response and gives a scalar).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase
from transformers.configuration_utils import PretrainedConfig

from ...core.config import RewardConfig
from ...core.errors import ModelError
from ...core.records import Reward, Unscored
from ...engine.weights.causal_lm import DTYPES, max_context_tokens
from ...engine.weights.loading import load_model, load_tokenizer
from ..data.chat.scored_text import render
from .engine_scores import engine_scores
from .score_request import ScoreRequest

_LEAST_FILL = 0.75
"Of a batch's longest text, the least share of tokens that others in it have."


class ModelText:
    """Token ids of a scored response: from the left cut to what the model holds, the response never."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, max_tokens: int | None, *, num_embeddings: int | None = None
    ) -> None:
        """`num_embeddings`: ids that the model knows; None: all that the tokenizer gives."""
        self._tokenizer = tokenizer
        self._num_embeddings = num_embeddings
        self.max_tokens = max_tokens

    def token_ids(self, request: ScoreRequest) -> list[int]:
        """The ids of one request. Raises ValueError: none, unknown ones, no place, or what the template refuses."""
        try:
            ids = render(
                self._tokenizer,
                request.prompt.read_text,
                request.turns,
                request.whole_turn,
                max_tokens=self.max_tokens,
                tools=request.prompt.tools,
                at=request.template_time,
            )
        except Exception as error:  # templates are programs: they raise what they like
            raise ValueError(
                f"the reward model's tokenizer or chat template refuses the text: {error}"
            ) from error
        if not ids:
            raise ValueError("prompt and response have no token together; look at the prompt")
        if self.max_tokens is not None and len(ids) > self.max_tokens:
            raise ValueError(
                f"the response has {len(ids)} tokens and the reward model reads {self.max_tokens}; lower "
                "sampling.max_new_tokens, or raise reward.max_tokens where the model allows it"
            )
        if self._num_embeddings is not None and max(ids) >= self._num_embeddings:
            raise ValueError(
                f"the tokenizer gives the token id {max(ids)} and the reward model knows {self._num_embeddings} ids; "
                "take the tokenizer that the model was trained with"
            )
        return ids


class ModelReward:
    """Scores responses, on a GPU in batches of similar length, padded on the right to the longest.

    On a CPU a text's score is the same to the bit whatever is scored beside it: the engine's forward promises it, and
    where there is none, each text has a forward of its own. On a GPU scores depend on the batch by rounding.
    """

    def __init__(self, model: str, config: RewardConfig, *, device: str = "cpu") -> None:
        """Load `model` by path or hub name. Raises ModelError."""
        self.name = model
        self.batch_size = 1 if device == "cpu" else config.batch_size
        try:
            tokenizer = load_tokenizer(model)
            by_device = "float32" if device == "cpu" else "bfloat16"
            dtype = DTYPES[by_device if config.dtype == "auto" else config.dtype]
            self._model = load_model(AutoModelForSequenceClassification, model, dtype=dtype).to(device)  # type: ignore[arg-type]
        except ModelError as error:
            raise ModelError(f"cannot load reward.model: {error}") from error
        require_one_output(model, self._model.config)
        limits = [limit for limit in (config.max_tokens, max_context_tokens(self._model.config)) if limit]
        longest = min(limits, default=None)
        num_embeddings = getattr(self._model.get_input_embeddings(), "num_embeddings", None)
        self._text = ModelText(tokenizer, longest, num_embeddings=num_embeddings)
        self._engine = engine_scores(self._model, max_tokens=longest)
        "on one CPU thread, for Llama and its kin"
        # some heads find the last real token by this id; where the model has none, each batch chooses (`_pad_id`)
        self._pad_id: int | None = self._model.config.pad_token_id

    def outcomes(self, requests: Sequence[ScoreRequest]) -> Iterator[Reward | Unscored]:
        """One answer a request, in order; a score that is not finite has none."""
        found: dict[int, Reward | Unscored] = {}
        texts: list[tuple[int, list[int]]] = []
        for index, request in enumerate(requests):
            try:
                texts.append((index, self._text.token_ids(request)))
            except ValueError as error:
                found[index] = Unscored(reason=f"reward model {self.name}, {request.where}: {error}")
        for index, score in self._all_scores(texts):
            found[index] = Reward(value=score)
            if not math.isfinite(score):
                found[index] = Unscored(
                    reason=f"reward model {self.name} gave {score} for {requests[index].where}; expected a finite "
                    "number; check the model"
                )
        yield from (found[index] for index in range(len(requests)))

    def _all_scores(self, texts: list[tuple[int, list[int]]]) -> Iterator[tuple[int, float]]:
        if self._engine is not None:
            scores = self._engine.scores([ids for _, ids in texts])
            yield from ((index, score) for (index, _), score in zip(texts, scores, strict=True))
            return
        # longest first: what does not fit into memory fails at once
        texts.sort(key=lambda text: len(text[1]), reverse=True)
        for batch in _batches(texts, self.batch_size):
            yield from zip((i for i, _ in batch), self._scores([ids for _, ids in batch]), strict=True)

    @torch.inference_mode()
    def _scores(self, batch: list[list[int]]) -> list[float]:
        longest = max(len(ids) for ids in batch)
        pad = self._pad_id if self._pad_id is not None else _unused_at_the_end(batch)
        self._model.config.pad_token_id = pad
        device = self._model.device
        ids = torch.tensor([ids + [pad] * (longest - len(ids)) for ids in batch], device=device)
        mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in batch], device=device)
        return self._model(input_ids=ids, attention_mask=mask).logits[:, 0].float().tolist()


def require_one_output(name: str, config: PretrainedConfig) -> None:
    """Raise ModelError when a reward model gives more than one number."""
    if config.num_labels != 1:
        raise ModelError(
            f"reward.model '{name}' must have one output, it has {config.num_labels}; "
            "use a model trained with num_labels=1"
        )


def _batches(texts: list[tuple[int, list[int]]], batch_size: int) -> Iterator[list[tuple[int, list[int]]]]:
    """Cut texts, the longest first, into batches whose shortest has most of the longest's tokens.

    Lengths of responses have a long tail: in one batch of all, most of the work would be padding.
    """
    batch: list[tuple[int, list[int]]] = []
    for text in texts:
        if batch and (len(batch) == batch_size or len(text[1]) < _LEAST_FILL * len(batch[0][1])):
            yield batch
            batch = []
        batch.append(text)
    if batch:
        yield batch


def _unused_at_the_end(batch: list[list[int]]) -> int:
    """A token that no sequence ends with, so that a head that looks for the last other one finds the end."""
    ends = {ids[-1] for ids in batch}
    return next(token for token in range(len(ends) + 1) if token not in ends)
