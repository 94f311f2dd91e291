"""What a reward model reads of a scored response: as in its training, and refused where the response has no room."""

from __future__ import annotations

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from rlhfspec.learning.rewards.rendering import render
from rlhfspec.learning.rewards.score_request import ScoreRequest


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
