"""Records: control messages carry no array, sums add up, ratios are derived."""

import dataclasses
import json

import numpy as np
import pytest

from rlhfspec.core.decode_records import PLAIN, GenerationStats, InstanceLoad
from rlhfspec.core.records import Prompt, SampleKey, SampleRequest, SamplingParams, Stream, record_to_dict


def test_a_record_with_an_array_is_refused_naming_the_field() -> None:
    prompt = Prompt(prompt_id=0, token_ids=np.array([1, 2]))
    with pytest.raises(TypeError, match=r"Prompt\.token_ids is an array"):
        record_to_dict(prompt)


def test_an_array_deep_inside_is_found_too() -> None:
    request = SampleRequest(
        key=SampleKey(run_seed=0, sample_index=1),
        prompt=Prompt(prompt_id=0, token_ids=np.array([1])),
        sampling=SamplingParams(),
    )
    with pytest.raises(TypeError, match="token_ids"):
        record_to_dict(request)


def test_a_control_record_becomes_json() -> None:
    key = SampleKey(run_seed=3, stream=Stream.BENCH, sample_index=2**63)
    assert json.loads(json.dumps(record_to_dict(key))) == {
        "run_seed": 3,
        "stream": "bench",
        "sample_index": 2**63,
        "turn": 0,
    }


def test_nested_records_become_nested_dicts() -> None:
    load = InstanceLoad(
        instance="gen-0",
        num_running=1,
        num_waiting=0,
        num_free_slots=3,
        context_tokens=20,
        weight_version=2,
        drafter_version=0,
        decode_step=5,
        goodput_tokens_per_s=10.0,
        stats=GenerationStats(num_decode_steps=5),
    )
    assert record_to_dict(load)["stats"]["num_decode_steps"] == 5


def test_records_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PLAIN.num_nodes = 3  # type: ignore[misc]


def test_stats_add_and_subtract_field_by_field() -> None:
    a = GenerationStats(num_decode_steps=2, num_emitted_tokens=6, num_sample_steps=2, draft_s=0.5)
    b = GenerationStats(num_decode_steps=1, num_emitted_tokens=4, num_sample_steps=2, verify_s=1.0)
    total = a + b
    assert (total.num_decode_steps, total.num_emitted_tokens) == (3, 10)
    assert total.busy_s == 1.5
    assert total - b == a


def test_ratios_follow_their_definitions() -> None:
    stats = GenerationStats(
        num_sample_steps=4, num_draft_tokens=32, num_accepted_tokens=8, num_emitted_tokens=12
    )
    assert stats.acceptance_rate == 0.25
    assert stats.mean_acceptance_length == 3.0
    assert GenerationStats().acceptance_rate == 0.0
