"""Source, destination or scheduler die right before or after each message of a move: nothing is lost or changed.

And everything at once, at random: messages dropped, doubled, late, instances and schedulers killed.
"""

import random
from collections.abc import Callable, Iterator

import pytest
import tiny_pool
import torch
from forced_moves import Forced
from local_pool import Later, LocalPool
from one_move import DESTINATION, RECOVERY_TURNS, SOURCE, OneMove, delay, drop, duplicate, echo, name_of

from rlhfspec.core.config import ReallocationConfig
from rlhfspec.policies.migration.move_messages import MoveOrder, Settle

pytestmark = pytest.mark.slow

MESSAGES = (
    "MoveOrder",
    "Prepare",
    "Ready",
    "Landed",
    "HandOver",
    f"own to {DESTINATION}",
    f"release to {SOURCE}",
)
BY_THE_SCHEDULER = ("MoveOrder", f"own to {DESTINATION}", f"release to {SOURCE}")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def one_move() -> Iterator[Callable[..., OneMove]]:
    made: list[OneMove] = []

    def make(**settings) -> OneMove:
        made.append(OneMove(**settings))
        return made[-1]

    yield make
    for move in made:
        move.pool.close()


def killing(who: str, when: str):
    """Kill an instance right before a message is sent, or when it has been received and acted upon."""

    def plant(pool: LocalPool, receiver: str, message):
        if when == "before":
            pool.kill(who)
        else:
            pool.after(1, lambda: pool.kill(who))
        is_unsent = when == "before" and (who == receiver or sender_of(message) == who)
        return [] if is_unsent else [message]

    return plant


def sender_of(message) -> str:
    if isinstance(message, (MoveOrder, Settle)):
        return "scheduler"
    return SOURCE if type(message).__name__ in ("Prepare", "HandOver", "Cancel") else DESTINATION


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("message", MESSAGES)
@pytest.mark.parametrize("who", [SOURCE, DESTINATION])
def test_a_killed_instance_costs_no_sample_and_harms_no_peer(one_move, who, message, when):
    move = one_move(count=1)
    move.plants[message] = killing(who, when)
    records = move.run()
    other = DESTINATION if who == SOURCE else SOURCE
    assert list(move.pool.machine.instances()) == [other]
    assert len(records) == 1
    turns = round((records[0].ended_s - records[0].ordered_s) * 100)
    assert turns <= RECOVERY_TURNS
    if records[0].outcome != "moved":
        assert who in records[0].why_ended, records[0].why_ended
    started_again = {c.key for c in move.pool.outcome.completions.values() if c.epoch > 1}
    assert len(started_again) <= 4


@pytest.mark.parametrize("fault", [drop, duplicate, delay, echo])
@pytest.mark.parametrize("message", ["Ready", "HandOver"])
def test_the_source_keeps_its_sample_though_the_call_off_for_a_dead_destination_is_faulty(
    one_move, message, fault
):
    move = one_move(count=1)
    move.plants[message] = killing(DESTINATION, "before" if message == "HandOver" else "after")
    move.plants["CallOff"] = fault
    (record,) = move.run()
    assert record.outcome in ("kept", "taken back") and DESTINATION in record.why_ended


def scheduler_dies(when: str, fault=None):
    def plant(pool: LocalPool, receiver: str, message):
        if when == "before":
            pool.kill_scheduler()
        else:
            pool.after(1, pool.kill_scheduler)
        if sender_of(message) == "scheduler" and when == "before":
            return []
        return fault(pool, receiver, message) if fault else [message]

    return plant


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("message", MESSAGES)
def test_moves_go_on_after_a_scheduler_is_replaced_at_any_stage(one_move, message, when):
    move = one_move()
    move.plants[message] = scheduler_dies(when)
    records = move.run()
    assert move.pool.term == 1
    assert records[-1].outcome == "moved", "the next scheduler moves samples again"


@pytest.mark.parametrize("fault", [drop, delay, echo])
@pytest.mark.parametrize("message", MESSAGES[1:])
def test_a_faulty_message_while_the_scheduler_is_replaced_changes_no_sample(one_move, message, fault):
    """A verdict or order of the dead scheduler that comes late is void: its successor has ruled by now."""
    move = one_move()
    move.plants[message] = scheduler_dies("after", fault)
    move.run()
    assert move.pool.term == 1


@pytest.mark.parametrize("verdict", [f"own to {SOURCE}", f"release to {DESTINATION}"])
def test_a_late_take_back_verdict_of_a_dead_scheduler_is_void(one_move, verdict):
    """Its verdict comes after its successor has ruled by what it found, and is void."""
    move = one_move()

    def impatient(pool: LocalPool, receiver: str, message):
        # the source asks for the sample in the very turn in which it hands it over, and is polled first
        pool.now_s += 1.0
        return [message]

    def death(pool: LocalPool, receiver: str, message):
        pool.kill_scheduler()
        return [Later(message, 2)]

    move.plants["HandOver"] = impatient
    move.plants[verdict] = death
    if verdict.startswith("own"):
        move.plants[f"release to {DESTINATION}"] = delay
    move.run()
    epochs = {key.sample_index: c.epoch for key, c in move.pool.outcome.completions.items()}
    # without the verdict the source has not taken it up, and the destination's copy is the newest
    assert epochs[0] == (1 if verdict.startswith("own") else 2)


def test_a_hand_over_that_outlives_both_its_source_and_its_scheduler_is_refused(one_move):
    """The sample is given out anew, to a third instance: no second copy may come up at the destination."""

    def both_die(pool: LocalPool, receiver: str, message):
        pool.kill(SOURCE)
        pool.kill_scheduler()
        # no verdict reaches the destination: a copy there would run to its end, ahead of the sample's owner
        pool.fault = lambda receiver, message: [] if isinstance(message, Settle) else [message]
        return [Later(message, 4)]

    move = one_move(count=1, bystander=True)
    move.plants["HandOver"] = both_die
    move.run()
    (again,) = [c for c in move.pool.outcome.completions.values() if c.key.sample_index == 0]
    assert again.epoch == 1, "it started again"


class Chaos:
    """Drops, doubles and delays messages; kills instances and schedulers; replaces what it killed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.pool: LocalPool | None = None
        self.num_killed = 0
        self.kinds: set[str] = set()

    def __call__(self, receiver: str, message) -> list:
        assert self.pool is not None
        dice = self.random.random()
        if dice < 0.01 and self.num_killed < 3:
            self._kill()
        elif dice < 0.02 and self.pool.term < 4:
            self.pool.kill_scheduler()
        self.kinds.add(name_of("x", message))
        dice = self.random.random()
        if dice < 0.06:
            return []
        if dice < 0.12:
            return [message, message]
        if dice < 0.22:
            return [Later(message, self.random.randint(1, 20))]
        if dice < 0.28:
            return [message, Later(message, self.random.randint(1, 20))]
        return [message]

    def _kill(self) -> None:
        pool = self.pool
        assert pool is not None
        victim = self.random.choice([instance.name for instance in pool.alive])
        self.num_killed += 1
        pool.kill(victim)
        name = f"new-{self.num_killed}"
        pool.after(2, lambda: pool.add(name, tiny_pool.engine("seldom", slots=6)))


@pytest.mark.parametrize("seed", range(6))
def test_random_message_faults_and_kills_lose_and_change_no_sample(seed):
    asked = tiny_pool.requests(12, new_tokens=70, group_size=2)
    chaos = Chaos(seed)
    pool = LocalPool(
        {name: tiny_pool.engine("seldom", slots=6) for name in ("a", "b", "c")},
        reallocation=Forced(share=0.3, seed=seed),
        settings=ReallocationConfig(timeout_s=0.05, frame_bytes=1 << 10, transfer_share=1.0),
        frame_timeout_s=0.1,
        fault=chaos,
    )
    chaos.pool = pool
    try:
        pool.run(asked, max_turns=1500)
        assert tiny_pool.mismatches(pool.outcome.completions, tiny_pool.reference(asked)) == []
        assert pool.outcome.alarms == [] and pool.outcome.delivered_twice == []
        pool.fault = lambda receiver, message: [message]
        pool.settle(max_turns=7000)
        assert len(pool.outcome.moves) >= 10
    finally:
        pool.close()
