"""The destination's half of a migrator: what `policies.migration.destination` decides, on engine and channels."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from actors.migration.context import MigrationContext, report_of
from core.errors import TransferError, WeightsError
from engine.exchange import DRAFT, CachePiece
from policies.migration.cache_frames import cut_into_frames
from policies.migration.destination import (
    Answer,
    DestinationAction,
    DestinationEvent,
    DestinationMove,
    DestinationStage,
    Drop,
    FreeSlot,
    KeepSlot,
    TakeIn,
)
from policies.migration.move_messages import (
    Claim,
    HandOver,
    Prepare,
    Ready,
    Received,
    Refused,
    Settle,
    Verdict,
)
from policies.migration.source import Say


@dataclass(slots=True)
class _Coming:
    """One move."""

    machine: DestinationMove
    has_slot: bool = False
    pieces: tuple[CachePiece, ...] = ()
    "of stage one"
    tails: tuple[CachePiece, ...] = ()
    "that came beside the hand-over"
    left_at_s: float | None = None
    "until the first decode step here: when the last one ended at the source"
    figures: dict[str, float] = field(default_factory=dict)


class MigrationDestination:
    """Moves of which this instance is the destination."""

    def __init__(self, context: MigrationContext) -> None:
        self._context = context
        self._coming: dict[str, _Coming] = {}

    def __contains__(self, move_id: str) -> bool:
        return move_id in self._coming

    def __len__(self) -> int:
        return len(self._coming)

    def handle(self, move_id: str, event: DestinationEvent) -> None:
        """Pass an event to a move's machine and do what it says."""
        self._carry_out(move_id, self._coming[move_id].machine.handle(event, now_s=self._context.clock()))

    def before_step(self) -> None:
        """A decode step begins: what came in since the last one is running now."""
        for coming in self._coming.values():
            if coming.left_at_s is not None:
                coming.figures["downtime_s"] = self._context.wall_clock() - coming.left_at_s
                coming.left_at_s = None
                self._say(coming, Claim.COMMIT, "it runs here")

    def tick(self) -> None:
        """Give up what waits for too long."""
        for move_id, coming in list(self._coming.items()):
            self._carry_out(move_id, coming.machine.tick(self._context.clock()))

    def obey_late(self, settle: Settle) -> None:
        """A verdict on a move that is over here: a copy that is another's must not go on."""
        epoch = self._context.open_epochs.get(settle.key, settle.epoch)
        if settle.verdict is Verdict.RELEASE and epoch < settle.epoch:
            self._context.engine().exchange.drop(settle.key)
            self._context.open_epochs.pop(settle.key, None)

    def refuse_what_has_not_come(self, reason: str) -> None:
        """Take in no sample of the moves that are open: their sources keep them or get them back."""
        for move_id, coming in list(self._coming.items()):
            if coming.machine.stage is not DestinationStage.RUNNING:
                self._carry_out(move_id, coming.machine.refuse(reason, now_s=self._context.clock()))

    def begin(self, prepare: Prepare) -> None:
        """Keep a slot for a sample that a source announces, or refuse it."""
        move_id = prepare.order.move_id
        if move_id in self._coming:
            return
        machine = DestinationMove(
            prepare, now_s=self._context.clock(), timeout_s=self._context.settings.timeout_s
        )
        self._coming[move_id] = _Coming(machine)
        self._carry_out(move_id, machine.begin(refusal=self._refusal(prepare)))

    def _refusal(self, prepare: Prepare) -> str:
        engine = self._context.engine_or_none()
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
        if engine.exchange.num_free_slots <= 0:
            return f"no free slot among {engine.runner.pool.num_slots}"
        return ""

    def _carry_out(self, move_id: str, actions: list[DestinationAction]) -> None:
        coming = self._coming[move_id]
        for action in actions:
            match action:
                case KeepSlot():
                    self._keep_slot(coming, expect_frames=action.expect_frames)
                case FreeSlot():
                    self._free_slot(coming)
                case Answer():
                    self._context.post(coming.machine.order.source, action.message, ())
                case TakeIn():
                    self._take_in(coming, action.message)
                case Drop():
                    self._drop(coming)
                case Say():
                    # the first COMMIT is said when the first decode step begins
                    if coming.left_at_s is None:
                        self._say(coming, action.claim, action.reason)
        if coming.machine.is_done:
            self._coming.pop(move_id, None)

    def _keep_slot(self, coming: _Coming, *, expect_frames: bool) -> None:
        order, prepare = coming.machine.order, coming.machine.prepare
        self._context.engine().exchange.num_reserved += 1
        coming.has_slot = True
        frames = cut_into_frames(prepare.cached_tokens, prepare.token_bytes, frame_bytes=prepare.frame_bytes)
        ticket = None
        if expect_frames and frames:
            try:
                ticket = self._context.transfers.listen(
                    order.source, known_channel=prepare.channel, broken_channel=prepare.broken_channel
                )
            except TransferError as error:
                self._carry_out(order.move_id, coming.machine.refuse(str(error), now_s=self._context.clock()))
                return
            began_s = self._context.clock()
            coming.figures["was_cold"] = float(ticket is not None)

            def landed(pieces: tuple[CachePiece, ...], error: str) -> None:
                coming.pieces = pieces
                coming.figures["stage1_s"] = self._context.clock() - began_s
                self._context.come_back(Received(move_id=order.move_id, error=error))

            self._context.transfers.receive(order.source, order.move_id, frames, landed)
        self._context.post(order.source, Ready(move_id=order.move_id, ticket=ticket), ())
        if expect_frames and not frames:
            self._context.come_back(Received(move_id=order.move_id))

    def _free_slot(self, coming: _Coming) -> None:
        if coming.has_slot:
            coming.has_slot = False
            self._context.engine().exchange.num_reserved -= 1
        coming.pieces = ()

    def take_hand_over(self, message: HandOver, tails: tuple[CachePiece, ...]) -> None:
        """Take a sample in, with its caches' tails, or say why not: the source asks for it back then."""
        move_id = message.order.move_id
        coming, now_s = self._coming.get(move_id), self._context.clock()
        if coming is None:
            reason = f"{self._context.instance} does not expect it, or no more"
            self._context.post(message.order.source, Refused(move_id=move_id, reason=reason), ())
            return
        try:
            self._context.engine().require_version(message.state)
        except WeightsError as error:
            actions = coming.machine.refuse(str(error), now_s=now_s)
        else:
            coming.tails = tails
            actions = coming.machine.handle(message, now_s=now_s)
        self._carry_out(move_id, actions)

    def _take_in(self, coming: _Coming, message: HandOver) -> None:
        engine, epoch = self._context.engine(), message.order.epoch + 1
        tails, coming.tails = coming.tails, ()
        pieces = (*coming.pieces, *tails)
        if engine.drafter_version != coming.machine.prepare.drafter_version or (
            engine.drafter_version != message.drafter_version
        ):
            # another draft model's cache would draft badly; the drafter catches up from the tokens
            pieces = tuple(piece for piece in pieces if piece.part != DRAFT)
        state = replace(message.state, request=replace(message.state.request, epoch=epoch))
        self._free_slot(coming)
        began_s = self._context.clock()
        computed = engine.exchange.attach(state, pieces)
        ended_s = self._context.clock()
        self._context.note("attach", began_s, ended_s, message.order.move_id)
        self._context.open_epochs[state.request.key] = epoch
        coming.left_at_s = message.left_at_s
        if computed is None:
            # it waits for room in the caches: neither a transfer nor a recomputation to learn from
            coming.figures.pop("stage1_s", None)
            coming.figures["context_tokens"] = float(state.num_committed_tokens)
            return
        coming.figures |= {
            "attach_s": ended_s - began_s,
            "computed_tokens": float(computed),
            "context_tokens": float(state.num_committed_tokens),
            "stage1_bytes": float(message.num_stage1_bytes),
            "stage2_bytes": float(sum(piece.cells.nbytes for piece in tails)),
        }

    def _drop(self, coming: _Coming) -> None:
        key, epoch = coming.machine.order.key, coming.machine.order.epoch + 1
        # it may have finished, and the scheduler may have given the sample to this instance anew
        self._context.engine().exchange.drop(key, epoch=epoch)
        if self._context.open_epochs.get(key) == epoch:
            self._context.open_epochs.pop(key)

    def _say(self, coming: _Coming, claim: Claim, reason: str) -> None:
        order = coming.machine.order
        self._context.report(report_of(order, claim, reason, order.epoch + 1, coming.figures))
