"""Builds an engine from manifests: the model from the config, the weights from the chunks.

An instance never opens a model path: the first weights arrive as every later version does.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ...core.config import EngineConfig
from ...core.errors import InstanceLost, RlhfSpecError, WeightsError
from ...core.records import Completion, SampleKey
from ...core.weight_records import WORDS, WeightManifest, kind_of
from ...engine.build import backend_for, build_engine, published_model
from ...engine.calibration.engine_provenance import device_name, here
from ...engine.drafters.drafter import part_of
from ...engine.drafters.head.head_drafter import HeadDrafter
from ...engine.drafters.head.head_weights import HeadWeights, require_fit
from ...engine.drafters.head.published_head import head_checksum, published_head
from ...engine.drafters.suffix_drafter import SuffixDrafter
from ...engine.engine import Engine
from ...engine.model.compute_backend import ComputeBackend
from ...engine.model.invariance_probe import KeptVerdicts
from ...engine.weights.causal_lm import CausalLM
from ...engine.weights.chunks import buckets_of, weight_views
from ...engine.weights.digests import Digest, read_once
from ...engine.weights.llama_config import MODEL_TYPES
from ...engine.weights.shared_weights import SharedWeights
from ..actor_messages import GenerationSpec, HeadComparison, HeadProgress, InstanceNumerics, LoadedWeights
from ..remote.actor_start import set_heap_aside
from ..remote.assigned_device import INSTANCE_ADVICE, assigned_gpus, resolve_device, take_gpu_share
from .rank_actors import RankActors
from .spot_trainer import SpotTrainer

if TYPE_CHECKING:
    # none but a broadcast needs it
    from ...engine.group.ranks import GroupRanks
    from ..transport.broadcast import BroadcastGroup


class ManifestHost:
    """Holds an instance's models, and the engine once all of them have weights."""

    def __init__(self, spec: GenerationSpec) -> None:
        self._spec = spec
        self._models: dict[str, CausalLM] = {}
        self._head: HeadWeights | None = None
        "what drafts, as it was published, where that is a head"
        self._versions: dict[str, int] = {}
        self._engine: Engine | None = None
        self._rank_actors: RankActors | None = None
        self.on_lost: Callable[[InstanceLost], None] = lambda lost: None
        "hears why this process is about to end"
        self._spot: SpotTrainer | None = None
        "trains the head in idle time"
        self._shared: dict[str, SharedWeights] = {}
        self._torn: set[str] = set()
        "models of which a version failed on the way: what is in place may be of two, or damaged"
        self._all_here_s = 0.0  # when the last bucket of a version came

    @property
    def engine(self) -> Engine | None:
        """The engine; None until the first version of every model has been loaded, and while one is not whole."""
        return None if self._torn else self._engine

    @property
    def spot_trainer(self) -> SpotTrainer | None:
        """What trains the draft head while there are no samples; None: it is not trained here."""
        return self._spot

    def so_far(self, keys: Collection[SampleKey]) -> tuple[Completion, ...]:
        """What there is of these samples, of those that run here."""
        return () if self.engine is None else tuple(self.engine.so_far(keys))

    def close(self) -> None:
        """End what trains, and the other ranks."""
        if self._spot is not None:
            self._spot.close()
        if self._rank_actors is not None:
            self._rank_actors.close()

    def _ranks(self, model: str) -> GroupRanks | None:
        """The group that a model is dealt to; what drafts is whole on the leader."""
        if self._spec.num_ranks == 1 or model != "target":
            return None
        if self._rank_actors is None:
            self._rank_actors = RankActors(self._spec, lambda lost: self.on_lost(lost))
        return self._rank_actors.ranks

    def load_weights(self, manifest: WeightManifest, chunks: Sequence[np.ndarray]) -> LoadedWeights:
        """Load one version of one model; what decodes from now on was read back and compared with the chunks.

        Three passes over its bytes: they are verified, laid out, and compared.

        Raises WeightsError when chunks and manifest do not match, a sample is open, or a laid-out copy is not what was
        loaded; NotFiniteError for NaN or infinity.
        """
        began_s = time.perf_counter()
        kind = kind_of(manifest.checksum)
        whole = Digest(kind)
        tensors = weight_views(manifest, chunks, whole if kind == "xxh3" else None)
        if manifest.model == "draft" and self._spec.speculation.drafter in ("head", "mtp"):
            return self._confirmed(manifest, self._load_head(manifest, tensors), began_s)
        parts = [tensors] if kind == "xxh3" else self._summed(tensors, whole)
        if self._engine is not None:
            self._decode_from(manifest, parts)
        else:
            model = published_model(
                manifest,
                parts,
                self._spec.dtype,
                backend=self._backend,
                who=f"{manifest.model} weights of {self._spec.instance}",
                stock=self._spec.engine.forward == "stock",
                keeps_head=manifest.model == "target" and self._spec.spot is not None,
                ranks=self._ranks(manifest.model),
                vocab_size=self._spec.vocab_size,
                shared=self._shared_with_others(manifest),
            )
            self._models[manifest.model] = model
            self._versions[manifest.model] = manifest.weight_version
            self._build_when_complete()
        return self._confirmed(manifest, whole.text(), began_s)

    def _decode_from(self, manifest: WeightManifest, parts: Iterable[Mapping[str, Tensor]]) -> None:
        """Let the engine load a version; where that fails on the way, nothing decodes until one is whole."""
        assert self._engine is not None
        self._shared_with_others(manifest)
        with nullcontext() if manifest.model == "draft" else self._not_training():
            self._engine.load_parts(manifest, self._torn_by(parts, manifest.model))
        self._torn.discard(manifest.model)

    def _torn_by(self, parts: Iterable[Mapping[str, Tensor]], model: str) -> Iterator[Mapping[str, Tensor]]:
        for part in parts:
            self._torn.add(model)
            self._all_here_s = time.perf_counter()
            yield part

    def _summed(self, tensors: Mapping[str, Tensor], whole: Digest) -> Iterator[dict[str, Tensor]]:
        """One tensor after the other, where it decodes: there its words are summed."""
        for name, tensor in tensors.items():
            here = tensor.to(self._backend.device)
            whole.add(here)
            yield {name: here}

    def _load_head(self, manifest: WeightManifest, tensors: dict[str, Tensor]) -> str:
        """Load one version of the head or MTP layer; kept as published beside the drafter's own; its checksum."""
        head = published_head(manifest, tensors)
        if self._engine is not None:
            self._engine.load_weights(manifest, dict(head.tensors))
        if self._spot is not None:
            self._spot.load(head.trained)
        self._head, self._versions["draft"] = head, manifest.weight_version
        if self._engine is None:
            self._build_when_complete()
        # read back from what drafts, where that is there already
        drafter = None if self._engine is None else part_of(self._engine.drafter, HeadDrafter)
        return head_checksum(head) if drafter is None else drafter.checksum()

    def numerics(self) -> InstanceNumerics:
        """What the engine promises of tokens, and by what it rounds. Raises RlhfSpecError before it has weights."""
        if self._engine is None:
            raise RlhfSpecError(
                f"{self._spec.instance} was asked for its numerics before it had weights; publish weights to it first"
            )
        runner = self._engine.runner
        if runner.backend.name == ComputeBackend.name or runner.backend.rows is not None:
            layout = ", prepacked weights" if runner.prepacked else ""
            layout += ", kernels of our own" if runner.backend.rows is not None else ""
            # a library chooses its products by the processor
            rounds_by = f"torch {torch.__version__} on {device_name(runner.device)}{layout}"
        else:
            # products of our own round alike on every processor (docs/decisions/0009-own-code.md)
            rounds_by = f"code of our own ({runner.backend.name})"
        return InstanceNumerics(promise=self._engine.promise, rounds_by=rounds_by)

    def receive_weights(self, layout: WeightManifest, group: BroadcastGroup) -> LoadedWeights:
        """Load the target's next version as it comes; nothing decodes until one is whole. Raises as `received`."""
        if self._engine is None:
            raise WeightsError(
                f"{self._spec.instance} has no engine yet: its first weights come by the object store"
            )
        whole = Digest(kind_of(layout.checksum))
        self._decode_from(layout, received(layout, group, whole, self._spec.instance))
        return self._confirmed(layout, whole.text(), self._all_here_s)

    def _confirmed(self, manifest: WeightManifest, checksum: str, here_s: float) -> LoadedWeights:
        """The checksum of what decodes now, of the manifest's kind, and how long it took since all was here."""
        return LoadedWeights(
            instance=self._spec.instance,
            model=manifest.model,
            weight_version=manifest.weight_version,
            checksum=checksum,
            load_s=time.perf_counter() - here_s,
        )

    @contextmanager
    def _not_training(self) -> Iterator[None]:
        """The target gets other weights in the block: nobody reads them meanwhile."""
        if self._spot is None:
            yield
            return
        self._spot.target_changes()
        yield
        self._spot.target_changed()

    def head_progress(self) -> tuple[HeadProgress, dict[str, np.ndarray]]:
        """What spot training did since the last published head, and the tensors that came of it, if any."""
        if self._spot is None:
            return HeadProgress(num_steps=0, num_tokens=0, train_s=0.0, held_out_tokens=0), {}
        return self._spot.progress()

    def compare_head(self, manifest: WeightManifest, chunks: Sequence[np.ndarray]) -> HeadComparison:
        """Compare a head that is not published with the present one. Raises WeightsError: damaged chunks."""
        if self._spot is None:
            return HeadComparison(present=math.nan, tried=math.nan, num_tokens=0)
        return self._spot.compare(published_head(manifest, weight_views(manifest, chunks)).trained)

    def give_up_head(self) -> None:
        """Train again from the published head, at half the rate."""
        if self._spot is not None:
            self._spot.give_up()

    def train_on_head(self) -> None:
        """Train on from what was learned here."""
        if self._spot is not None:
            self._spot.train_on()

    def remember(self, responses: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Let a drafter that looks tokens up know these responses: token ids of prompt and response."""
        suffix = None if self._engine is None else part_of(self._engine.drafter, SuffixDrafter)
        if suffix is not None:
            suffix.remember(responses)

    def _build_when_complete(self) -> None:
        if not self._versions.keys() >= set(self._spec.model_names):
            return
        if self._head is not None:
            require_fit(self._head.config, self._models["target"].config)
        self._check_profile()
        self._engine = build_engine(
            self._models["target"],
            self._draft,
            engine=self._engine_settings,
            speculation=self._spec.speculation,
            max_total_tokens=self._spec.max_total_tokens,
            vocab_size=self._spec.vocab_size,
            instance=self._spec.instance,
            weight_version=self._versions["target"],
            drafter_version=self._versions.get("draft", 0),
            profile=self._spec.profile,
            backend=self._backend,
            verdicts=self._verdicts(),
            takes_drafts=self._spec.takes_drafts,
        )
        self._engine.stop_strings = self._spec.stop_strings
        if self._spec.step_log:
            self._engine.step_log = []
        teaches = self._models["target"].config.get_text_config().model_type in MODEL_TYPES
        if self._spec.spot is not None and self._head is not None and teaches and self._engine.drafter:
            from .head_training import begin_training

            self._spot = begin_training(self._spec, self._spec.spot, self._engine, self._head)
        # from here on they are the engine's
        self._models.clear()
        set_heap_aside()

    @property
    def _draft(self) -> CausalLM | HeadWeights | None:
        """What drafts, as far as it is there."""
        return self._head or self._models.get("draft")

    @cached_property
    def _backend(self) -> ComputeBackend:
        """What computes here: weights are laid out for it as they come. Raises PlacementError: its GPU has no room."""
        spec = self._spec
        take_gpu_share(
            spec.instance,
            self.device,
            needed_bytes=spec.gpu_bytes,
            share=spec.gpu_share,
            advice=INSTANCE_ADVICE,
            mapped_bytes=spec.gpu_mapped_bytes,
        )
        return backend_for(self._engine_settings)

    @property
    def _engine_settings(self) -> EngineConfig:
        """The engine's section on the device that Ray assigned to this actor. Raises ConfigError."""
        return self._spec.engine.model_copy(update={"device": self.device.type})

    @property
    def device(self) -> torch.device:
        """The device that Ray assigned to this actor. Raises ConfigError."""
        return resolve_device(
            self._spec.engine.device, assigned=assigned_gpus(), key="engine.device", pool="cluster.generation"
        )

    def _shared_with_others(self, manifest: WeightManifest) -> SharedWeights | None:
        """Memory of a model's weights that instances of this run and machine share, told what comes next."""
        if self._spec.cache_dir is None:
            return None
        # a cache may lie on a disk of several machines
        folder = Path(self._spec.cache_dir).expanduser() / "shared_weights" / socket.gethostname()
        made = SharedWeights(folder, f"{self._spec.namespace} {manifest.model}")
        shared = self._shared.setdefault(manifest.model, made)
        # of a broadcast the kind of it is known and no more
        shared.coming = manifest.checksum.removeprefix(WORDS)
        return shared

    def _verdicts(self) -> KeptVerdicts | None:
        cache = self._spec.cache_dir
        return None if cache is None else KeptVerdicts(Path(cache).expanduser() / "probes")

    def _check_profile(self) -> None:
        """Require the profile's hardware here. Weights may have moved on. Raises ProfileError naming what differs."""
        profile = self._spec.profile
        if profile is None or "target" not in self._models:
            return
        measured = profile.provenance
        running = here(
            measured,
            self._models["target"],
            self._draft,
            engine=self._engine_settings,
            dtype=self._spec.dtype,
        )
        measured.require_match(running, where=f"the profile given to {self._spec.instance}", weights=False)


def received(
    layout: WeightManifest, group: BroadcastGroup, whole: Digest, instance: str
) -> Iterator[dict[str, Tensor]]:
    """Return the tensors of one bucket after the other, views until the next is asked for; `whole` takes them.

    Raises WeightsError when all is here, naming what is not as it was sent, and what the group raises.
    """
    buckets, version = buckets_of(layout), f"{layout.model} version {layout.weight_version}"
    # beside the weights, where the group brings them there; cut tensors are put together in it
    most = max(bucket.begins_at + bucket.num_bytes for bucket in buckets)
    room = torch.empty(most, dtype=torch.uint8, device=group.device)
    compared = list[str]()
    for index, bucket in enumerate(buckets):
        what = f"chunk {index} of {len(buckets)} of {version}"
        flat = room[bucket.begins_at :][: bucket.num_bytes]
        came = group.receive(flat, what)
        if bucket.piece_bytes:
            flat.copy_(came)
        views = bucket.views(room if bucket.piece_bytes else came)
        if kind_of(layout.checksum) == "words":
            pieces = {"a piece of it": flat[: bucket.piece_bytes]} if bucket.piece_bytes else views
            for name, piece in pieces.items():
                whole.add(piece, bucket.begins_at)
                compared.append(f"{what} ({name})")
        else:
            read_once(came.numpy(), (), whole)
            compared.append(what)
        yield views
        group.release(what)
    table = torch.zeros(len(compared), 2, dtype=torch.int64)
    mine, sent = whole.read(group.of_trainer(table, f"the checksums of {version}"))
    if odd := [one for one, differs in zip(compared, (mine != sent).any(1), strict=True) if differs]:
        raise WeightsError(
            f"{instance}: {odd[0]} is not what was sent: {len(odd)} of {len(mine)} checksums differ; re-send"
        )
