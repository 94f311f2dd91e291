"""What a head's drafts are worth on prompts that it has not seen: acceptance on the target's own responses to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transformers import PreTrainedModel

from rlhfspec.core.records import Prompt, SamplingParams
from rlhfspec.engine.drafters.head.head_weights import HeadWeights, require_fit
from rlhfspec.learning.drafts.head_acceptance import Acceptance, drafted_response
from rlhfspec.learning.drafts.head_module import HeadModule
from rlhfspec.learning.drafts.own_responses import Responder
from rlhfspec.learning.drafts.target_parts import TargetParts

Tick = Callable[[str, float], None]


def evaluate_head(
    target: PreTrainedModel,
    head: HeadWeights,
    prompts: Sequence[Prompt],
    *,
    samplings: Sequence[SamplingParams],
    vocab_size: int,
    num_levels: int,
    seed: int = 0,
    category_field: str | None = None,
    progress: Tick = lambda stage, share: None,
) -> list[Acceptance]:
    """Return the acceptance of a head's chains at each of some samplings, of responses sampled so.

    `category_field` names a further column of the prompts (`Prompt.fields`) that they are grouped by.
    Raises ModelError when the head is of another target, and as `own_responses.Responder`.
    """
    parts = TargetParts.of(target, head.config.tapped_layers)
    require_fit(head.config, target.config)
    longest = max(len(prompt.token_ids) for prompt in prompts)
    responder = Responder(
        target,
        parts.taps,
        vocab_size=vocab_size,
        max_total_tokens=longest + max(sampling.max_new_tokens for sampling in samplings),
    )
    module = HeadModule(head).to(parts.embedding.device)
    found = []
    for place, sampling in enumerate(samplings):
        drafted = []
        for response in responder.responses(prompts, sampling, seed=seed):
            drafted.append(
                drafted_response(
                    module,
                    response.sequence,
                    response.key,
                    embedding=parts.embedding,
                    temperature=sampling.temperature,
                    num_levels=num_levels,
                    category=str(response.prompt.fields[category_field]) if category_field else "",
                )
            )
            done = (place + len(drafted) / len(prompts)) / len(samplings)
            progress(f"temperature {sampling.temperature:g}", done)
        found.append(Acceptance.of(drafted))
    return found
