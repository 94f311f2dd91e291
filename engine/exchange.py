"""Samples leave an engine and come into it between two decode steps, caches included (design 3.4).

Slot numbers stay here: others say the key. A committed prefix is read through a lease while decoding goes on;
`detach` gives the rest of it at the moment the sample leaves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from ..core.errors import RlhfSpecError
from ..core.records import SampleKey
from ..core.sample_state import SampleState
from .admission import KVAdmission
from .cache.kept_caches import CachePiece, KeptCaches
from .cache.kv_pool import KVPool
from .cache.leases import Lease, Leases
from .decoding.running_batch import RunningBatch
from .drafters.drafter import Drafter
from .model.prefill import fill_committed
from .model.prefill_plan import PrefillPiece
from .model.runner import ModelRunner

TARGET = "target"
DRAFT = "draft"


class SampleExchange:
    """How samples enter and leave an engine. Used from the decode thread; only a lease may be read from another."""

    def __init__(
        self,
        runner: ModelRunner,
        drafter: Drafter | None,
        batch: RunningBatch,
        waiting: deque[SampleState],
        *,
        max_prefill_tokens: int,
        max_cache_bytes: int | None = None,
        max_kept_bytes: int = 0,
    ) -> None:
        """`max_kept_bytes`: of caches that wait for an episode's next turn, in the host's memory."""
        self._runner = runner
        self._drafter = drafter
        self._batch = batch
        self._waiting = waiting
        self._max_prefill_tokens = max_prefill_tokens
        self._pools: dict[str, KVPool] = {TARGET: runner.pool}
        if drafter is not None and drafter.cache is not None:
            self._pools[DRAFT] = drafter.cache
        self._leases = Leases(self._pools)
        self.kv_admission = KVAdmission(batch, self._pools.values(), max_bytes=max_cache_bytes)
        self.kept = KeptCaches(max_kept_bytes)
        if runner.device.type == "cpu":
            # elsewhere they lie in other memory than the running samples'
            self.kv_admission.kept = self.kept
        self.num_reserved = 0
        "slots kept free for samples on their way here"

    @property
    def token_bytes(self) -> dict[str, int]:
        """Bytes of one token in each cache."""
        return {part: pool.token_bytes for part, pool in self._pools.items()}

    @property
    def num_free_slots(self) -> int:
        """Slots neither taken nor reserved nor waited for, and for whose samples the caches have room."""
        return self.kv_admission.num_slots - len(self._batch) - self.num_reserved - len(self._waiting)

    def holds(self, key: SampleKey) -> bool:
        """True when the sample runs or waits here."""
        return self._batch.slot_of(key) is not None or any(s.request.key == key for s in self._waiting)

    def most_tokens(self, key: SampleKey) -> int:
        """Tokens of a sample's prompt and longest response; 0 when it is not here."""
        waiting = (state.request for state in self._waiting)
        for request in (*self._batch.requests, *waiting):
            if request.key == key:
                return len(request.prompt.token_ids) + request.sampling.max_new_tokens
        return 0

    def cached_tokens(self, key: SampleKey) -> dict[str, int] | None:
        """Committed tokens of a running sample in each cache; None when it does not run here."""
        slot = self._batch.slot_of(key)
        if slot is None:
            return None
        counts = {TARGET: int(self._batch.lengths[slot]) - 1}
        if DRAFT in self._pools and self._drafter is not None:
            counts[DRAFT] = self._drafter.num_cached_tokens(slot)
        return counts

    def lease(self, key: SampleKey) -> Lease:
        """Let another thread read what is cached now. Raises RlhfSpecError when the sample does not run here."""
        slot = self._batch.slot_of(key)
        if slot is None:
            raise RlhfSpecError(
                f"sample {key.sample_index} does not run here; only a running sample is leased"
            )
        return self._leases.give(slot, self.cached_tokens(key) or {})

    def end_lease(self, lease: Lease) -> None:
        """Give a lease back; ending it twice is harmless."""
        self._leases.end(lease)

    def detach(
        self, key: SampleKey, *, weight_version: int, shipped: Mapping[str, int] | None = None
    ) -> tuple[SampleState, tuple[CachePiece, ...]] | None:
        """Take a sample out; return it with what its caches hold beyond the tokens `shipped` already.

        None when the sample is not here. `shipped` None: no caches are wanted.
        """
        for index, state in enumerate(self._waiting):
            if state.request.key == key:
                del self._waiting[index]
                return state, ()
        slot = self._batch.slot_of(key)
        if slot is None:
            return None
        state = self._batch.state(slot, weight_version=weight_version)
        counts = (self.cached_tokens(key) or {}) if shipped is not None else {}
        # the draft cache first: the destination drafts before it verifies
        pieces = tuple(
            self._piece(part, slot, shipped[part], counts[part])
            for part in (DRAFT, TARGET)
            if shipped is not None and part in shipped and counts.get(part, 0) > shipped[part]
        )
        self.vacate(slot)
        return state, pieces

    def attach(self, state: SampleState, pieces: Sequence[CachePiece]) -> int | None:
        """Put a sample into the running batch; return how many tokens of it had to be computed, None if it waits.

        What the pieces do not cover of the target's cache is computed; the drafter catches up by itself. Where the
        caches have no room it waits, as one that was preempted does. Raises RlhfSpecError when no slot is free.
        """
        if len(self._batch) == self._runner.pool.num_slots:
            raise RlhfSpecError(
                f"sample {state.request.key.sample_index} came to an engine whose {len(self._batch)} slots "
                "are taken; a slot must be reserved first"
            )
        # an earlier turn's, which its spans may not tell of
        self.kept.forget(state.request.key)
        if state.request.num_top is not None or not self.kv_admission.admits(state.num_committed_tokens):
            self._waiting.appendleft(state)
            return None
        slot = self._batch.add(state)
        self.kv_admission.hold()
        if self._drafter is not None:
            self._drafter.admit(range(slot, slot + 1), self._batch)
        held = self.restore(slot, pieces, state.weight_version)
        missing = state.num_committed_tokens - 1 - held
        if missing <= 0:
            return 0
        cached = self._batch.lengths[: slot + 1] - 1
        cached[slot] = held
        return fill_committed(
            self._runner,
            self._batch.tokens,
            [PrefillPiece(slot=slot, start=held, length=missing)],
            self._max_prefill_tokens,
            cached=cached,
        )

    def drop(self, key: SampleKey, *, epoch: int | None = None) -> bool:
        """Take a sample out for good, or only its copy of that epoch; False when it is not here."""
        for index, state in enumerate(self._waiting):
            if state.request.key == key and epoch in (None, state.request.epoch):
                del self._waiting[index]
                return True
        for slot, request in enumerate(self._batch.requests):
            if request.key == key and epoch in (None, request.epoch):
                self.vacate(slot)
                return True
        return False

    def keep(self, slot: int) -> None:
        """Set the caches of a sample that has ended its turn aside, for the turn that may follow."""
        key, length = self._batch.requests[slot].key, int(self._batch.lengths[slot])
        # a draft cache reaches beyond what was committed where a stop token or a limit has cut it
        counts = {part: min(n, length - 1) for part, n in (self.cached_tokens(key) or {}).items()}
        if self.kept.has_room(sum(n * self.token_bytes[part] for part, n in counts.items())):
            pieces = tuple(self._piece(part, slot, 0, n) for part, n in counts.items() if n)
            self.kept.put(key, self._batch.tokens[slot, : length - 1].copy(), pieces)

    def take_kept(self, slot: int) -> tuple[CachePiece, ...]:
        """Return what is kept of the sample in a slot, from its earlier turns, and keep it no longer."""
        length = int(self._batch.lengths[slot])
        return self.kept.take(self._batch.requests[slot].key, self._batch.tokens[slot, : length - 1])

    def restore(self, slot: int, pieces: Sequence[CachePiece], weight_version: int) -> int:
        """Put pieces into the caches of a sample that was just admitted; return how many tokens the target's holds.

        What they lack of the committed tokens is to be computed, by the version given.
        """
        if self._drafter is not None:
            self._drafter.adopt(slot, self._store(DRAFT, slot, pieces))
        self._batch.take_up(slot, weight_version)
        return self._store(TARGET, slot, pieces)

    def preempt(self, slot: int, *, weight_version: int) -> None:
        """Take a running sample back into the line, ahead of those that wait: its tokens stay, its caches go."""
        self._waiting.appendleft(self._batch.state(slot, weight_version=weight_version))
        self.vacate(slot)

    def scrub(self, slot: int) -> None:
        """Set what a running sample may have written to zeros: masked positions must be finite for the next one."""
        length = self._batch.lengths[slot : slot + 1]
        for pool in self._pools.values():
            pool.clear(slot, 0, int(pool.extents(length)[0]))

    def vacate(self, slot: int) -> None:
        """Free a slot; the last sample moves in."""
        last = len(self._batch) - 1
        length = int(self._batch.lengths[last])
        if self._drafter is not None:
            self._drafter.leave(slot, self._batch)
        for follower in self._runner.followers:
            follower.left(slot, self._batch)
        with self._leases.moving(slot, last):
            self._batch.remove(slot)
            if last != slot:
                self._runner.pool.move_slot(last, slot, length)
                if self._drafter is not None:
                    self._drafter.move_slot(last, slot)
                for follower in self._runner.followers:
                    follower.moved(last, slot)
        if not len(self._batch):
            # an idle instance keeps nothing; a busy one gives back at its next step
            self.kv_admission.hold()

    def _piece(self, part: str, slot: int, start: int, stop: int) -> CachePiece:
        pool = self._pools[part]
        frame = np.empty((stop - start) * pool.token_bytes, dtype=np.uint8)
        pool.in_frame(frame).copy_(pool.read(slot, start, stop))
        return CachePiece(part=part, start=start, stop=stop, cells=frame)

    def _store(self, part: str, slot: int, pieces: Sequence[CachePiece]) -> int:
        """Store the pieces of one cache; return how many tokens it holds from the first on."""
        held = 0
        for piece in sorted((p for p in pieces if p.part == part), key=lambda p: p.start):
            if part in self._pools and piece.start == held:
                pool = self._pools[part]
                pool.store(slot, piece.start, pool.in_frame(piece.cells))
                held = piece.stop
        return held
