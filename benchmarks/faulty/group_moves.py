"""Moves between instances of several sizes under faults at every stage: no token changes, and no sample is lost."""

from __future__ import annotations

import os
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import ray

from ...actors.actor_messages import Taken
from ...actors.remote.waiting import ActorDied
from ...cluster.observe.console import PipeConsole
from ...core.config import EngineConfig, ReallocationConfig, SpeculationConfig
from ..moving.exact import MoveTally
from ..moving.forced import ForcedMoves
from ..support.actor_pool import ActorPool, ask, bench_ray
from ..support.workload import Workload, demo_workload, model_p
from .injection import HEARTBEAT_LIMIT_S
from .planted import DECK, clear, plant

MOVES = {"quick": 40, "default": 200, "full": 1000}
QUICK_CARDS = (("kill_follower", "HandOver"), ("freeze_leader", "Landed"), ("lose", "frame"))
MAX_ROLLOUTS = 200
SPECULATION = {
    "demo": SpeculationConfig(policy="fixed", num_nodes=6, depth=4, branching=2),
    "p": SpeculationConfig(policy="fixed", drafter="suffix", num_nodes=6),
}
RANKS = {"demo": (1, 2, 2), "p": (1, 2, 4)}
"The demo pair's vocabulary is too small for four."


def group_moves(mode: str, console: PipeConsole) -> dict[str, Any]:
    """Counts over all rollouts: moves, faults of each kind, samples lost and changed."""
    total: Counter[str] = Counter()
    with bench_ray("bench-faults-groups"):
        for workload in (demo_workload(40), model_p(24, new_tokens=96)):
            deck = QUICK_CARDS if mode == "quick" else DECK
            found = moves_under_faults(workload, RANKS[workload.name], deck, at_least=MOVES[mode] // 2)
            console.print(f"{workload.name}: moves between groups of {RANKS[workload.name]} ranks: {found}")
            most = max(total["most_moves_of_a_sample"], found["most_moves_of_a_sample"])
            total.update(found)
            total["most_moves_of_a_sample"] = most
    return {f"groups_{name}": float(count) for name, count in total.items()}


def moves_under_faults(
    workload: Workload, ranks: Sequence[int], deck: Sequence[tuple[str, str]], *, at_least: int
) -> dict[str, int]:
    """Move samples until so many have moved and every fault has struck; compare each with one rank's, undisturbed."""
    workload = replace(workload, sampling=replace(workload.sampling, temperature=1.0, stop_token_ids=()))
    requests, tally = workload.requests(), MoveTally()
    expected = {done.key: done for done in workload.engine(max_running_samples=16).generate(requests)}
    with (
        tempfile.TemporaryDirectory() as folder,
        ActorPool(
            workload,
            engine=EngineConfig(max_running_samples=len(requests), probe=False),
            speculation=SPECULATION[workload.name],
            migration=ReallocationConfig(timeout_s=3.0, transfer_share=1.0),
            ranks=ranks,
            num_cpus=0.1,
            heartbeat_timeout_s=HEARTBEAT_LIMIT_S,
        ) as pool,
    ):
        striker = Striker(pool, deck, Path(folder))
        for seed in range(MAX_ROLLOUTS):
            moves = ForcedMoves(rate=0.3, seed=seed, recompute_share=0.1)
            outcome = pool.rollout(requests, reallocation=moves, interval_s=0.05, strike=striker.look)
            tally.add(outcome, expected, len(requests))
            if tally.migrations >= at_least and striker.has_ended:
                break
    counts = {name: count for name, count in asdict(tally).items() if isinstance(count, int)}
    left = {"faults_left": len(striker.deck), "moves_left": max(at_least - tally.migrations, 0)}
    return counts | left | striker.struck


@dataclass(slots=True)
class _Planted:
    kind: str
    stage: str
    instance: str
    sign: Path
    cleared: Any = None
    "the answer to its being taken away"


class Striker:
    """Plants one fault after the other; puts instances in the place of those that are lost."""

    def __init__(self, pool: ActorPool, deck: Sequence[tuple[str, str]], folder: Path) -> None:
        """`deck`: kinds and stages; they come in an order drawn once. `folder`: for signs, empty."""
        self._random = random.Random(len(deck))
        self.deck = self._random.sample(list(deck), len(deck))
        self.struck: Counter[str] = Counter()
        self._pool, self._folder = pool, folder
        self._planted: _Planted | None = None
        self._num_planted = 0

    @property
    def has_ended(self) -> bool:
        """Whether every fault has struck."""
        return not self.deck

    def look(self, taken: Taken, scheduler: Any, num_left: int) -> bool:
        """See to what was lost and to the fault that is planted, or plant one; whether nothing can strike now."""
        for lost in taken.lost:
            self._resume(lost.instance)
            self._pool.replace(lost.instance, scheduler)
        planted = self._planted
        if planted is None:
            if self.deck and num_left:
                self._plant(*self.deck[0])
            return self._planted is None
        is_lost = planted.instance not in self._pool.handles
        if planted.sign.exists():
            if not (is_lost or planted.kind == "lose"):
                return False
            self.deck.remove((planted.kind, planted.stage))
            self.struck[planted.kind] += 1
        elif not is_lost:
            if num_left:
                return False
            if planted.cleared is None:
                planted.cleared = self._call(planted.instance, clear)
            if not ray.wait([planted.cleared], timeout=0)[0] or not self._is_clear(planted):
                return False
        self._planted = None
        return True

    def _plant(self, kind: str, stage: str) -> None:
        at_least = 2 if kind == "kill_follower" else 1
        names = [name for name in self._pool.handles if self._pool.ranks[name] >= at_least]
        self._num_planted += 1
        sign = self._folder / f"sign_{self._num_planted}"
        self._planted = planted = _Planted(kind, stage, self._random.choice(names), sign)
        with suppress(ActorDied):
            ask(self._call(planted.instance, plant, kind, stage, str(sign)), "plant")

    def _is_clear(self, planted: _Planted) -> bool:
        try:
            return ask(planted.cleared, "clear")
        except ActorDied:
            return False

    def _call(self, instance: str, what: Any, *args: Any) -> Any:
        call = self._pool.handles[instance].__ray_call__
        return call.options(concurrency_group="control").remote(what, *args)

    def _resume(self, instance: str) -> None:
        """Let a leader that was frozen go on, and end: it has been given up."""
        planted = self._planted
        if planted is not None and planted.instance == instance and planted.sign.exists():
            with suppress(ProcessLookupError):
                os.kill(int(planted.sign.read_text()), signal.SIGCONT)
