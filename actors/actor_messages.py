"""Records that only actors and the loop exchange. Arrays travel in completions and chunks, not here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..core.config import (
    AlgorithmConfig,
    DrafterTrainingConfig,
    EngineConfig,
    ReallocationConfig,
    SpeculationConfig,
    TrainerConfig,
)
from ..core.decode_records import GenerationStats, InstanceLoad
from ..core.records import Completion, SampleKey
from ..core.weight_records import DigestKind, WeightManifest
from ..policies.migration.move_messages import MoveReport
from ..policies.reallocation.pool_records import ReallocationPolicy
from ..policies.scaling.scaling_policy import ScalingPolicy
from ..policies.scaling.scaling_records import Resize
from ..policies.scheduling.attempts import AttemptCounts
from ..policies.scheduling.events import Alarm, Left, MoveRecord
from ..policies.scheduling.look_ahead import LookAheadLaw
from ..profiles.profile import Profile

if TYPE_CHECKING:
    from ..engine.decoding.stop_strings import StopStrings


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceNumerics:
    """What an instance promises of its tokens' bits."""

    promise: str
    "in one line, with the reason; begins with invariant or fast"
    rounds_by: str
    "code and processor: instances that say the same round alike"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotSpec:
    """How an instance trains a draft head while it has no samples."""

    training: DrafterTrainingConfig
    temperature: float
    "that responses are sampled at"
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpec:
    """What an instance is told when it is made; its weights come by manifest."""

    instance: str
    engine: EngineConfig
    speculation: SpeculationConfig
    takes_drafts: bool = False
    "requests may bring drafts (`SampleRequest.draft`)"
    dtype: str
    max_total_tokens: int
    "longest prompt + max_new_tokens"
    vocab_size: int
    "token ids the tokenizer knows; padded ids above it are never sampled"
    report_interval_s: float
    migration: ReallocationConfig | None = None
    "None: no sample ever moves"
    profile: Profile | None = None
    "what the policy `goodput` goes by: numbers, no tables"
    step_log: bool = False
    "keep every decode step's record until it is taken"
    cache_dir: str | None = None
    "a folder of the instance's node where the probe's verdicts are kept; None: the probe runs at every start"

    gpu_bytes: int = 0
    "that it plans to take of a GPU; 0: not estimated"
    gpu_mapped_bytes: int = 0
    "of these, pages of caches (`engine.kv_cache_mb`)"
    gpu_share: float = 1.0
    "of a GPU that is its own; of each rank's"
    spot: SpotSpec | None = None
    "None: it trains no draft head"
    stop_strings: StopStrings | None = None
    "where sampling.stop names any"
    num_ranks: int = 1
    "to which the target is dealt (`engine.group`)"
    rank_cpus: float = 0.0
    "of each other rank, in the same bundle"
    bundle: int = 0
    "of the leader's placement group"
    namespace: str = ""
    "of the run's actors"

    @property
    def model_names(self) -> tuple[str, ...]:
        """Models whose weights must arrive before the instance can run."""
        return ("target", "draft") if self.speculation.has_draft else ("target",)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec:
    """What the trainer is told when it is made."""

    algorithm: AlgorithmConfig
    trainer: TrainerConfig
    drafter_training: DrafterTrainingConfig | None
    "None: no draft model is refit here"
    dtype: str
    temperature: float
    seed: int
    pad_token_id: int
    vocab_size: int
    "token ids the tokenizer knows, as for the instances"
    part_weights: Mapping[str, float] = field(default_factory=dict)
    "of reward.parts, where algorithm.combine compares each by itself"
    base_model: str = ""
    "path or hub name of the first weights, for the adapter that LoRA saves"
    engine: EngineConfig | None = None
    "as the instances have it, where trainer.scoring is engine"
    max_total_tokens: int = 0
    "longest prompt + max_new_tokens, for trainer.scoring engine"
    gpu_bytes: int = 0
    "as an instance's"
    gpu_share: float = 1.0
    "as an instance's"
    num_optimizer_steps: int | None = None
    "of the whole run, for trainer.schedule"
    max_new_tokens: int | None = None
    "in one response, for algorithm.loss_aggregation"
    checksums: DigestKind = "xxh3"
    "of what it publishes"
    name: str = "trainer"
    rank: int = 0
    num_trainers: int = 1
    timeout_s: float = 300.0
    "of every wait of trainers for each other"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerMeeting:
    """Where trainers that learn as one meet."""

    host: str
    port: int
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """Intervals and limits of the scheduler actor."""

    poll_interval_s: float
    heartbeat_timeout_s: float
    order_timeout_s: float
    binding: Literal["pull", "static"] = "pull"
    reallocation: ReallocationPolicy | None = None
    "None: no sample is moved"
    reallocation_interval_s: float
    scaling: ScalingPolicy | None = None
    "None: the pool's size is left as it is"
    look_ahead: LookAheadLaw | None = None
    "None: the next batch is not begun ahead"
    term: int = 0
    "counts the schedulers of a run: instances take no samples from an older one than they know of"


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedText:
    """A response that one instance has finished, for the others to look up in."""

    instance: str
    prompt: np.ndarray
    "int64 token ids"
    response: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedWeights:
    """An instance's confirmation: what it now runs, read back from the loaded module."""

    instance: str
    model: str
    weight_version: int
    checksum: str
    load_s: float = 0.0
    "from when all of it was here until what decodes was compared with it"


@dataclass(frozen=True, slots=True, kw_only=True)
class SentWeights:
    """What a trainer broadcast, and the seconds that it did not wait for the group."""

    manifest: WeightManifest
    pack_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadProgress:
    """What an instance's spot trainer did since its head was last published."""

    num_steps: int
    num_tokens: int
    "learned from, repeated ones each time"
    train_s: float
    held_out_tokens: int
    "response tokens that heads can be compared on there"
    failure: str = ""
    "what ended training there"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadComparison:
    """Losses of two heads on what an instance has held out, nats a token; NaN where that is nothing."""

    present: float
    "of the published head"
    tried: float
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PollReply:
    """An instance's answer to a poll: everything finished and not yet acknowledged."""

    instance: str
    boundary: int
    "number of the last step boundary"
    busy_s: float
    "seconds the decode step now running has taken; 0 between steps"
    load: InstanceLoad | None
    completions: tuple[Completion, ...]
    sequence: int
    "number of the last completion; the next poll acknowledges it"
    progress: Mapping[SampleKey, int]
    "number of response tokens so far of running samples, a little old"
    moves: tuple[MoveReport, ...] = ()
    "what it says of moves, not yet acknowledged"
    is_training: bool = False
    "whether it trains a draft head at this moment"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSamples:
    """What an instance holds at a step boundary, for a scheduler that starts again."""

    instance: str
    open_epochs: Mapping[SampleKey, int]
    "samples taken and not finished, with the epoch of their order"
    completions: tuple[Completion, ...]
    "finished and not yet acknowledged"
    sequence: int
    "number of the last completion"
    set_aside: Mapping[SampleKey, tuple[str, int]] = field(default_factory=dict)
    "handed over and not settled: the move and the epoch before it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejoined:
    """An instance that outlived its scheduler."""

    handle: Any
    num_slots: int
    held: HeldSamples


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceView:
    """An instance as its scheduler sees it, for people."""

    instance: str
    state: str
    num_owned: int
    "samples"
    num_slots: int
    silent_s: float
    "since its last answer"
    activity: str
    "busy, idle or training"
    activity_s: float
    "since it began with that"
    load: InstanceLoad | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LostInstance:
    """An instance the scheduler gave up; its samples are queued again."""

    instance: str
    reason: str
    num_requeued: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What the scheduler hands out: updates since the last `take`."""

    completions: tuple[Completion, ...] = ()
    lost: tuple[LostInstance, ...] = ()
    left: tuple[Left, ...] = ()
    "instances that were to leave and are empty"
    resized: Resize | None = None
    "the size that the pool is to have, where that was decided since"
    alarms: tuple[Alarm, ...] = ()
    drafter_alarms: tuple[str, ...] = ()
    "instances that suspended drafting since the last `take`, and why"
    moves: tuple[MoveRecord, ...] = ()
    "that ended since the last `take`"
    planning_s: float = 0.0
    "seconds the scheduler has spent on deciding moves since it began"
    num_open: int = 0
    attempts: AttemptCounts = field(default_factory=AttemptCounts)
    "at the next batch, since it began"
    proving_cost: float = 0.0
    "of an attempted token over decoding it, as predicted; 0 where nothing is begun ahead"
    stats: Mapping[str, GenerationStats] = field(default_factory=dict)
    "sums by instance since it began; lost ones included that this scheduler has known"
