"""An episode says how it ended, and what was said by whom."""

import numpy as np
import pytest

from rlhfspec.core.records import (
    Completion,
    FinishReason,
    Prompt,
    ResponseFacts,
    SampleKey,
    SampleRequest,
    SamplingParams,
    WeightSpan,
)
from rlhfspec.learning.environments.episode import Episode, EpisodeLimits
from rlhfspec.learning.rewards.score_request import score_requests

PROMPT = Prompt(prompt_id=0, token_ids=np.arange(3), text="q", messages=(("user", "q"),))


def episode(**limits) -> Episode:
    key = SampleKey(run_seed=0, sample_index=0)
    request = SampleRequest(key=key, prompt=PROMPT, sampling=SamplingParams(max_new_tokens=50))
    return Episode(request, EpisodeLimits(max_turns=limits.pop("max_turns", 4), max_turn_tokens=None))


def turn(num_tokens: int, reason: FinishReason) -> Completion:
    return Completion(
        key=SampleKey(run_seed=0, sample_index=0),
        prompt_id=0,
        group_id=0,
        epoch=0,
        token_ids=np.arange(num_tokens),
        policy_logprobs=np.zeros(num_tokens, dtype=np.float32),
        sampling_logprobs=np.zeros(num_tokens, dtype=np.float32),
        finish_reason=reason,
        weight_spans=(WeightSpan(weight_version=0, first_position=0),),
        instance="i",
        num_decode_steps=1,
        num_accepted_tokens=0,
    )


NOTHING = np.zeros(0, dtype=np.int64)


@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize("reason", list(FinishReason))
def test_a_last_turn_that_was_cut_ends_as_cut_whatever_the_environment_says(reason, done):
    played = episode(max_turns=1)
    played.responses.append("x")
    whole = played.goes_on(turn(5, reason), NOTHING, reward=0.0, done=done)
    assert isinstance(whole, Completion)
    is_end = done and reason is FinishReason.STOP
    assert whole.finish_reason is (FinishReason.STOP if is_end else FinishReason.LENGTH)


def test_the_policys_words_are_apart_from_what_it_was_told():
    played = episode()
    completion = turn(2, FinishReason.STOP)
    played.say("a")
    played.goes_on(completion, NOTHING, reward=0.0, done=False)
    played.say("b")
    played.goes_on(completion, np.arange(3), reward=0.0, done=False, messages=(("user", "told"),))
    played.say("c")
    assert played.spoken == "ab\nc"
    assert played.turns == [("assistant", "ab"), ("user", "told"), ("assistant", "c")]
    played.goes_on(completion, np.arange(3), reward=0.0, done=False, messages=(("assistant", "24>>"),))
    played.say("d")
    assert played.spoken == "ab\nc\nd" and played.turns[-1] == ("assistant", "c24>>d")


def test_rewards_read_the_policys_words_and_models_the_turns():
    turns = (("assistant", "a"), ("user", "#### 72"), ("assistant", "b"))
    facts = ResponseFacts(sample_index=0, num_tokens=3, finish_reason=FinishReason.STOP, turns=turns)
    (asked,) = score_requests([PROMPT], ["a\nb"], [facts])
    assert asked.response == "a\nb" and asked.last_turn == "b"
    assert asked.messages == (("user", "q"), *turns[:-1])
