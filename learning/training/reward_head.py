"""A causal LM with a head that gives one number instead of logits: built, and run over packed sequences.

Source: Stiennon et al. 2020, 'Learning to summarize from human feedback', appendix B.1 (a linear head on the final
hidden state, drawn from N(0, 1 / (d + 1))).
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from ...core.errors import ModelError
from ...engine.weights.chunks import describe_not_finite, not_finite
from ...engine.weights.loading import load_hf_config
from ...engine.weights.weight_files import first_line, require_all_weights
from .batching import PackedSequences
from .training_forward import run_packed

HEAD = "score"
"What Hugging Face calls the head of a sequence classifier over a causal LM."

_OTHER_HEADS = re.compile(r"(^|[._])(v_?head|value|score|classif|reward|regress|rm_|rank)")
"In names of weights: a head of somebody's that gives a number."


def load_scorer(
    name: str, tokenizer: PreTrainedTokenizerBase, *, seed: int, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, bool]:
    """A sequence classifier with one output, float32, from a checkpoint of a causal LM or of such a classifier.

    Returns the model and whether its head is new. Raises ModelError: it cannot be loaded, lacks other weights than a
    head, has another number of outputs or a head of another name, or is of a family without a head called `score`.
    """
    config = load_hf_config(name, trust_remote_code=trust_remote_code)
    is_classifier = any("SequenceClassification" in one for one in config.architectures or ())
    if is_classifier and config.num_labels != 1:
        raise ModelError(
            f"'{name}' is a classifier with {config.num_labels} outputs; expected one (num_labels=1), or a causal "
            "language model, which gets a new head"
        )
    config.num_labels = 1
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model, info = AutoModelForSequenceClassification.from_pretrained(
                name,
                config=config,
                dtype=torch.float32,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
            )
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the files are the user's, and transformers raises whatever they lead to
        raise ModelError(f"cannot load '{name}' as a model with a score: {first_line(error)}") from error
    head = getattr(model, HEAD, None)
    if not isinstance(head, nn.Linear) or not isinstance(model, PreTrainedModel):
        raise ModelError(
            f"{type(model).__name__} has no linear head called {HEAD}; expected the classifier of a causal language "
            "model, such as of Llama, Qwen, Gemma or GPT-2"
        )
    missing = [key for key in info["missing_keys"] if not key.startswith(f"{HEAD}.")]
    require_all_weights(name, missing)
    is_new = len(missing) < len(info["missing_keys"])
    others = [key for key in sorted(info["unexpected_keys"]) if _OTHER_HEADS.search(key)]
    if is_new and (is_classifier or others):
        raise ModelError(
            f"'{name}' is trained to score and has no {HEAD}.weight, so its head would be drawn at random: expected "
            f"{HEAD}.weight, got {', '.join(others[:3]) or 'no other head either'}; rename the head in its weight "
            "files, or take the causal language model to train a new one"
        )
    if is_new:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            head.weight.normal_(0.0, (head.in_features + 1) ** -0.5, generator=generator)
    if odd := not_finite(model.named_parameters()):
        raise ModelError(f"the weights of '{name}' cannot be used: {describe_not_finite(odd)}")
    set_pad_token(model, tokenizer)
    return model, is_new


def set_pad_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Let the head look for the last token by the tokenizer's padding, or by its end token where there is none."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id


def scored_places(packed: PackedSequences, pad_token_id: int | None) -> list[int]:
    """For each sequence the place that is scored: its last token that is not the padding one, as Hugging Face has it.

    Where a template ends with an end token that is also the padding, this is the token before.
    """
    places = []
    for of_sequence in packed.places:
        ids = packed.ids[of_sequence]
        real = (
            (ids != pad_token_id).nonzero() if pad_token_id is not None else ids.new_tensor([[len(ids) - 1]])
        )
        places.append(int(of_sequence[real[-1, 0] if len(real) else 0]))
    return places


def packed_scores(
    model: PreTrainedModel,
    packed: PackedSequences,
    *,
    compute_dtype: torch.dtype = torch.float32,
    keeps_casts: bool = True,
) -> Float[Tensor, " N"]:
    """The score of each sequence, float32, what the model gives it alone. Differentiable."""
    last = scored_places(packed, model.config.get_text_config().pad_token_id)
    there, (places,) = packed.sent(model.device, np.array(last))

    def only_wanted(_: nn.Module, __: Any, scores: Tensor) -> Tensor:
        # the classifier picks one place of a row: all of them hold all scores, so they leave by the model's output,
        # which is where shards of weights are waited for in the backward pass
        wanted = scores[0, places, 0].float()
        return wanted.expand(1, scores.shape[1], len(places))

    with getattr(model, HEAD).register_forward_hook(only_wanted):
        return run_packed(model, there, compute_dtype, keeps_casts)[0]
