"""Time awake: what passes between two looks that are far apart does not count."""

from core.awake import AwakeClock


def test_time_between_frequent_looks_counts_in_full():
    clock = AwakeClock(longest_s=1.0)
    readings = [clock.read(100.0 + 0.5 * look) for look in range(9)]
    assert readings == [100.0 + 0.5 * look for look in range(9)]


def test_of_a_long_pause_only_the_longest_look_counts_and_the_rest_for_good():
    clock = AwakeClock(longest_s=1.0)
    assert [clock.read(now_s) for now_s in (0.0, 0.5, 90.5, 91.0)] == [0.0, 0.5, 1.5, 2.0]


def test_a_reading_that_comes_late_never_turns_time_back():
    clock = AwakeClock(longest_s=1.0)
    assert [clock.read(now_s) for now_s in (5.0, 5.6, 5.2, 5.7)] == [5.0, 5.6, 5.6, 5.7]
