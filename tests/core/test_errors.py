"""The error tree decides the exit code."""

import pytest

from rlhfspec.core import errors


@pytest.mark.parametrize(
    ("name", "exit_code"),
    [
        ("ConfigError", 2),
        ("ModelError", 2),
        ("DataError", 2),
        ("PlacementError", 2),
        ("RewardError", 2),
        ("WeightsError", 1),
        ("NumericsError", 1),
        ("InstanceLost", 1),
        ("SchedulerLost", 1),
    ],
)
def test_only_bad_input_exits_with_2(name: str, exit_code: int) -> None:
    assert vars(errors)[name].exit_code == exit_code


def test_a_wait_that_ran_out_names_both_sides() -> None:
    error = errors.WaitTimeout(
        waiter="driver", waited_for="gen-1", order="load_weights v3", waited_s=12.5, advice="look at its log"
    )
    for part in ("driver", "gen-1", "load_weights v3", "12", "look at its log"):
        assert part in str(error)


@pytest.mark.parametrize(
    "text", ["a\nb\r\n  c", "a\x00\x1b[31m", "\ud800", "x" * 10**6, "word " * 10**5, "\u2028"]
)
def test_bad_input_is_told_in_one_printable_line(text: str) -> None:
    message = str(errors.ConfigError(f"begin {text} end"))
    assert message.isprintable() and message.encode()
    assert message.startswith("begin ") and message.endswith(" end")
    assert len(message) <= errors.MAX_MESSAGE_CHARS


def test_a_short_message_is_left_as_it_is() -> None:
    assert str(errors.DataError("data.jsonl:3: fünf 字; fix it")) == "data.jsonl:3: fünf 字; fix it"


def test_what_is_noted_with_an_error_is_told_with_it() -> None:
    error = errors.StorageError("the disk is full")
    error.add_note("go on with `rlhfspec train --resume RUN`")
    assert errors.describe_error(error) == "the disk is full; go on with `rlhfspec train --resume RUN`"
