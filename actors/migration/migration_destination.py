"""One move at its destination: what `policies.migration.destination` decides, on engine and channels."""

from __future__ import annotations

from dataclasses import replace

from ...core.errors import TransferError
from ...engine.exchange import DRAFT, CachePiece
from ...policies.migration.cache_frames import cut_into_frames
from ...policies.migration.destination import (
    Answer,
    DestinationAction,
    DestinationMove,
    Drop,
    FreeSlot,
    KeepSlot,
    TakeIn,
)
from ...policies.migration.move_messages import Claim, HandOver, Prepare, Ready, Received
from ...policies.migration.source import Say
from .context import MigrationContext, report_of


class MigrationDestination:
    """What this instance has reserved, received and taken in for one move to it."""

    def __init__(self, context: MigrationContext, prepare: Prepare) -> None:
        self.machine = DestinationMove(prepare, now_s=context.clock(), timeout_s=context.settings.timeout_s)
        self.tails: tuple[CachePiece, ...] = ()
        "what came beside the hand-over"
        self._context = context
        self._has_slot = False
        self._pieces: tuple[CachePiece, ...] = ()
        "of stage one"
        self._left_at_s: float | None = None
        "until the first decode step here: when the last one ended at the source"
        self._metrics: dict[str, float] = {}

    def refusal(self) -> str:
        """Why the sample cannot come, "" when it can."""
        engine, prepare = self._context.engine_or_none(), self.machine.prepare
        if engine is None:
            return f"{self._context.instance} has no weights yet"
        if prepare.weight_version != engine.weight_version:
            return f"weight version {prepare.weight_version} there, {engine.weight_version} here"
        if prepare.token_bytes != engine.exchange.token_bytes:
            return f"caches of {prepare.token_bytes} bytes a token there, {engine.exchange.token_bytes} here"
        if prepare.most_tokens > engine.max_total_tokens:
            return f"it may get {prepare.most_tokens} tokens, the context here is {engine.max_total_tokens}"
        if prepare.order.key in self._context.open_epochs:
            return f"a copy of sample {prepare.order.key.sample_index} is still open here"
        if engine.num_free_slots <= 0:
            return f"no free slot among {engine.runner.pool.num_slots}"
        return ""

    def before_step(self) -> None:
        """A decode step begins: if it came in since the last one, it is running now."""
        if self._left_at_s is not None:
            self._metrics["downtime_s"] = self._context.wall_clock() - self._left_at_s
            self._left_at_s = None
            self._say(Claim.COMMIT, "it runs here")

    def carry_out(self, actions: list[DestinationAction]) -> None:
        """Do what the state machine says."""
        for action in actions:
            match action:
                case KeepSlot():
                    self._keep_slot(expect_frames=action.expect_frames)
                case FreeSlot():
                    self._free_slot()
                case Answer():
                    self._context.post(self.machine.order.source, action.message, ())
                case TakeIn():
                    self._take_in(action.message)
                case Drop():
                    self._drop()
                case Say():
                    # the first COMMIT is said when the first decode step begins
                    if self._left_at_s is None:
                        self._say(action.claim, action.reason)

    def _keep_slot(self, *, expect_frames: bool) -> None:
        order, prepare = self.machine.order, self.machine.prepare
        self._context.engine().exchange.num_reserved += 1
        self._context.engine().give_way()
        self._has_slot = True
        frames = cut_into_frames(prepare.cached_tokens, prepare.token_bytes, frame_bytes=prepare.frame_bytes)
        ticket = None
        if expect_frames and frames:
            try:
                ticket = self._context.transfers.listen(
                    order.source, known_channel=prepare.channel, broken_channel=prepare.broken_channel
                )
            except TransferError as error:
                self.carry_out(self.machine.refuse(str(error), now_s=self._context.clock()))
                return
            began_s = self._context.clock()
            self._metrics["was_cold"] = float(ticket is not None)

            def landed(pieces: tuple[CachePiece, ...], error: str) -> None:
                self._pieces = pieces
                self._metrics["stage1_s"] = self._context.clock() - began_s
                self._context.come_back(Received(move_id=order.move_id, error=error))

            self._context.transfers.receive(order.source, order.move_id, frames, landed)
        self._context.post(order.source, Ready(move_id=order.move_id, ticket=ticket), ())
        if expect_frames and not frames:
            self._context.come_back(Received(move_id=order.move_id))

    def _free_slot(self) -> None:
        if self._has_slot:
            self._has_slot = False
            self._context.engine().exchange.num_reserved -= 1
        self._pieces = ()

    def _take_in(self, message: HandOver) -> None:
        engine, epoch = self._context.engine(), message.order.epoch + 1
        tails, self.tails = self.tails, ()
        pieces = (*self._pieces, *tails)
        if engine.drafter_version != self.machine.prepare.drafter_version or (
            engine.drafter_version != message.drafter_version
        ):
            # another draft model's cache would draft badly; the drafter catches up from the tokens
            pieces = tuple(piece for piece in pieces if piece.part != DRAFT)
        state = replace(message.state, request=replace(message.state.request, epoch=epoch))
        self._free_slot()
        began_s = self._context.clock()
        engine.supersede(state.request.key)
        computed = engine.exchange.attach(state, pieces)
        ended_s = self._context.clock()
        self._context.note("attach", began_s, ended_s, message.order.move_id)
        self._context.open_epochs[state.request.key] = epoch
        self._left_at_s = message.left_at_s
        if computed is None:
            # it waits for room in the caches: neither a transfer nor a recomputation to learn from
            self._metrics.pop("stage1_s", None)
            self._metrics["context_tokens"] = float(state.num_committed_tokens)
            return
        self._metrics |= {
            "attach_s": ended_s - began_s,
            "computed_tokens": float(computed),
            "context_tokens": float(state.num_committed_tokens),
            "stage1_bytes": float(message.num_stage1_bytes),
            "stage2_bytes": float(sum(piece.cells.nbytes for piece in tails)),
        }

    def _drop(self) -> None:
        key, epoch = self.machine.order.key, self.machine.order.epoch + 1
        # it may have finished, and the scheduler may have given the sample to this instance anew
        self._context.engine().exchange.drop(key, epoch=epoch)
        if self._context.open_epochs.get(key) == epoch:
            self._context.open_epochs.pop(key)

    def _say(self, claim: Claim, reason: str) -> None:
        order = self.machine.order
        self._context.report(report_of(order, claim, reason, order.epoch + 1, self._metrics))
