"""A trainer or a machine that is gone: the run begins anew where its last state was taken, a few times at most."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...actors.remote.restart_budget import RestartBudget
from ...actors.remote.waiting import ActorDied
from ...core.errors import (
    InputError,
    InstanceLost,
    NodeDied,
    PeerLost,
    RlhfSpecError,
    SchedulerLost,
    TrainerLost,
    WaitTimeout,
)
from ..folder.layout import RunDir
from ..system.system import System
from .rewind import rewind
from .run_state import RunState, last_state

LOSSES = (InstanceLost, PeerLost, SchedulerLost, WaitTimeout)
"What the loss of an actor comes as."


def as_trainer_lost(system: System, error: RlhfSpecError) -> TrainerLost | None:
    """What `error` says where a trainer is dead or frozen, all of them ended then; None where they live.

    So, too, where the loss of somebody who was not replaced goes with the loss of a machine: new places are found then.
    """
    if isinstance(error, InputError | NodeDied):
        return None
    # of another error, one that is silent may only be at work
    lost = system.trainers.lost(or_silent=isinstance(error, LOSSES))
    if isinstance(error, ActorDied) and error.name in system.trainers.handles and error.name not in lost:
        # it answers again, and nobody knows whether it did what it was ordered
        lost.append(error.name)
    if not lost and isinstance(error, LOSSES):
        lost = [f"machine {node[:8]}" for node in system.lost_machines()]
    if not lost:
        return None
    system.trainers.kill()
    return TrainerLost(f"{', '.join(lost)} was lost: {error}")


@contextmanager
def noting_trainer_loss(system: System) -> Iterator[None]:
    """Raise TrainerLost in the place of what the block raises when a trainer is dead or frozen."""
    try:
        yield
    except RlhfSpecError as error:
        lost = as_trainer_lost(system, error)
        if lost is None:
            raise
        raise lost from error


class TrainerRestarts:
    """Of one run."""

    def __init__(
        self,
        run_dir: RunDir,
        *,
        most: int,
        note: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`most` restarts are made within an hour, and from one state; `clock` is monotonic, in seconds."""
        self._run_dir, self._note = run_dir, note
        self._budget = RestartBudget(most, clock=clock)
        self._begun_at: list[int] = []
        "iterations of the state that each restart since the last progress began at"

    def after(self, error: TrainerLost) -> RunState | None:
        """Take the run folder back to its last state, which is returned; None: to its beginning.

        Raises TrainerLost when restarts are used up, RunTaken, StorageError.
        """
        self._run_dir.owner.require()
        state = last_state(self._run_dir, self._note)
        begins_at = 0 if state is None else state.num_iterations
        # a run that never reaches its next state makes no progress, however long each try takes
        tries = [at for at in self._begun_at if at == begins_at]
        if len(tries) >= self._budget.most or not self._budget.spend():
            raise TrainerLost(
                f"{error}; all {self._budget.most} restarts of the trainers within an hour, or from one state, are "
                f"used up (cluster.max_trainer_restarts); look at their logs; {self._run_dir.goes_on()}"
            ) from error
        self._begun_at = [*tries, begins_at]
        num = max(self._budget.num_spent, len(self._begun_at))
        where = f"its state after iteration {begins_at}" if state else "its beginning: there is no state yet"
        self._note(f"{error}; restart {num} of {self._budget.most}: the run goes on from {where}")
        rewind(self._run_dir, state, self._note)
        return state
