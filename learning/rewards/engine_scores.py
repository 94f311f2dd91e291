"""A reward model's scores by the engine's forward, on one CPU thread: what the library gives, in about half the time.

A Llama with one output instead of a vocabulary is to the engine a Llama whose head has one row. What a text's score
rounds to depends on that text alone, whatever is scored beside it (design 3.5).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import nn

from ...core.errors import ModelError
from ...engine.cache.kv_pool import KVPool, KVShape
from ...engine.model.comparison import compared_ids
from ...engine.model.compute_backend import PoolAttention
from ...engine.model.llama_forward import LlamaForward
from ...engine.model.llama_model import LlamaModel, can_serve
from ...engine.model.prefill import prefill_packs
from ...engine.model.prefill_plan import PrefillPiece, PrefillPlan, packed_inputs
from ...engine.model.support import refuse_unsupported
from ...engine.numerics import choose_backend, on_threads
from ...engine.weights.causal_lm import PreTrainedModel, max_context_tokens

NUM_SLOTS = 8
"Texts whose keys and values are held at once."
MAX_TOKENS = 1024
"Of one forward."
TOLERATED = 1e-3
"Of a score's size, or of 1: by how much two forwards of float32 may differ."
_COMPARED_TOKENS = (96, 31)
_AS_A_HEAD = {"num_outputs": 1, "tie_word_embeddings": False}
"What a classifier's config says otherwise of its output than a language model's."

logger = logging.getLogger(__name__)


class EngineScores:
    """The engine's forward over a classifier's weights; one caller at a time, others wait."""

    def __init__(self, model: PreTrainedModel, forward: LlamaForward, pool: KVPool, attention: PoolAttention):
        """See `engine_scores`."""
        self._forward, self._pool, self._attention = forward, pool, attention
        self._pad_id: int | None = model.config.get_text_config().pad_token_id
        self._lock = Lock()

    @torch.inference_mode()
    def scores(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """The score of each text of at least one token id, at its last token that is not the padding one."""
        scored = [self._until_scored(text) for text in texts]
        with self._lock, on_threads(1):
            found = [
                score
                for start in range(0, len(scored), NUM_SLOTS)
                for score in self._together(scored[start : start + NUM_SLOTS])
            ]
            self._pool.memory.hold(np.zeros(0, dtype=np.int64))
        return found

    def _together(self, texts: list[Sequence[int]]) -> list[float]:
        self._pool.memory.hold(np.array([len(text) for text in texts]))
        whole = [PrefillPiece(slot=slot, start=0, length=len(text)) for slot, text in enumerate(texts)]
        found = [0.0] * len(texts)
        for pieces in prefill_packs(whole, MAX_TOKENS):
            ids, positions = packed_inputs(texts, pieces)
            plan = PrefillPlan(pool=self._pool, attention=self._attention, pieces=pieces)
            values = self._forward(torch.from_numpy(ids), torch.from_numpy(positions), plan)[:, 0]
            # a text that goes on in the next forward is overwritten there
            ends = np.cumsum([piece.length for piece in pieces]) - 1
            for piece, value in zip(pieces, values[ends].tolist(), strict=True):
                found[piece.slot] = value
        return found

    def _until_scored(self, text: Sequence[int]) -> Sequence[int]:
        """Hugging Face's rule (`modeling_layers.GenericForSequenceClassification`)."""
        real = [place for place, token in enumerate(text) if token != self._pad_id]
        return text[: real[-1] + 1 if real else 1]


def engine_scores(model: PreTrainedModel, *, max_tokens: int | None) -> EngineScores | None:
    """The engine's forward for a classifier, compared with the classifier's own; None where it is not to be had.

    Args:
        model: a sequence classifier with one output, in eval mode; its weights stay as they are.
        max_tokens: of the longest text; None: what the model's positions allow.
    """
    longest = max_tokens or max_context_tokens(model.config)
    if model.device.type != "cpu" or model.dtype != torch.float32 or longest is None:
        return None
    backend = choose_backend(model.device)
    attention = backend.attention
    if not isinstance(attention, PoolAttention) or not isinstance(getattr(model, "score", None), nn.Linear):
        return None
    as_lm = _AsCausalLM(model)
    try:
        refuse_unsupported(model, longest)
        if not can_serve(as_lm, **_AS_A_HEAD):
            return None
        shape = KVShape.of(model.config)
        # before the forward: addresses for all positions, where the system has so many
        pool = KVPool(
            shape, num_slots=NUM_SLOTS, capacity=longest, dtype=torch.float32, device=model.device, reach=1
        )
        own = LlamaModel.of(as_lm, backend, **_AS_A_HEAD)
        forward = LlamaForward(own, capacity=longest)
    except ModelError:
        return None
    except (OSError, OverflowError) as error:
        logger.warning(
            "no addresses for caches of %d tokens (%s): the library's scores; reward.max_tokens makes them smaller",
            longest,
            error,
        )
        return None
    if forward.fused is None or own.kv_shape != shape:
        return None
    ours = EngineScores(model, forward, pool, attention)
    vocab_size = model.config.vocab_size
    texts = [
        compared_ids(model, slot, min(length, longest), vocab_size).tolist()
        for slot, length in enumerate(_COMPARED_TOKENS)
    ]
    with torch.inference_mode():
        theirs = [float(model(input_ids=torch.tensor([text])).logits[0, 0]) for text in texts]
    together = ours.scores(texts)
    close = np.allclose(together, theirs, rtol=TOLERATED, atol=TOLERATED)
    if not close or together != [ours.scores([text])[0] for text in texts]:
        logger.warning(
            "the engine's forward gives %s where %s gives %s: the library's scores", together, model, theirs
        )
        return None
    return ours


class _AsCausalLM(nn.Module):
    """A classifier as the engine takes models: its head is the language model's."""

    _supports_attention_backend = True

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.config: Any = model.config
        self.model = model.base_model
        self.lm_head: nn.Linear = model.score  # type: ignore[assignment]
        self.dtype, self.device = model.dtype, model.device
