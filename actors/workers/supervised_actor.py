"""Supervised trainer actor: a thin Ray shell around `learning.trainer.supervised_job`, one of several that learn as
one. It reads the model itself, so that its path must be one that every node sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ray
import torch

from rlhfspec.actors.actor_messages import TrainerMeeting
from rlhfspec.actors.waiting.actor_start import begin_actor
from rlhfspec.actors.waiting.assigned_device import assigned_gpus, resolve_device
from rlhfspec.actors.waiting.remote import remote
from rlhfspec.core.errors import RlhfSpecError
from rlhfspec.learning.trainer.parallel import DataParallel, OneTrainer, join_group, new_store, store_at
from rlhfspec.learning.trainer.sharded import Sharded
from rlhfspec.learning.trainer.supervised_job import StepReport, SupervisedJob, run_job


@remote(max_restarts=0)
class SupervisedActor:
    """One trainer of `size`, in the order of ranks."""

    def __init__(self, name: str, rank: int, size: int, timeout_s: float) -> None:
        begin_actor(name)
        self._name, self._rank, self._size, self._timeout_s = name, rank, size, timeout_s
        self._store: Any = None
        self._trainers: OneTrainer | None = None

    def __repr__(self) -> str:
        return f"SupervisedActor({self._name})"

    def open_group(self, timeout_s: float) -> TrainerMeeting:
        """Make a place where the trainers meet, at this node's address; for the first of them."""
        host = ray.util.get_node_ip_address()
        self._store = new_store(host, self._size, timeout_s)
        return TrainerMeeting(host=host, port=self._store.port, timeout_s=timeout_s)

    def join_group(self, meeting: TrainerMeeting, job: SupervisedJob) -> None:
        """Join the other trainers. Raises PeerLost when not all come in time."""
        device = self._device(job)
        self._store = self._store or store_at(meeting.host, meeting.port, self._size, meeting.timeout_s)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        join_group(self._store, rank=self._rank, size=self._size, device=device, timeout_s=self._timeout_s)
        self._trainers = Sharded(device) if job.trainer.strategy == "fsdp2" else DataParallel()

    def reports(self, job: SupervisedJob) -> Iterator[StepReport]:
        """Train with the others and report each step; for the first of them, with `num_returns="streaming"`."""
        if self._trainers is None:
            raise RlhfSpecError("a trainer was asked to train before it joined the others; join_group first")
        with self._trainers.naming("train"):
            yield from run_job(job, device=self._device(job), trainers=self._trainers)

    def take_part(self, job: SupervisedJob) -> int:
        """Do the same without reports; the steps that were taken. For the others."""
        step = 0
        for report in self.reports(job):
            step = report.step
        return step

    def _device(self, job: SupervisedJob) -> torch.device:
        return resolve_device(
            job.trainer.device, assigned=assigned_gpus(), key="trainer.device", pool="cluster.trainer"
        )
