"""A user's function: whatever it does to its process, its sample is named and the next one is scored."""

import logging
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
from pytest import mark, raises

from rlhfspec.cluster.plan.reward_plan import reward_columns
from rlhfspec.core.config import RewardConfig
from rlhfspec.core.config_io import config_from_dict
from rlhfspec.core.errors import ConfigError, RewardError
from rlhfspec.core.records import FinishReason, Prompt, ResponseFacts, Reward, Unscored
from rlhfspec.learning.rewards.reward_function import build_reward
from rlhfspec.learning.rewards.score_request import score_requests
from rlhfspec.learning.rewards.timed_function import UserReward

ODD = [
    ("hangs", r"did not return within reward.timeout_s \(0.5 s\)"),
    ("sleeps_in_c", r"did not return within reward.timeout_s \(0.5 s\)"),
    ("raises", r"raised ValueError: no such thing \(odd_rewards.py, line \d+\)"),
    ("leaves", "raised SystemExit: 3"),
    ("crashes", r"ended its process \(exit code 7\)"),
    ("hangs_in_await", r"did not return within reward.timeout_s \(0.5 s\)"),
    ("raises_in_await", r"raised ValueError: no such thing"),
    ("crashes_in_await", r"ended its process \(exit code 7\)"),
    ("gives_none", "returned None; expected a finite number"),
    ("gives_nan", "returned nan"),
    ("gives_infinity", "returned inf"),
    ("gives_text", "returned '1.0', a str"),
    ("gives_bad_part", "returned for 'part' None"),
]
CHAT = (("user", "hi"),)


def batch(*responses: str):
    prompts = [
        Prompt(prompt_id=40 + i, token_ids=np.array([1]), text="p", messages=CHAT)
        for i in range(len(responses))
    ]
    facts = [
        ResponseFacts(sample_index=900 + i, num_tokens=5, finish_reason=FinishReason.LENGTH)
        for i in range(len(responses))
    ]
    return prompts, list(responses), facts


def reward(name: str, **settings):
    return build_reward(RewardConfig(kind=f"odd_rewards:{name}", timeout_s=0.5, **settings))


@mark.parametrize(("name", "words"), ODD)
def test_a_sample_that_cannot_be_scored_is_named_and_the_others_are_scored(name, words):
    outcomes = reward(name, on_error="skip").score_each(*batch("one", "bad", "three", "bad", "seven"))
    assert [isinstance(outcome, Reward) for outcome in outcomes] == [True, False, True, False, True]
    for place in (1, 3):
        fault = outcomes[place]
        assert isinstance(fault, Unscored)
        with raises(
            RewardError,
            match=rf"sample 90{place} \(prompt 4{place}\) {words}.*prompt began '.+', .*response began 'bad'",
        ):
            raise RewardError(fault.reason)


@mark.parametrize(("name", "words"), ODD)
def test_where_errors_end_the_run_the_first_one_is_raised_and_the_next_batch_is_scored(name, words):
    stage = reward(name)
    with raises(RewardError, match=rf"sample 901 \(prompt 41\) {words}"):
        stage.score_each(*batch("one", "bad", "three", "bad"))
    # answers of the first batch that nobody read do not come out now
    assert [r.value for r in stage.score(*batch("seven!"))] in ([6.0], [1.0])


def test_to_leave_samples_out_is_advised_where_it_is_not_done_already():
    with raises(RewardError, match=r"fix the function; reward\.on_error: skip leaves such a sample out"):
        reward("raises").score_each(*batch("bad"))
    (left_out,) = reward("raises", on_error="skip").score_each(*batch("bad"))
    assert isinstance(left_out, Unscored) and left_out.reason.endswith("fix the function")


def test_what_a_function_prints_stands_in_the_log_of_its_process(caplog, capfd):
    found, both = [], threading.Event()

    class Found(logging.Handler):
        def emit(self, record):
            found.append(record.getMessage())
            if len(found) == 2:
                both.set()

    logger = logging.getLogger("rlhfspec.learning.rewards.timed_function")
    handler = Found()
    with caplog.at_level(logging.INFO, logger.name):
        logger.addHandler(handler)
        try:
            assert reward("prints").score_each(*batch("one"))[0] == Reward(value=1.0, parts={})
            assert both.wait(60) and found == ["prints prints: saw one", "prints prints: ä"]
        finally:
            logger.removeHandler(handler)
    assert capfd.readouterr().err.startswith("saw one")


def test_a_child_that_was_killed_between_calls_costs_no_sample():
    source = UserReward("odd_rewards:fine", timeout_s=30.0)
    os.kill(source._child._process.pid, signal.SIGKILL)
    source._child._process.wait()
    stage = build_reward(RewardConfig(kind="odd_rewards:fine"))
    stage._parts = [(stage._parts[0][0], source)]
    assert [r.value for r in stage.score(*batch("one", "three"))] == [3.0, 5.0]


def test_a_coroutine_is_awaited():
    assert [r.value for r in reward("waits").score(*batch("one"))] == [3.0]


def test_coroutines_of_a_batch_wait_beside_one_another():
    stage = build_reward(RewardConfig(kind="odd_rewards:waits_for_ten", timeout_s=60.0))
    assert [r.value for r in stage.score(*batch(*"abcdefghij"))] == [1.0] * 10


def test_a_function_gets_what_it_asks_for_by_name():
    [found] = reward("asks").score(*batch("one"))
    assert (found.value, found.parts) == (5.0, {"index": 900.0, "cut": 1.0})
    assert [r.value for r in reward("takes_all").score(*batch("one"))] == [1.0]


def test_none_of_an_optional_part_adds_nothing_and_of_another_is_a_fault():
    fine = {"name": "fine", "kind": "odd_rewards:fine"}
    maybe = {"name": "maybe", "kind": "odd_rewards:gives_none", "weight": 2.0}

    def outcomes(optional: bool):
        parts = [fine, {**maybe, "optional": optional}]
        config = RewardConfig.model_validate({"parts": parts, "on_error": "skip"})
        return build_reward(config).score_each(*batch("bad", "three"))

    assert outcomes(True) == [
        Reward(value=3.0, parts={"fine": 3.0}),
        Reward(value=15.0, parts={"fine": 5.0, "maybe": 5.0}),
    ]
    none, some = outcomes(False)
    assert isinstance(some, Reward) and isinstance(none, Unscored)
    assert none.reason.endswith("set optional: true in reward.parts 'maybe', which then does not apply")


def test_a_response_to_which_no_part_applies_has_no_reward():
    maybe = [{"name": n, "kind": "odd_rewards:gives_none", "optional": True} for n in ("a", "b")]
    skipping = build_reward(RewardConfig.model_validate({"parts": maybe, "on_error": "skip"}))
    none, some = skipping.score_each(*batch("bad", "three"))
    assert isinstance(none, Unscored) and none.is_none and "no part of reward.parts applies" in none.reason
    assert isinstance(some, Reward) and some.value == 10.0
    with raises(RewardError, match=r"all gave None.*reward\.on_error: skip"):
        build_reward(RewardConfig.model_validate({"parts": maybe})).score(*batch("bad"))


@mark.parametrize("name", ["asks_for_a_column", "sees_a_column"])
def test_a_function_gets_the_data_set_s_columns_by_name(name):
    fields = {"level": 3, "answer": "not by name", "messages": "our own go before"}
    prompt = Prompt(prompt_id=0, token_ids=np.array([1]), text="p", fields=fields)
    stage = build_reward(RewardConfig(kind=f"odd_rewards:{name}"), fields=("level",))
    assert [r.value for r in stage.score([prompt], ["one"])] == [3.0]


def test_a_function_that_asks_for_a_column_that_no_data_has_is_refused_before_the_run():
    with raises(ConfigError, match=r"asks_for_a_column' cannot be called .*'level'.*data\.reward_fields"):
        build_reward(RewardConfig(kind="odd_rewards:asks_for_a_column"))
    data = {"path": "a.jsonl", "reward_fields": ["level", "kind"]}
    both = {"sources": [data, {"path": "b.jsonl", "reward_fields": ["level"]}]}
    for tree, columns in ((data, ("level", "kind")), (both, ("level",))):
        made = config_from_dict({"models": {"target": "a", "draft": "b"}, "data": tree})
        assert reward_columns(made.data, made.evaluation) == columns


def test_a_format_pays_for_a_response_that_matches_as_a_whole():
    stage = build_reward(RewardConfig(kind="format", pattern=r"<think>.*</think>\d+"))
    rewards = stage.score(*batch("<think>a\nb</think>7", "<think>a</think>7 or so", "7"))
    assert [r.value for r in rewards] == [1.0, 0.0, 0.0]


def test_a_pattern_that_takes_for_ever_is_a_call_that_hangs():
    stage = build_reward(RewardConfig(kind="format", pattern=r"(a+)+b", timeout_s=0.5, on_error="skip"))
    outcomes = stage.score_each(*batch("a" * 60, "aab"))
    assert isinstance(outcomes[0], Unscored) and "did not return" in outcomes[0].reason
    assert outcomes[1] == Reward(value=1.0)


def test_what_a_function_forks_or_starts_answers_nothing_and_ends_with_it():
    stage = UserReward("odd_rewards:forks", timeout_s=30.0)
    first, second, last = stage.outcomes(score_requests(*batch("one", "three", "sleeper")))
    assert isinstance(first, Reward) and isinstance(second, Reward) and isinstance(last, Reward)
    assert [first.value, second.value] == [3.0, 5.0]
    assert is_running(int(last.parts["pid"]))
    stage.close()
    while is_running(int(last.parts["pid"])):
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
