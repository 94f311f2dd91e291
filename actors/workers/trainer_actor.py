"""Trainer actor: a thin Ray shell around `Learner` and `DraftLearner`.

It gets its first weights by manifest, as the generation actors do, so it may run on any machine. New
weights go out as chunks that the actor returns (the caller owns them, so they outlive this actor).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Literal

import numpy as np
import ray
import torch

from ...core.errors import ConfigError, RlhfSpecError, WeightsError
from ...core.records import Rollout, UpdateReport
from ...core.weight_records import DigestKind, WeightManifest
from ...engine.build import backend_for, published_model
from ...engine.numerics import on_threads
from ...engine.weights.causal_lm import DTYPES, PreTrainedModel
from ...engine.weights.chunks import load_into, weight_views
from ...engine.weights.loading import build_causal_lm
from ...learning.drafts.cotraining import DraftCotrainer
from ...learning.drafts.draft_learner import DraftTerms, RefitReport
from ...learning.drafts.refit import DraftRefitter
from ...learning.drafts.soft_targets import SoftTargetStore
from ...learning.training.engine_scoring import EngineScorer, require_engine_scoring
from ...learning.training.finished_model import PublishedForm
from ...learning.training.learner import Learner
from ...learning.training.learning_rate import Horizon
from ...learning.training.objectives.head_statistics import use_room
from ...learning.training.reloaded import Said
from ...learning.training.sharded import fill_later
from ...learning.training.training_forward import compute_dtype_on, forwards_made, hold_linears_in
from ..actor_messages import LoadedWeights, SentWeights, TrainerMeeting, TrainerSpec
from ..remote.actor_start import begin_actor, set_heap_aside
from ..remote.assigned_device import TRAINER_ADVICE, gpu_seat, take_gpu_share
from ..remote.process_metrics import give_back_free_memory
from ..remote.remote import remote
from ..transport.broadcast import BroadcastForm, BroadcastGroup, BroadcastHost, BroadcastTicket
from .group_member import GroupMember

_REFIT_STATE = "draft_refit.safetensors"


@remote(max_restarts=0, concurrency_groups={"control": 1})
class TrainerActor(GroupMember):
    """Owns the target model being trained, and the draft model that follows it."""

    def __init__(self, spec: TrainerSpec) -> None:
        begin_actor(spec.name)
        super().__init__(spec.name, rank=spec.rank, size=spec.num_trainers, timeout_s=spec.timeout_s)
        self._spec = spec
        self._built: Learner | None = None
        self._built_refitter: DraftRefitter | DraftCotrainer | None = None
        self._soft_targets: SoftTargetStore | None = None
        self._forms: dict[str, PublishedForm] = {}
        self._broadcast_host: BroadcastHost | None = None
        self._former_host: BroadcastHost | None = None
        self._broadcast: BroadcastGroup | None = None

    @ray.method(concurrency_group="control")
    def forwards_so_far(self) -> int:
        """How many forwards the models here have made: answered at once, whatever the trainer is at."""
        return forwards_made()

    def join_group(self, meeting: TrainerMeeting) -> None:
        """Join the other trainers. Raises PeerLost when not all come in time."""
        self.meet_others(meeting, self._device, strategy=self._spec.trainer.strategy)

    def load_weights(self, manifest: WeightManifest, *chunks: np.ndarray) -> LoadedWeights:
        """Build the learner around the published model and read its checksum back."""
        spec = self._spec
        torch.set_num_threads(spec.trainer.num_threads)
        left_bytes = take_gpu_share(
            spec.name, self._device, needed_bytes=spec.gpu_bytes, share=spec.gpu_share, advice=TRAINER_ADVICE
        )
        # the rest is for what allocators leave unused
        use_room(left_bytes // 2)
        model = self._build(manifest, chunks)
        drafter_training = self._spec.drafter_training
        if drafter_training is not None and drafter_training.mode == "refit":
            self._soft_targets = SoftTargetStore(drafter_training.num_target_tokens)
        self._built = Learner(
            model,
            algorithm=self._spec.algorithm,
            trainer=self._spec.trainer,
            temperature=self._spec.temperature,
            seed=self._spec.seed,
            pad_token_id=self._spec.pad_token_id,
            vocab_size=self._spec.vocab_size,
            observers=[] if self._soft_targets is None else [self._soft_targets],
            compute_dtype=self._compute_dtype,
            scorer=self._scorer(manifest, chunks),
            part_weights=self._spec.part_weights,
            trainers=self._trainers,
            horizon=Horizon(
                num_optimizer_steps=self._spec.num_optimizer_steps, max_new_tokens=self._spec.max_new_tokens
            ),
        )
        set_heap_aside()
        self.wait_for_others()
        return self._loaded(manifest, self.checksum(like=manifest.checksum))

    def load_teacher(self, manifest: WeightManifest, *chunks: np.ndarray) -> LoadedWeights:
        """Build the frozen model whose distribution the learner learns, too, and read its checksum back."""
        model = self._build(manifest, chunks)
        with self._trainers.naming("take the teacher"):
            self._learner.take_teacher(model)
            with closing(self._trainers.tensors(model)) as weights:
                checksum = self._forms["teacher"].checksum(weights, like=manifest.checksum)
        set_heap_aside()
        return self._loaded(manifest, checksum)

    def load_draft(self, manifest: WeightManifest, *chunks: np.ndarray) -> LoadedWeights:
        """Build what the published draft model follows the target by, and read its checksum back."""
        settings = self._spec.drafter_training
        if settings is None:
            raise RlhfSpecError("the trainer got a draft model but drafter_training.refit is off")
        model = self._build(manifest, chunks)
        terms = DraftTerms(
            settings=settings,
            temperature=self._spec.temperature,
            vocab_size=self._spec.vocab_size,
            pad_token_id=self._spec.pad_token_id,
            seed=self._spec.seed,
            weight_version=manifest.weight_version,
            compute_dtype=self._compute_dtype,
        )
        if settings.mode == "cotrain":
            self._built_refitter = DraftCotrainer(model, terms, trainers=self._trainers)
            self._learner.observers[:] = [self._built_refitter]
        else:
            self._built_refitter = DraftRefitter(model, terms)
        set_heap_aside()
        weights = self._refitter.weights()
        return self._loaded(manifest, self._forms["draft"].checksum(weights, like=manifest.checksum))

    def update(self, rollouts: Sequence[Rollout], recompute_old: bool = False) -> UpdateReport:
        """Do one update; equal rollouts in any order give bitwise equal parameters on the CPU.

        Raises PeerLost when another trainer of several is gone.
        """
        with self._trainers.naming("update"):
            return self._learner.update(rollouts, recompute_old=recompute_old)

    def follow(self) -> None:
        """Take part while the first trainer walks through the target's weights. Raises PeerLost."""
        with self._trainers.naming("gather weights"):
            self._learner.accompany_weights()

    def refit(self, rollouts: Sequence[Rollout], budget_s: float) -> RefitReport:
        """Let the draft model follow the target for at most so long, or say how it has; the target is not touched."""
        return self._refitter.refit(rollouts, budget_s=budget_s, soft_targets=self._soft_targets)

    def packed(
        self, model: Literal["target", "draft"] = "target", checksums: DigestKind | None = None
    ) -> Iterator[np.ndarray | WeightManifest]:
        """Pack a model's current weights: every chunk when it is full, in a buffer of its own use, then the manifest.

        To be called with `num_returns="streaming"`: each chunk is in the object store before the next is packed.
        `checksums`: the kind of the whole's; None: as it publishes.
        """
        owner = self._learner if model == "target" else self._refitter
        packer = self._forms[model].packer(
            owner.weight_version,
            # rounded and summed where the weights lie; what comes to the host is what goes out
            device=self._device if self._device.type == "cuda" else None,
            kind=checksums or self._spec.checksums,
        )
        with self._trainers.naming("gather weights"), closing(owner.weights()) as weights:
            yield from packer.chunks(weights)
        yield packer.manifest()

    def sees(self, folder: str) -> bool:
        """Whether a folder of the driver's machine is this machine's too."""
        return Path(folder).is_dir()

    def save_state(self, folder: str) -> None:
        """Write all that goes on from here into a new folder of all trainers. Raises StorageError, PeerLost."""
        with self._trainers.naming("write their state"):
            self._learner.save(Path(folder))
        if self._built_refitter is not None:
            self._built_refitter.save(Path(folder) / _REFIT_STATE)

    def load_state(self, folder: str) -> None:
        """Go on where `save_state` was called. Raises ConfigError when it does not fit, PeerLost."""
        with self._trainers.naming("read their state"):
            self._learner.load(Path(folder))
        # a run that did not refit has none
        if self._built_refitter is not None and (Path(folder) / _REFIT_STATE).is_file():
            self._built_refitter.load(Path(folder) / _REFIT_STATE)

    def gpu_seat(self) -> str | None:
        """The GPU that the target is trained on, by a name that no other GPU of the cluster has; None: a CPU."""
        return gpu_seat(self._device)

    def open_broadcast(
        self, members: tuple[str, ...], form: BroadcastForm = "gloo", room_bytes: int = 0
    ) -> BroadcastTicket:
        """Listen for instances that shall join a broadcast group; `join_broadcast` waits for them.

        `room_bytes`: of the largest bucket.
        """
        self.close_broadcast()
        self._former_host = self._broadcast_host
        self._broadcast_host = BroadcastHost(
            host=ray.util.get_node_ip_address(),
            members=members,
            form=form,
            device=self._device,
            room_bytes=room_bytes,
            me=self._spec.name,
        )
        return self._broadcast_host.ticket

    def join_broadcast(self, timeout_s: float) -> None:
        """Wait for all members. Raises WaitTimeout naming who did not come."""
        if self._broadcast_host is not None:
            self._broadcast = self._broadcast_host.join(timeout_s)
        # its members have left it
        self._former_host = None

    def broadcast(self, layout: WeightManifest, bucket_bytes: int) -> SentWeights:
        """Send the target's weights, each bucket while the next is packed where the group has them; what was sent.

        Raises WeightsError where buckets are not those of `layout`, of `bucket_bytes`, WaitTimeout: a member fails.
        """
        if self._broadcast is None:
            # the other trainers walk with it all the same
            self._learner.accompany_weights()
            raise WeightsError(
                "the trainer is in no broadcast group; the object store carries the weights instead"
            )
        version = self._learner.weight_version
        packer = self._forms["target"].packer(
            version,
            rooms=self._broadcast.rooms,
            device=self._broadcast.device,
            kind=self._spec.checksums,
            chunk_bytes=bucket_bytes,
            cuts=True,
        )
        began_s, waited_s = time.perf_counter(), 0.0
        with self._trainers.naming("gather weights"), closing(self._learner.weights()) as weights:
            for index, chunk in enumerate(packer.buckets(weights)):
                what = f"chunk {index} of target version {version}"
                if index >= len(layout.chunk_num_bytes) or len(chunk) != layout.chunk_num_bytes[index]:
                    raise WeightsError(f"{what} is not of the size that was agreed")
                waits_from_s = time.perf_counter()
                self._broadcast.send(chunk, what)
                waited_s += time.perf_counter() - waits_from_s
        sums = torch.tensor(packer.sums())
        pack_s = time.perf_counter() - began_s - waited_s
        self._broadcast.of_trainer(sums, f"the checksums of target version {version}")
        return SentWeights(manifest=packer.manifest(), pack_s=pack_s)

    def close_broadcast(self) -> None:
        """Leave the group, if there is one. Its window stays until all are in another: some may read it still."""
        if self._broadcast is not None:
            self._broadcast.close()
        self._broadcast = None

    def checksum(self, like: str = "") -> str:
        """Checksum over the target's parameters as they are published, of the kind of `like`."""
        with closing(self._learner.weights()) as weights:
            return self._forms["target"].checksum(weights, like=like)

    def adapter_files(self) -> dict[str, bytes]:
        """The LoRA adapter as a folder that peft loads: name and content of each file. Needs `trainer.lora`."""
        return self._learner.adapter_files(base_model=self._spec.base_model)

    def say(self) -> Said:
        """What the target says, by its weights as they are, of some tokens that it learned from last."""
        with self._trainers.naming("say what they learned"):
            said = self._learner.say()
        # another process of this machine will now write the model, and read it again
        give_back_free_memory()
        return said

    def _build(self, manifest: WeightManifest, chunks: Sequence[np.ndarray]) -> PreTrainedModel:
        """The published model on this actor's device, in float32 where an optimizer steps its weights."""
        # shards are filled from the chunks, and only they go to the device
        is_divided = manifest.model != "draft" and self._trainers.is_sharded
        model = build_causal_lm(manifest.hf_config_json, "float32", on_meta=is_divided)
        (fill_later if is_divided else load_into)(model, weight_views(manifest, chunks))
        if manifest.model == "target" and self._spec.trainer.lora is not None:
            hold_linears_in(model, self._compute_dtype)
        self._forms[manifest.model] = PublishedForm(manifest)
        return model if is_divided else model.to(self._device)  # type: ignore[arg-type]

    def _scorer(self, manifest: WeightManifest, chunks: Sequence[np.ndarray]) -> EngineScorer | None:
        """The engine's forward over the published weights, where it is to value log-probabilities."""
        spec = self._spec
        if spec.trainer.scoring == "model":
            return None
        if spec.engine is None:
            raise ConfigError(
                "trainer.scoring is engine, but the trainer was not told of any; give TrainerSpec.engine"
            )
        require_engine_scoring(spec.engine, self._device)
        with on_threads(1):
            model = published_model(
                manifest,
                [weight_views(manifest, chunks)],
                spec.dtype,
                backend=backend_for(spec.engine),
                who="weights that score",
                stock=spec.engine.forward == "stock",
            )
        return EngineScorer(
            model,
            engine=spec.engine,
            max_total_tokens=spec.max_total_tokens,
            vocab_size=spec.vocab_size,
            temperature=spec.temperature,
        )

    def _loaded(self, manifest: WeightManifest, checksum: str) -> LoadedWeights:
        return LoadedWeights(
            instance=self._spec.name,
            model=manifest.model,
            weight_version=manifest.weight_version,
            checksum=checksum,
        )

    @property
    def _device(self) -> torch.device:
        return self.device_of(self._spec.trainer.device)

    @property
    def _compute_dtype(self) -> torch.dtype:
        return compute_dtype_on(self._device, DTYPES[self._spec.dtype], self._spec.trainer.compute_dtype)

    @property
    def _learner(self) -> Learner:
        if self._built is None:
            raise RlhfSpecError("the trainer was asked before it had weights; publish weights to it first")
        return self._built

    @property
    def _refitter(self) -> DraftRefitter | DraftCotrainer:
        if self._built_refitter is None:
            raise RlhfSpecError("the trainer was asked before it had a draft model; publish one to it first")
        return self._built_refitter
