"""Whether a pool says what its weights say: a greedy response beside transformers' own forward of the same."""

from __future__ import annotations

import numpy as np
import ray

from ...core.records import Completion, Prompt, SampleKey, SampleRequest, SamplingParams, Stream
from ...engine.model.comparison import continuation_fault
from ...engine.weights.chunks import require_names, unique_tensors, weight_views
from ...engine.weights.loading import build_causal_lm, num_token_ids
from ..plan.run_plan import RunPlan
from ..weights.publish import PublishedWeights

TOKENS = 16
"Of the prompt, and of the response."
MOST_BYTES = 8 << 30
"Of weights that are compared at every update: a forward of more takes longer than the update."


class OutcomeCheck:
    """Of one server's plan."""

    def __init__(self, plan: RunPlan) -> None:
        count = max(1, min(TOKENS, plan.inputs.max_total_tokens // 2))
        self._dtype = plan.config.models.dtype
        self._prompt = np.arange(count, dtype=np.int64) * 31 % num_token_ids(plan.inputs.tokenizer)
        self._sampling = SamplingParams(temperature=0.0, max_new_tokens=count)

    def request(self, epoch: int) -> SampleRequest:
        """What the pool is asked."""
        prompt = Prompt(prompt_id=0, token_ids=self._prompt)
        key = SampleKey(run_seed=1, stream=Stream.EVAL, sample_index=0)
        return SampleRequest(key=key, prompt=prompt, sampling=self._sampling, group_id=0, epoch=epoch)

    def fault(self, weights: PublishedWeights, said: Completion) -> str | None:
        """How the pool's response differs; None: by rounding at most."""
        manifest = weights.manifest
        model = build_causal_lm(manifest.hf_config_json, self._dtype)
        held, own = weight_views(manifest, ray.get(list(weights.refs()))), model.state_dict(keep_vars=True)
        require_names(dict(unique_tensors(model)), held)
        for name, tensor in held.items():
            own[name].data = tensor  # as it lies in the store: no copy
        return continuation_fault(model, self._prompt, said.token_ids, said.policy_logprobs)
