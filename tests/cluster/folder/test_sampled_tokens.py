"""Whatever counts a response's tokens counts what the policy sampled, not what an environment gave."""

from dataclasses import replace

import numpy as np
from made_rollouts import rollout

from rlhfspec.cluster.folder.sample_table import SampleRow
from rlhfspec.cluster.observe.iteration_metrics import distribution_metrics, evaluation_metrics
from rlhfspec.core.records import ResponseFacts, Rollout


def told(num_sampled: int, num_given: int) -> Rollout:
    made = rollout(num_tokens=num_sampled + num_given)
    sampled = np.arange(num_sampled + num_given) < num_sampled
    return replace(made, completion=replace(made.completion, sampled=sampled))


def test_metrics_and_facts_count_sampled_tokens():
    one = told(3, 7)
    assert evaluation_metrics([one])["eval/response_tokens_mean"] == 3.0
    assert distribution_metrics([one], None)["rollout/response_tokens_p50"] == 3.0
    assert SampleRow.of(one, None).num_tokens == 3
    facts = ResponseFacts.of(one.completion)
    assert (facts.num_tokens, facts.num_given_tokens) == (3, 7)
    assert facts.token_ids == tuple(one.completion.token_ids) and len(facts.token_ids) == 10
    assert facts.weight_version == one.completion.weight_spans[-1].weight_version
