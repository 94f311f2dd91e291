"""Supervised trainer actor: a thin Ray shell around `learning.training.supervised_job`, one of several that learn as
one. It reads the model itself, so that its path must be one that every node sees.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...core.errors import RlhfSpecError
from ...learning.training.supervised_job import StepReport, SupervisedJob, run_job
from ..actor_messages import TrainerMeeting
from ..remote.actor_start import begin_actor
from ..remote.remote import remote
from .group_member import GroupMember


@remote(max_restarts=0)
class SupervisedActor(GroupMember):
    """One trainer of `size`, in the order of ranks."""

    def __init__(self, name: str, rank: int, size: int, timeout_s: float) -> None:
        begin_actor(name)
        super().__init__(name, rank=rank, size=size, timeout_s=timeout_s)

    def join_group(self, meeting: TrainerMeeting, job: SupervisedJob) -> None:
        """Join the other trainers. Raises PeerLost when not all come in time."""
        self.meet_others(meeting, self.device_of(job.trainer.device), strategy=job.trainer.strategy)

    def reports(self, job: SupervisedJob) -> Iterator[StepReport]:
        """Train with the others and report each step; for the first of them, with `num_returns="streaming"`."""
        if self._meeting is None:
            raise RlhfSpecError("a trainer was asked to train before it joined the others; join_group first")
        with self._trainers.naming("train"):
            yield from run_job(job, device=self.device_of(job.trainer.device), trainers=self._trainers)

    def take_part(self, job: SupervisedJob) -> int:
        """Do the same without reports; the steps that were taken. For the others."""
        step = 0
        for report in self.reports(job):
            step = report.step
        return step
