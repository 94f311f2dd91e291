"""Time awake: what passes between two looks that are far apart does not count."""

from rlhfspec.core.awake import AwakeClock


def test_time_between_frequent_readings_counts_in_full():
    clock = AwakeClock(longest_s=1.0)
    readings = [clock.read(100.0 + 0.5 * look) for look in range(9)]
    assert readings == [100.0 + 0.5 * look for look in range(9)]


def test_a_long_pause_counts_as_the_longest_allowed_interval():
    clock = AwakeClock(longest_s=1.0)
    assert [clock.read(now_s) for now_s in (0.0, 0.5, 90.5, 91.0)] == [0.0, 0.5, 1.5, 2.0]


def test_a_late_reading_never_goes_back():
    clock = AwakeClock(longest_s=1.0)
    assert [clock.read(now_s) for now_s in (5.0, 5.6, 5.2, 5.7)] == [5.0, 5.6, 5.6, 5.7]
