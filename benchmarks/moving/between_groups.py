"""Groups of ranks that this process leads, and samples that move between them while they run."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from ...core.records import Completion, SampleKey, SampleRequest
from ...engine.engine import Engine
from ...engine.group.dealing import local_ranks
from ...engine.group.ranks import GroupRanks

AT_ONCE = 8


@contextmanager
def groups(sizes: Sequence[int]) -> Iterator[Mapping[int, GroupRanks | None]]:
    """Ranks of every size; this process leads them all."""
    with ExitStack() as open_until_here:
        yield {size: open_until_here.enter_context(local_ranks(size)) for size in sizes}


def move_between(
    engines: Sequence[Engine], requests: Sequence[SampleRequest], *, at_most: int
) -> tuple[dict[SampleKey, Completion], int]:
    """Decode on all engines in turn, samples moved after each round; completions, and how many moves there were."""
    choose, done, moves, waiting = random.Random(5), dict[SampleKey, Completion](), 0, list(requests)
    while waiting or any(engine.has_work for engine in engines):
        for engine in engines:
            while waiting and engine.num_running + engine.num_waiting < engine.runner.pool.num_slots - 2:
                engine.submit(waiting.pop())
            done |= {completion.key: completion for completion in engine.step()}
        moves += sum(_moved(choose, engines) for _ in range(min(AT_ONCE, at_most - moves)))
    return done, moves


def _moved(choose: random.Random, engines: Sequence[Engine]) -> int:
    """Move a running sample to another engine; 0 where none runs or there is no room."""
    source, to = choose.sample(list(engines), 2)
    running = list(source.progress())
    if not running or to.num_running >= to.runner.pool.num_slots:
        return 0
    nothing = dict.fromkeys(source.exchange.token_bytes, 0)
    left = source.exchange.detach(choose.choice(running), weight_version=0, shipped=nothing)
    if left is None:
        return 0
    to.exchange.attach(*left)
    return 1
