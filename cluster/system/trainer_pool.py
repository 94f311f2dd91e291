"""The trainers of a run: one, or several that learn as one.

Several get every order together. Only the first gives weights away and refits the draft model; where each holds a part
of every weight, the others take part while it packs (`follow`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import ray
from ray.exceptions import GetTimeoutError

from ...actors.actor_messages import TrainerSpec
from ...actors.remote.heartbeat import Heartbeat
from ...actors.remote.remote import Handle
from ...actors.remote.waiting import awake_s, get, get_all, wait_any
from ...actors.workers.trainer_actor import TrainerActor
from ...core.config import ClusterConfig
from ...core.errors import InstanceLost, WaitTimeout
from ...core.records import UpdateReport
from ...core.weight_records import DigestKind
from ...learning.drafts.draft_learner import RefitReport
from ...learning.training.reloaded import Said
from ..plan.topology import PlacementContext, PlacementSlot, actor_options
from ..weights.publish import Fetching, PublishedWeights, confirm

_ANSWERS_WITHIN_S = 20.0
"For a trainer that lives to say so: on a starved machine that takes a while."
_LEAST_S = 0.5
_GRACE_S = 30.0
"The loop waits longer than trainers wait for each other, so that their own messages arrive."


class TrainerPool:
    """Handles by name, in the order of their ranks."""

    def __init__(self, trainers: Mapping[str, Handle], cluster: ClusterConfig) -> None:
        self._trainers = dict(trainers)
        self._loading: list[tuple[dict[str, Any], str, PublishedWeights | None]] = []
        self._start_timeout_s = cluster.start_timeout_s
        self._heartbeat_timeout_s = cluster.heartbeat_timeout_s
        self._timeout_s = cluster.order_timeout_s + (_GRACE_S if len(trainers) > 1 else 0.0)
        self.meanwhile: Callable[[], None] | None = None
        "called about every second while the loop waits for an update, a refit, weights or a state"

    @classmethod
    def start(
        cls,
        spec: TrainerSpec,
        places: tuple[PlacementSlot, ...],
        context: PlacementContext,
        cluster: ClusterConfig,
    ) -> TrainerPool:
        """Make the actors; they come up while the caller goes on."""
        trainers = {
            place.name: TrainerActor.options(**actor_options(place, context)).remote(
                replace(spec, name=place.name, rank=rank, num_trainers=len(places))
            )
            for rank, place in enumerate(places)
        }
        return cls(trainers, cluster)

    @property
    def handles(self) -> Mapping[str, Handle]:
        """All of them by name, in the order of their ranks."""
        return self._trainers

    @property
    def first_name(self) -> str:
        """Name of the trainer that gives weights away."""
        return next(iter(self._trainers))

    @property
    def first(self) -> Handle:
        """The trainer that gives weights away."""
        return self._trainers[self.first_name]

    def begin_loading(
        self,
        target: PublishedWeights,
        draft: PublishedWeights | None,
        *,
        cotrain: bool = False,
        teacher: PublishedWeights | None = None,
    ) -> None:
        """Order the trainers to join one group and load their first weights; `draft` where it is to follow the target.

        With `cotrain` every trainer has the draft model, else the first alone; each has the teacher.

        They are slow to import what they need: instances are better brought up meanwhile, and `confirm_loaded` then.
        """
        if len(self._trainers) > 1:
            meeting = self.first.open_group.remote(self._start_timeout_s)
            joins = {name: one.join_group.remote(meeting) for name, one in self._trainers.items()}
            self._loading.append((joins, "join the group of trainers", None))
        loads = {
            name: one.load_weights.remote(target.manifest, *target.chunk_refs)
            for name, one in self._trainers.items()
        }
        self._loading.append((loads, "load the first weights", target))
        if teacher is not None:
            teachers = {
                name: one.load_teacher.remote(teacher.manifest, *teacher.chunk_refs)
                for name, one in self._trainers.items()
            }
            self._loading.append((teachers, "load the teacher", teacher))
        if draft is not None:
            drafts = {
                name: one.load_draft.remote(draft.manifest, *draft.chunk_refs)
                for name, one in self._trainers.items()
                if cotrain or name == self.first_name
            }
            self._loading.append((drafts, "load the first draft weights", draft))

    def confirm_loaded(self) -> None:
        """Wait until all of that is done.

        Raises WaitTimeout, InstanceLost, PeerLost, WeightsError, and ConfigError from settings that do not go together.
        """
        for refs, order, weights in self._loading:
            answers = get_all(refs, waiter="the loop", order=order, timeout_s=self._start_timeout_s)
            if weights is not None:
                for answer in answers.values():
                    confirm(answer, weights.manifest)
        self._loading = []

    def update(self, rollouts: Any, *, recompute_old: bool = False) -> UpdateReport:
        """Learn from one batch, a reference to it; `recompute_old` as in `Learner.update`.

        Raises InstanceLost naming a trainer that died or is silent, WaitTimeout when none gets on for
        `cluster.order_timeout_s`, and what they raise themselves.
        """
        return self.end_update(self.begin_update(rollouts, recompute_old=recompute_old))

    def begin_update(self, rollouts: Any, *, recompute_old: bool = False) -> dict[str, Any]:
        """Order an update and return at once: what to ask for it by."""
        return {name: one.update.remote(rollouts, recompute_old) for name, one in self._trainers.items()}

    def end_update(self, order: Mapping[str, Any], *, samples_are_open: bool = False) -> UpdateReport:
        """Wait for an update; see `update`. `samples_are_open`: `meanwhile` is not called, the caller sees to them."""
        meanwhile = None if samples_are_open else self.meanwhile
        return self._all(order, "update", meanwhile=meanwhile)[self.first_name]

    def is_over(self, order: Mapping[str, Any]) -> bool:
        """Whether all trainers have answered an order, or one has failed."""
        refs = list(order.values())
        done = wait_any(refs, timeout_s=0.0)
        return len(done) == len(refs) or any(_has_failed(ref) for ref in done)

    def heartbeat(self, order: str) -> Heartbeat:
        """What tells a trainer that is silent, while somebody else than this pool waits for an order."""
        return self._heartbeat(self._trainers, order)

    def refit(self, rollouts: Any, budget_s: float) -> RefitReport:
        """Let the draft model follow, for at most so many seconds."""
        refs = {self.first_name: self.first.refit.remote(rollouts, budget_s)}
        return self._all(refs, "refit the draft model", meanwhile=self.meanwhile)[self.first_name]

    def take(
        self, model: Literal["target", "draft"] = "target", checksums: DigestKind | None = None
    ) -> PublishedWeights:
        """Take a model's current weights into the object store; `checksums` as of `Fetching`."""
        heartbeat = self._heartbeat(self._trainers, f"pack the {model} weights")

        def meanwhile() -> None:
            heartbeat.look()
            if self.meanwhile is not None:
                self.meanwhile()

        began_s = awake_s()
        taken = self.begin_take(model, checksums).wait(meanwhile)
        taken.part_seconds["pack"] = awake_s() - began_s
        return taken

    def begin_take(
        self, model: Literal["target", "draft"] = "target", checksums: DigestKind | None = None
    ) -> Fetching:
        """Order what `take` takes, after whatever the trainers were asked for before, and return at once."""
        helpers = self.follow() if model == "target" else {}
        return Fetching(
            self.first, timeout_s=self._timeout_s, model=model, helpers=helpers, checksums=checksums
        )

    def follow(self) -> dict[str, Any]:
        """Let the other trainers take part while the first walks through its weights; their answers, to be awaited."""
        return {name: one.follow.remote() for name, one in self._trainers.items() if name != self.first_name}

    def adapter_files(self) -> dict[str, bytes]:
        """The LoRA adapter's files, by name."""
        refs = {self.first_name: self.first.adapter_files.remote()} | self.follow()
        return self._all(refs, "pack the adapter")[self.first_name]

    def say(self) -> Said:
        """What they say, by their weights as they are, of some tokens that they learned from last."""
        refs = {name: one.say.remote() for name, one in self._trainers.items()}
        return self._all(refs, "say what they learned")[self.first_name]

    def blind_to(self, folder: Path) -> list[str]:
        """Names of trainers on machines that do not see a folder of this one."""
        refs = {name: one.sees.remote(str(folder)) for name, one in self._trainers.items()}
        answers = self._all(refs, "look for the run folder")
        return [name for name, sees in answers.items() if not sees]

    def save_state(self, folder: Path) -> None:
        """Let all write what they hold into a new folder, in one that all see. Raises StorageError."""
        refs = {name: one.save_state.remote(str(folder)) for name, one in self._trainers.items()}
        self._all(refs, "write their state", meanwhile=self.meanwhile)

    def load_state(self, folder: Path) -> None:
        """Let all go on from what `save_state` wrote. Raises ConfigError when it does not fit."""
        refs = {name: one.load_state.remote(str(folder)) for name, one in self._trainers.items()}
        get_all(refs, waiter="the loop", order="read their state", timeout_s=self._start_timeout_s)

    def lost(self, *, or_silent: bool) -> list[str]:
        """Names of trainers that are dead; of those, too, that answer nothing for a while if `or_silent`."""
        refs = {name: one.forwards_so_far.remote() for name, one in self._trainers.items()}
        ends_s = time.monotonic() + (_ANSWERS_WITHIN_S if or_silent else _LEAST_S)
        lost = []
        for name, ref in refs.items():
            left_s = max(ends_s - time.monotonic(), _LEAST_S)
            try:
                get(ref, waiter="the loop", waited_for=name, order="say whether it lives", timeout_s=left_s)
            except WaitTimeout:
                lost += [name] if or_silent else []
            except InstanceLost:
                lost.append(name)
        return lost

    def kill(self) -> None:
        """End all of them: one that is frozen ends in no other way."""
        for one in self._trainers.values():
            ray.kill(one)

    def _heartbeat(self, names: Iterable[str], order: str) -> Heartbeat:
        heartbeat = Heartbeat(
            lambda trainer: trainer.forwards_so_far.remote(), timeout_s=self._heartbeat_timeout_s
        )
        for name in names:
            heartbeat.watch(name, self._trainers[name], order)
        return heartbeat

    def _all(
        self, refs: Mapping[str, Any], order: str, *, meanwhile: Callable[[], None] | None = None
    ) -> dict[str, Any]:
        """Wait for trainers at work, and look whether they live."""
        return get_all(
            refs,
            waiter="the loop",
            order=order,
            timeout_s=self._timeout_s,
            meanwhile=meanwhile,
            gets_on=self._heartbeat(refs, order).look,
        )


def _has_failed(ref: Any) -> bool:
    """Whether an answer that is there is an error; whoever waits for it raises it."""
    try:
        ray.get(ref, timeout=0.0)
    except GetTimeoutError:
        return False
    except Exception:
        return True
    return False
