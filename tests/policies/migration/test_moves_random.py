"""Random pools around the scheduler's machine: moves, races, deaths, late and repeated words, new schedulers.

Instances are played by dictionaries; the rollout is a function of the key. The law: each sample is delivered exactly
once, by its owner and under the owner's epoch; nothing is overbooked; no alarm.
"""

import random
from dataclasses import dataclass, field, replace

import pytest
from move_messages import complete, report, request

from rlhfspec.core.records import Completion, SampleKey
from rlhfspec.policies.migration.move_messages import CallOff, Claim, MoveOrder, MoveReport, Settle, Verdict
from rlhfspec.policies.reallocation.pool_records import Move, MoveMode
from rlhfspec.policies.scheduling.events import (
    Abandon,
    Alarm,
    Deliver,
    InstanceGone,
    InstanceJoined,
    InstanceReported,
    InstanceSnapshot,
    MoveEnded,
    SamplesArrived,
    SendVerdict,
    StartMove,
    Submit,
)
from rlhfspec.policies.scheduling.scheduler import Scheduler


@dataclass
class Player:
    """An instance: what runs, what was set aside, what its verdict is waited for."""

    slots: int
    running: dict[SampleKey, int] = field(default_factory=dict)
    aside: dict[str, MoveOrder] = field(default_factory=dict)
    uncommitted: dict[str, MoveOrder] = field(default_factory=dict)
    outbox: list[MoveReport | Completion] = field(default_factory=list)


class World:
    """One random history."""

    def __init__(self, seed: int, count: int) -> None:
        self.random = random.Random(seed)
        self.count = count
        self.term = 0
        self.scheduler = Scheduler(heartbeat_timeout_s=1e9)
        self.players: dict[str, Player] = {}
        self.zombies: dict[str, Player] = {}
        self.handing: list[tuple[MoveOrder, int]] = []
        "hand-overs on their way: (order, term)"
        self.words: list[tuple[int, str, Settle | CallOff]] = []
        "verdicts on their way"
        self.delivered: dict[SampleKey, Completion] = {}
        self.alarms: list[Alarm] = []
        self.outcomes: list[str] = []
        self.num_names = 0
        self.now_s = 0.0
        self.excess: dict[str, int] = {}
        "samples beyond its slots that an instance held when a new scheduler asked"

    def feed(self, event) -> None:
        self.carry_out(self.scheduler.handle(event))

    def carry_out(self, orders) -> None:
        for order in orders:
            match order:
                case Submit() if order.instance in self.players:
                    for asked in order.requests:
                        self.players[order.instance].running[asked.key] = asked.epoch
                case Deliver():
                    key = order.completion.key
                    assert key not in self.delivered
                    self.delivered[key] = order.completion
                case StartMove():
                    self.begin(order.order)
                case SendVerdict():
                    self.words.append((self.term, order.instance, order.verdict))
                case Abandon():
                    self.zombies[order.instance] = self.players.pop(order.instance)
                case Alarm():
                    self.alarms.append(order)
                case MoveEnded():
                    self.outcomes.append(order.record.outcome)

    def begin(self, order: MoveOrder) -> None:
        player = self.players[order.source]
        if player.running.get(order.key) != order.epoch or self.random.random() < 0.2:
            player.outbox.append(self.say(order, Claim.KEPT))
            return
        del player.running[order.key]
        player.aside[order.move_id] = order
        self.handing.append((order, self.term))

    def say(self, order: MoveOrder, claim: Claim) -> MoveReport:
        epoch = order.epoch + (claim is Claim.COMMIT)
        return report(
            claim,
            epoch=epoch,
            move_id=order.move_id,
            key=order.key,
            source=order.source,
            destination=order.destination,
        )

    def arrive(self) -> None:
        """A hand-over reaches its destination, or is lost."""
        order, term = self.handing.pop(self.random.randrange(len(self.handing)))
        player = self.players.get(order.destination)
        # an instance that answered a new scheduler takes no hand-over of an older order
        if player is None or term < self.term or order.key in player.running or self.random.random() < 0.2:
            return
        player.running[order.key] = order.epoch + 1
        player.uncommitted[order.move_id] = order
        player.outbox.append(self.say(order, Claim.COMMIT))

    def obey(self) -> None:
        """A verdict reaches its instance, or is lost, or comes again later."""
        index = self.random.randrange(len(self.words))
        term, name, word = self.words[index]
        if self.random.random() < 0.8:
            self.words.pop(index)
        player = self.players.get(name)
        if player is None or term < self.term or self.random.random() < 0.2:
            return
        if isinstance(word, CallOff):
            if word.move_id in player.aside:
                player.outbox.append(self.say(player.aside[word.move_id], Claim.TAKE_BACK))
            return
        if word.move_id in player.aside:
            order = player.aside.pop(word.move_id)
            if word.verdict is Verdict.OWN:
                # a loser of an older race may still run here: its own verdict drops it, by its epoch
                player.running[order.key] = word.epoch
        elif word.move_id in player.uncommitted:
            order = player.uncommitted.pop(word.move_id)
            if word.verdict is Verdict.RELEASE and player.running.get(order.key) == order.epoch + 1:
                del player.running[order.key]
        elif word.verdict is Verdict.RELEASE and player.running.get(word.key, word.epoch) < word.epoch:
            # the move is over here; an older copy than the owner's must not go on
            del player.running[word.key]

    def claim_again(self, player: Player) -> None:
        player.outbox += [self.say(order, Claim.TAKE_BACK) for order in player.aside.values()]
        player.outbox += [self.say(order, Claim.COMMIT) for order in player.uncommitted.values()]

    def finish(self, name: str, player: Player) -> None:
        if player.running:
            key = self.random.choice(sorted(player.running, key=lambda k: k.sample_index))
            asked = replace(request(key.sample_index), epoch=player.running.pop(key))
            player.outbox.append(complete(asked, name))

    def poll(self, name: str, player: Player) -> None:
        self.now_s += 0.1
        self.feed(
            InstanceReported(
                instance=name,
                now_s=self.now_s,
                completions=tuple(item for item in player.outbox if isinstance(item, Completion)),
                moves=tuple(item for item in player.outbox if isinstance(item, MoveReport)),
            )
        )
        # an answer may be lost, and is given again then
        if self.random.random() < 0.8:
            player.outbox.clear()

    def order_move(self) -> None:
        names = sorted(self.players)
        owners = [(s.request.key, s.owner) for s in self.scheduler.open_samples() if s.owner]
        if len(names) < 2 or not owners:
            return
        key, source = self.random.choice(owners)
        move = Move(
            key=key,
            source=source,
            destination=self.random.choice(names),
            mode=MoveMode.RECOMPUTE,
            gain_s=0.0,
            reason="random",
        )
        self.carry_out(self.scheduler.move([move], now_s=self.now_s))

    def replace_scheduler(self) -> None:
        self.term += 1
        self.zombies.clear()
        while len(self.players) > 1 and self.random.random() < 0.3:
            # it died with the scheduler, and nobody knows what it had
            del self.players[self.random.choice(sorted(self.players))]
        snapshots = [
            InstanceSnapshot(
                instance=name,
                num_slots=player.slots,
                open_epochs=dict(player.running),
                completions=tuple(item for item in player.outbox if isinstance(item, Completion)),
                set_aside={order.key: (move_id, order.epoch) for move_id, order in player.aside.items()},
            )
            for name, player in self.players.items()
        ]
        for player in self.players.values():
            player.outbox.clear()
        self.scheduler, orders = Scheduler.rebuild(
            requests=[request(i) for i in range(self.count)],
            delivered=list(self.delivered.values()),
            snapshots=snapshots,
            heartbeat_timeout_s=1e9,
            now_s=self.now_s,
            term=self.term,
        )
        # a copy that lost its race may outlive the scheduler that ruled so, and is as good as any
        self.excess = {
            name: max(0, count - self.players[name].slots)
            for name, count in self.scheduler.instances().items()
        }
        self.carry_out(orders)

    def turn(self) -> None:
        dice = self.random.random()
        name = self.random.choice(sorted(self.players) or [""])
        if len(self.players) < 2 or (dice < 0.03 and len(self.players) < 4):
            self.num_names += 1
            name = f"gen-{self.num_names}"
            slots = self.random.randint(2, 8)
            self.players[name] = Player(slots=slots)
            self.feed(InstanceJoined(instance=name, num_slots=slots, now_s=self.now_s))
        elif dice < 0.05:
            self.feed(InstanceGone(instance=name, reason="killed"))
        elif dice < 0.06:
            self.replace_scheduler()
        elif dice < 0.09 and self.zombies:
            late = self.random.choice(sorted(self.zombies))
            self.finish(late, self.zombies[late])
            self.poll(late, self.zombies[late])
        elif dice < 0.35:
            self.order_move()
        elif dice < 0.50 and self.handing:
            self.arrive()
        elif dice < 0.65 and self.words:
            self.obey()
        elif dice < 0.72:
            self.claim_again(self.players[name])
        elif dice < 0.75:
            self.finish(name, self.players[name])
        else:
            self.poll(name, self.players[name])

    def check(self) -> None:
        owned = self.scheduler.instances()
        for name, count in owned.items():
            slots = self.players[name].slots
            # a fourth of its slots in line, while the scheduler's own line is long
            most = slots + slots // 4 + self.excess.get(name, 0)
            assert count + self.scheduler.moves.num_arriving(name) <= most, "overbooked"
        assert self.scheduler.num_open + len(self.delivered) == self.count
        assert self.scheduler.num_waiting + sum(owned.values()) == self.scheduler.num_open
        for sample in self.scheduler.open_samples():
            copies = [p.running.get(sample.request.key, -1) for p in self.players.values()]
            assert max(copies, default=-1) <= sample.request.epoch + 1


@pytest.mark.parametrize("seed", range(40))
def test_every_sample_is_delivered_exactly_once_whatever_moves_and_dies(seed):
    world = World(seed, count=30)
    world.feed(SamplesArrived(requests=tuple(request(i) for i in range(30))))
    last = {sample.request.key: 0 for sample in world.scheduler.open_samples()}
    for _ in range(20_000):
        if not world.scheduler.num_open:
            break
        world.turn()
        world.check()
        if world.term == 0:
            # a new scheduler may not know of epochs whose every copy has died
            for sample in world.scheduler.open_samples():
                assert sample.request.epoch >= last[sample.request.key], "an epoch went back"
                last[sample.request.key] = sample.request.epoch
    assert world.scheduler.num_open == 0 and world.alarms == []
    assert len(world.delivered) == 30
    for key, completion in world.delivered.items():
        assert completion.token_ids[0] == key.sample_index
    assert len(world.outcomes) > 5
