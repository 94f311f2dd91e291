"""Faults that strike inside an instance at a stage of a move: a follower killed, a frame lost, the leader frozen.

A fault is planted in a living generation actor; it strikes when that next comes to the stage, and writes a file first.
"""

from __future__ import annotations

import os
import signal
from itertools import product
from pathlib import Path
from typing import Any

import ray

FRAME = "frame"
STAGES = ("MoveOrder", "Prepare", "Ready", FRAME, "Landed", "HandOver", "Settle")
"Messages of a move, in their order, at whom they reach; a frame of the caches at whom it leaves."
KINDS = ("kill_follower", "freeze_leader", "lose")
DECK = tuple(product(KINDS, STAGES))


def plant(actor: Any, kind: str, stage: str, sign: str) -> None:
    """Let a fault strike `actor`, in whose process this runs, when it next comes to a stage; the file `sign` tells."""
    owner, name = (
        (actor._endpoint._transfers, "_send_all") if stage == FRAME else (actor._loop._migrator, "take")
    )
    usual = getattr(owner, name)

    def struck(*args: Any) -> Any:
        if stage not in (FRAME, type(args[0]).__name__) or not clear(actor):
            return usual(*args)
        Path(sign).write_text(str(os.getpid()))
        if kind == "kill_follower":
            ray.kill(actor._host._rank_actors._actors[-1])
        elif kind == "freeze_leader":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif stage == FRAME:
            sender, move_id, frames, lease = args
            return usual(sender, move_id, frames[:-1], lease)
        else:
            return None
        return usual(*args)

    setattr(owner, name, struck)


def clear(actor: Any) -> bool:
    """Take away what was planted; whether it was there, else it has struck. Of two threads one is told so."""
    planted = [
        vars(owner).pop(name, None)
        for owner, name in ((actor._endpoint._transfers, "_send_all"), (actor._loop._migrator, "take"))
    ]
    return any(planted)
