"""What a run will hold in memory and on disk, estimated from shapes before anything is started.

Plain arithmetic on the models' configs; no tensor is made. The fixed costs of a process are measured
ones (Linux, CPU torch 2.13, Ray 2.60), the rest follows from the sizes:

    generation  weights as they decode + KV pool + one step's logits; on a GPU one prefill and the bucket of weights
                that comes; with drafter suffix what it looks up in, with a head that is trained its optimizer and
                the hidden states
    trainer     weights, gradients and the optimizer's moments (LoRA: the adapters', and the weights below),
                reference, shared by all trainers with fsdp2; buckets on their way out + one forward's activations,
                copies of keys and values along a tree's paths, a chunk of logits, the head's gradient; with refits
                the draft's, and its targets
    on a GPU    all of that there, and on the host the process (CUDA's libraries are not counted), what passes through
    environment the interpreter; between turns instances keep caches on the host (engine.turn_cache_mb)
    reward      the interpreter alone, or the reward model's weights; what they take of a GPU is not counted
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ...core.config import Config
from ...core.weight_records import DEVICE_BUCKET_BYTES
from ...engine.admission import MB
from ...engine.cache.cuda_memory import mapped_pages
from ...engine.cache.kv_memory import host_pages
from ...engine.calibration.cost_sweep import MAX_PROFILED_NODES
from ...engine.draft_policies import most_nodes
from ...engine.model.prefill_plan import MAX_BIAS_TOGETHER
from ...engine.model.runner import LOGITS_TOGETHER
from ...engine.parts import Share
from ...engine.weights.chunks import CHUNK_BYTES
from ...learning.training.batching import PATHS_PER_TOKEN
from ...learning.training.engine_scoring import MOST_SLOTS
from ...learning.training.objectives.head_statistics import logit_copies, most_logits
from .model_sizes import DTYPE_BYTES, ModelShapes

GIB, MIB = 1 << 30, 1 << 20
MOVING_POLICIES = ("finish_time", "paper_rule")
"Of `reallocation.policy`: samples move between instances."
GPU_PAGE_BYTES = 2 << 20
"What drivers map at least; the device is not asked here."

TORCH_PROCESS_BYTES = 500 * MIB
"A Ray actor with torch and transformers imported, and code of our own compiled: 40 MiB of it."
PLAIN_PROCESS_BYTES = 130 * MIB
"A Ray actor with neither."
RAY_PROCESSES_BYTES = 900 * MIB
"Head processes, agents and dashboard of a local cluster."
_STORE_SLACK_BYTES = 256 * MIB
"Of the object store: requests, logs, frames of moving caches, and what fragments cannot hold."
_MASTER_BYTES = DTYPE_BYTES["float32"]
"The optimizer steps float32 weights, whatever they are published in."
_ADAM_COPIES = 3
"Gradient and two moments of each weight, float32."
_ACTIVATIONS_PER_LAYER = 24
"Values that a block has at once in a prefill, or in a draft's training, per token, in units of the hidden size."
_HOST_HOLES_PER_LAYER = 24
"""In the same units: what the C library's allocator keeps between the tensors of a CPU's forwards, whether activations
are kept or computed anew (measured: SmolLM2-135M, all weights and LoRA)."""
_PACKING_BUCKETS = 2
"Of a version that is published: one being packed, one on its way."
_STATES_BEHIND = 4
"The last layer's states, normalised, scaled, and those of them that the head reads: float32, of every token."
_REFIT_COPIES = 2 + _ADAM_COPIES
"The draft model and what it was before the refit, with gradient and moments."
_SPOT_COPIES = 9
"A head as published, in training, its gradient, two moments, room for a step's results of all three, and a copy."
_SPOT_ANCHORS = 256
"Positions in one forward of a head's training."
_BUFFER_SHARES = 1 + 0.125 + 2 * 0.5
"Of the buffer: itself, what is held out, what samples that run give, and what has finished and is not in it yet."
_SOFT_TARGET_BYTES = 8
"Id and log-probability of one likely token."
_LOGIT_COPIES = 2
"Logits and their gradient, float32, where they are computed whole."
_SEEN_LOGIT_COPIES = 3
"Where a draft model learns from them: chunks, all of them together, and by sequence."
_HEAD_GRADIENTS = 2
"Of each pack, before they are added up: of the head's weight, and of the embedding's."
_REFIT_LOGIT_COPIES = 4
"Logits, their log-softmax and both gradients."
_STEP_COPIES = 3
"Logits, noise and their sum in a decode step, float32."
_ROLLOUT_BYTES_PER_TOKEN = 40
"Id, two log-probabilities and text of a response token in Parquet, generously."


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes by part of the system, on the host but where a GPU is named; `total_bytes` is what a machine must have."""

    generation_bytes: int
    "one generation actor, its other ranks included"
    kv_pool_bytes: int
    "the KV pool, there or on the GPU"
    longest_sample_bytes: int
    "of which one sample of full length"
    trainer_bytes: int
    reward_bytes: int
    object_store_bytes: int
    ray_bytes: int
    gpu_bytes: int
    "what one instance takes of its GPU, recorded forwards included; 0 on a CPU"
    trainer_gpu_bytes: int
    "what one trainer takes of its GPU; 0 on a CPU"
    num_generation: int
    num_trainer: int
    num_reward: int
    disk_bytes: int
    "checkpoints and rollouts of the whole run"
    environment_bytes: int = 0
    "all environment actors"
    trainer_parts: Mapping[str, int] = field(default_factory=dict)
    "what one trainer holds to learn with, on its GPU where it has one, by what it is"
    trainer_host_parts: Mapping[str, int] = field(default_factory=dict)
    "all that it holds on the host"
    gpu_parts: Mapping[str, int] = field(default_factory=dict)
    "what an instance holds on its GPU"
    least_cache_bytes: int = 0
    "of caches that are limited: one sample of full length on its pages"
    checkpoints: bool = False
    "whether layers' activations are computed anew for the backward pass"

    @property
    def total_bytes(self) -> int:
        """All actors, Ray and its object store on one machine."""
        return (
            self.num_generation * self.generation_bytes
            + self.num_trainer * self.trainer_bytes
            + self.num_reward * self.reward_bytes
            + self.environment_bytes
            + self.object_store_bytes
            + self.ray_bytes
        )

    def rows(self) -> list[tuple[str, str]]:
        """Label and amount of every part, for `rlhfspec check`."""
        kv_pool = "" if self.gpu_bytes else f" (of which KV pool {gib(self.kv_pool_bytes)})"
        trainer = f"{self.num_trainer} x {gib(self.trainer_bytes)} ({listed(self.trainer_host_parts)})"
        return [
            ("generation", f"{self.num_generation} x {gib(self.generation_bytes)}{kv_pool}"),
            *([("trainer", trainer)] if self.num_trainer else []),
            *([("reward", f"{self.num_reward} x {gib(self.reward_bytes)}")] if self.num_reward else []),
            *([("environment", gib(self.environment_bytes))] if self.environment_bytes else []),
            ("object store", gib(self.object_store_bytes)),
            ("ray and driver", gib(self.ray_bytes)),
            ("total", gib(self.total_bytes)),
        ]


def gib(num_bytes: int) -> str:
    """Bytes as a short text, such as `1.50 GiB`."""
    return f"{num_bytes / GIB:.2f} GiB"


def listed(parts: Mapping[str, int]) -> str:
    """Parts of some memory that are no trifle, in GiB."""
    return ", ".join(f"{name} {num_bytes / GIB:.2f}" for name, num_bytes in parts.items() if num_bytes >= MIB)


class MemoryNeeds:
    """What the parts of a run hold, estimated from its config and the shapes of its models."""

    def __init__(self, config: Config, models: ModelShapes, *, max_total_tokens: int) -> None:
        """`max_total_tokens` is the longest prompt plus the longest response."""
        self._config, self._max_total_tokens = config, max_total_tokens
        self._computes_anew = config.trainer.gradient_checkpointing is True
        self._target, self._draft, self._reward_params = models.target, models.draft, models.reward_params
        self._teacher = models.teacher
        self._on_gpu, self._dtype = config.decodes_on_gpu, config.models.dtype
        # a head that is trained in float32 is published so
        self._draft_dtype = "float32" if config.trains_head else self._dtype
        self._target_bytes = self._target.weight_bytes(self._dtype)
        self._draft_bytes = self._draft.weight_bytes(self._draft_dtype) if self._draft else 0
        self._num_samples = config.rollout.prompts_per_iteration * config.rollout.samples_per_prompt
        self._num_nodes = most_nodes(config.speculation, takes_drafts=config.takes_drafts)
        trainer, auto = config.trainer, config.learns_on_gpu and self._dtype == "bfloat16"
        self._in_bfloat16 = auto if trainer.compute_dtype == "auto" else trainer.compute_dtype == "bfloat16"
        most_rows = min(trainer.minibatch_size, self._num_samples)
        self._row_tokens = most_rows * max_total_tokens
        "of all rows that a pack may have"
        self._pack_tokens = min(max(trainer.max_tokens_per_forward, max_total_tokens), self._row_tokens)

    @property
    def may_checkpoint(self) -> bool:
        """Whether it is left to the plan."""
        return self._config.trainer.gradient_checkpointing == "auto"

    def checkpointed(self) -> MemoryNeeds:
        """The same where layers' activations are computed anew for the backward pass."""
        other = copy.copy(self)
        other._computes_anew = True
        return other

    def object_store(self) -> int:
        """Of the object store: versions of what is published, and an iteration's rollouts."""
        config, draft = self._config, self._draft
        # every instance's own head, on its way into their mean
        trained = draft.num_params if draft and config.trains_head else 0
        heads = config.cluster.generation.most * trained * _MASTER_BYTES
        longest = config.data.max_prompt_tokens + config.max_response_tokens
        rollouts = self._num_samples * longest * _ROLLOUT_BYTES_PER_TOKEN
        # beside the first version lies a teacher until trainers have it
        teacher = self._teacher.weight_bytes(self._dtype) if self._teacher else 0
        beside = max(self._target_bytes if config.keeps_published else 0, teacher)
        return self._target_bytes + beside + 2 * self._draft_bytes + heads + rollouts + _STORE_SLACK_BYTES

    def plan(self, *, object_store_bytes: int) -> MemoryPlan:
        """The plan, of an object store of that size."""
        config, cluster = self._config, self._config.cluster
        on_pages, engine = self._sample(on_pages=True), self._engine()
        longest_sample = self._sample(on_pages=False) if config.engine.kv_cache_mb is None else on_pages
        parts = self._learner() | {"draft": self._refit()}
        learning, process = sum(parts.values()), {"process": TORCH_PROCESS_BYTES, "scorer": self._scorer()}
        process |= self._passing_through() if config.learns_on_gpu else parts
        kv_pool = config.engine.max_running_samples * longest_sample
        if config.engine.kv_cache_mb is not None:
            kv_pool = min(kv_pool, int(config.engine.kv_cache_mb * MB))
        has_turns = config.environment.kind is not None
        kept_mb = config.engine.turn_cache_mb if has_turns else 0.0
        kept_mb += config.speculation.suffix_memory_mb if config.speculation.remembers else 0.0
        # of recorded steps, and of recorded forwards of each model; a head's are not recorded
        num_recorded = 3 if self._draft is not None and config.speculation.drafter == "model" else 2
        elsewhere = self._on_other_gpus(kv_pool)
        ranks_host, ranks_gpu = self._ranks(kv_pool)
        on_gpu = {
            "weights and logits": engine - elsewhere[0],
            "KV pool": kv_pool - elsewhere[1],
            "recordings": int(config.engine.graph_memory_mb * MB * num_recorded),
            "prefill and bucket": self._on_device_alone() + ranks_gpu,
        }
        decoding = self._modules() if self._on_gpu else kv_pool + engine
        return MemoryPlan(
            generation_bytes=TORCH_PROCESS_BYTES + decoding + int(kept_mb * MB) + self._spot() + ranks_host,
            kv_pool_bytes=kv_pool,
            longest_sample_bytes=longest_sample,
            trainer_bytes=sum(process.values()),
            trainer_parts=parts,
            trainer_host_parts=process,
            checkpoints=self._computes_anew,
            reward_bytes=PLAIN_PROCESS_BYTES
            if self._reward_params is None
            else TORCH_PROCESS_BYTES + 2 * self._reward_params * DTYPE_BYTES["float32"],
            environment_bytes=PLAIN_PROCESS_BYTES * (cluster.environment.num_actors if has_turns else 0),
            object_store_bytes=object_store_bytes,
            gpu_bytes=sum(on_gpu.values()) if self._on_gpu else 0,
            gpu_parts=on_gpu,
            least_cache_bytes=on_pages,
            trainer_gpu_bytes=learning if config.learns_on_gpu else 0,
            ray_bytes=RAY_PROCESSES_BYTES + TORCH_PROCESS_BYTES,
            num_generation=cluster.generation.most,
            num_trainer=cluster.trainer.num_actors,
            num_reward=config.num_reward_actors,
            disk_bytes=self._checkpoints() + self._states(),
        )

    def _sample(self, *, on_pages: bool) -> int:
        """Keys and values of one sample that grows to its limit, in both models' caches."""
        # pools on CPU are float32 whatever the model's dtype
        element_bytes = DTYPE_BYTES[self._dtype] if self._on_gpu else 4
        shapes = [shape.kv for shape in (self._target, self._draft) if shape is not None]
        tokens = self._max_total_tokens + self._num_nodes + 1
        if not on_pages:
            return sum(shape.pool_bytes(1, tokens, element_bytes) for shape in shapes)
        if self._config.speculation.policy == "goodput" and self._draft is not None:
            # the profile's engine has the same limit and drafts more nodes
            tokens = self._max_total_tokens + max(self._num_nodes, MAX_PROFILED_NODES) + 1
        pages_of = partial(mapped_pages, page_bytes=GPU_PAGE_BYTES) if self._on_gpu else host_pages
        pages = [pages_of(kv.num_layers, kv.num_kv_heads, kv.head_size * element_bytes) for kv in shapes]
        return sum(each.bytes_of(np.array([each.whole(tokens)])) for each in pages)

    def _engine(self) -> int:
        """Weights as they decode, the logits of a step."""
        on_gpu = self._on_gpu
        weights = self._target.decoding_bytes(self._dtype, on_gpu=on_gpu)
        if self._draft is not None:
            weights += self._draft.decoding_bytes(self._draft_dtype, on_gpu=on_gpu)
        tokens = self._config.engine.max_running_samples * (self._num_nodes + 1)
        logits = tokens * self._target.vocab_size * 4 * _STEP_COPIES
        return weights + logits

    def _modules(self) -> int:
        """What an instance on a GPU builds on the host first: transformers' models; ours are filled where they are."""
        models = ((self._target, self._dtype), (self._draft, self._draft_dtype))
        return sum(one.weight_bytes(dtype) for one, dtype in models if one is not None and not one.is_ours)

    def _passing_through(self) -> dict[str, int]:
        """What a trainer with a GPU has on the host: a model that it reads whole (float32), a bucket that goes out."""
        config = self._config
        read = [self._draft] if config.refits_draft else []
        if config.trainer.strategy == "ddp" or config.cluster.trainer.num_actors == 1:
            read += [self._target, self._teacher]
        largest = max((one.num_params for one in read if one is not None), default=0)
        return {"model on its way": largest * _MASTER_BYTES, "publication": self._bucket(CHUNK_BYTES)}

    def _ranks(self, kv_pool: int) -> tuple[int, int]:
        """Of an instance's ranks, on the host and on the leader's GPU: what each receives, what the others hold.

        That is sums and logits of all, and a bucket of weights. Caches of samples that leave are joined on the host.
        """
        config, engine, pool = self._config, self._config.engine, self._config.cluster.generation
        if (ranks := pool.tensor_parallel) == 1:
            return 0, 0
        tokens = max(engine.max_prefill_tokens, engine.max_running_samples * (self._num_nodes + 1))
        sums = max(tokens * self._target.hidden_size, LOGITS_TOGETHER) * ranks
        # laid out once more when it has been gathered
        received = 2 * 4 * sums + min(self._bucket(CHUNK_BYTES), self._target_bytes)
        leaving = kv_pool if config.reallocation.policy in MOVING_POLICIES and pool.most > 1 else 0
        host = (ranks - 1) * TORCH_PROCESS_BYTES + leaving
        if self._on_gpu:
            return host, received
        # each holds the embeddings too
        return host + (ranks - 1) * self._target.table * 4 + ranks * received, 0

    def _on_other_gpus(self, kv_pool: int) -> tuple[int, int]:
        """Of weights and of caches what lies on the GPUs of an instance's other ranks: all but the leader's heads."""
        target, ranks = self._target, self._config.cluster.generation.tensor_parallel
        if ranks == 1:
            return 0, 0
        # embeddings are whole everywhere
        weights = target.decoding_bytes(self._dtype, on_gpu=True) - target.table * DTYPE_BYTES[self._dtype]
        each = [shape.kv.token_bytes for shape in (target, self._draft) if shape is not None]
        cells, heads = kv_pool * each[0] // sum(each), target.kv.num_kv_heads
        kept = len(Share(ranks=ranks).of(heads))
        return weights * (ranks - 1) // ranks, cells * (heads - kept) // heads

    def _on_device_alone(self) -> int:
        """Of a GPU: one prefill's activations and mask (made in float32), the bucket of weights that comes."""
        shape, tokens = self._target.kv, self._config.engine.max_prefill_tokens
        size, shared = DTYPE_BYTES[self._dtype], shape.num_heads // shape.num_kv_heads
        activations = tokens * self._target.hidden_size * size * _ACTIVATIONS_PER_LAYER
        mask = min(MAX_BIAS_TOGETHER, tokens * shared * self._max_total_tokens) * (size + 4)
        return activations + mask + min(self._target_bytes, self._bucket(DEVICE_BUCKET_BYTES))

    def _learner(self) -> dict[str, int]:
        """What a trainer holds to learn with, by what it is."""
        config, target = self._config, self._target
        num_trainers = config.cluster.trainer.num_actors
        buckets = _PACKING_BUCKETS * self._bucket(CHUNK_BYTES)
        if config.learns_on_gpu and self._on_gpu:
            # large tensors are cut between devices, and whole in the one bucket that goes to the object store
            buckets = self._bucket(_PACKING_BUCKETS * DEVICE_BUCKET_BYTES)
        weights, element = target.num_params * _MASTER_BYTES, DTYPE_BYTES[self._dtype]
        if has_adapter := target.num_adapter_params is not None:
            # the weights below stay, and serve as the reference too; the embedding in float32, as the states are
            whole = self._target_bytes + target.table * (_MASTER_BYTES - element)
            kept = min(whole, weights) if config.cluster.trainer.num_gpus else weights
            learned, reference = target.num_adapter_params * _MASTER_BYTES, 0
        else:
            # on a CPU that computes in float32 the reference is held in it too
            kept, learned = 0, weights
            reference = weights if config.algorithm.kl_coef > 0 else 0
        held = {
            "weights": kept + learned,
            "gradient, moments": learned + self._moments(),
            "reference": reference,
            # read in float32; on a GPU its linears are rounded where it lies
            "teacher": 0 if self._teacher is None else self._teacher.num_params * _MASTER_BYTES,
        }
        if config.trainer.strategy == "fsdp2":
            # shards, filled from published chunks; one block at a time is whole
            held = {name: -(-part // num_trainers) for name, part in held.items()}
        # the critic learns from the states of every response token; each trainer keeps those of its share
        states = self._num_samples * config.sampling.max_new_tokens * target.hidden_size * 4
        anew = ", computed anew (trainer.gradient_checkpointing)" if self._computes_anew else ""
        return held | {
            "rounded weights": self._rounded(),
            "publication": min(self._target_bytes, buckets),
            # of the largest weight, in float32: what is added to it, and their sum
            "merging": 2 * _MASTER_BYTES * target.hidden_size * target.mlp_size if has_adapter else 0,
            f"activations of {self._pack_tokens} tokens{anew}": self._activations(),
            "logits": self._logits(),
            "critic": -(-states // num_trainers) if config.algorithm.has_critic else 0,
        }

    def _moments(self) -> int:
        """What the optimizer keeps of the weights that learn, in memory and in a state."""
        target, optim = self._target, self._config.trainer.optim
        adapter = target.num_adapter_params
        num = target.num_params if adapter is None else adapter
        # embeddings, head and norms, which keep two of float32 whatever is chosen
        others = 0 if adapter is not None else num - target.num_product_params
        of_one = {"adamw": 2 * _MASTER_BYTES, "muon": _MASTER_BYTES, "adamw_8bit": 2}[optim]
        return num * of_one + others * (2 * _MASTER_BYTES - of_one)

    def _bucket(self, usual: int) -> int:
        """Of a publication: a tensor that is larger has a bucket of its own, or one in which it is put together."""
        largest = max(self._target.table, self._target.largest_product)
        return max(usual, largest * DTYPE_BYTES[self._dtype])

    def _rounded(self) -> int:
        """Copies of weights that autocast rounds and the backward pass reads: of whole ones, whatever is sharded.

        Adapters' weights below are held rounded.
        """
        if not self._in_bfloat16 or self._target.num_adapter_params is not None:
            return 0
        layers = self._target.kv.num_layers if self._computes_anew else 1
        return self._target.num_product_params * DTYPE_BYTES["bfloat16"] // layers

    def _activations(self) -> int:
        """Of one forward: a layer's, or all layers', and keys and values along the paths of its tree."""
        config, target, tokens = self._config, self._target, self._pack_tokens
        in_bfloat16, num_layers = self._in_bfloat16, target.kv.num_layers
        kept_layers = 1 if self._computes_anew else num_layers
        holes = 0 if config.learns_on_gpu else _HOST_HOLES_PER_LAYER * num_layers
        # every layer's input where they are computed anew; the last norm's, and what it makes of it
        states = (num_layers if self._computes_anew else 0) + _STATES_BEHIND + holes
        # what rows share lies in the pack once, and once more on each path; a pack that has all rows whole has no paths
        on_paths = min(PATHS_PER_TOKEN * tokens, self._row_tokens) if self._row_tokens > tokens else 0
        path = 2 * target.kv.num_kv_heads * target.kv.head_size * (2 if in_bfloat16 else 4) * kept_layers
        of_layers = kept_layers * target.layer_bytes(in_bfloat16=in_bfloat16)
        return tokens * (of_layers + states * target.hidden_size * 4) + on_paths * path

    def _logits(self) -> int:
        """Of one forward, and the head's gradient until it is added to those before."""
        config, target, tokens = self._config, self._target, self._pack_tokens
        learns_head = target.num_adapter_params is None
        gradient = target.vocab_size * target.hidden_size * 4 * (_HEAD_GRADIENTS if learns_head else 0)
        if target.has_whole_logits or config.refits_draft:
            copies = _SEEN_LOGIT_COPIES if config.refits_draft else _LOGIT_COPIES
            at_work = logit_copies(tokens, target.vocab_size, on_gpu=config.learns_on_gpu)
            return 4 * (tokens * target.vocab_size * copies + at_work) + gradient
        return 4 * most_logits(tokens, target.vocab_size, on_gpu=config.learns_on_gpu) + gradient

    def _scorer(self) -> int:
        """Of the engine's forward that values log-probabilities: weights as they decode, caches."""
        if self._config.trainer.scoring == "model":
            return 0
        weights = self._target.decoding_bytes(self._dtype, on_gpu=False)
        slots = min(self._config.engine.max_running_samples, MOST_SLOTS)
        return weights + self._target.kv.pool_bytes(slots, self._max_total_tokens)

    def _refit(self) -> int:
        """Of the draft model in the trainer, its packed copy and the targets of every response included."""
        config, draft = self._config, self._draft
        if draft is None or not config.refits_draft:
            return 0
        settings = config.drafter_training
        copies = draft.num_params * _MASTER_BYTES * _REFIT_COPIES + self._draft_bytes
        layers = draft.hidden_size * 4 * _ACTIVATIONS_PER_LAYER * draft.kv.num_layers
        logits = draft.vocab_size * 4 * _REFIT_LOGIT_COPIES
        if settings.mode == "cotrain":
            # the target's logits are there anyway; their softmax is not
            return copies + self._pack_tokens * (layers + logits + draft.vocab_size * 4)
        kept = min(settings.num_target_tokens, draft.vocab_size) * _SOFT_TARGET_BYTES
        targets = self._num_samples * config.sampling.max_new_tokens * kept
        return copies + settings.max_tokens_per_step * (layers + logits) + targets

    def _spot(self) -> int:
        """Of a draft head that an instance trains while it has no samples, and of what it learns from."""
        draft = self._draft
        if draft is None or not self._config.trains_head:
            return 0
        buffer = int(self._config.drafter_training.buffer_mb * MB * _BUFFER_SHARES)
        # the rows of the target's output matrix that the head's vocabulary has
        rows = draft.vocab_size * draft.hidden_size * _MASTER_BYTES
        logits = _SPOT_ANCHORS * draft.vocab_size * 4 * _REFIT_LOGIT_COPIES
        return draft.num_params * _MASTER_BYTES * _SPOT_COPIES + rows + logits + buffer

    def _checkpoints(self) -> int:
        """On disk: checkpoints, the best among them, and rollouts."""
        config, run = self._config, self._config.run
        # an MTP layer is not written again
        draft = 0 if config.speculation.drafter == "mtp" else self._draft_bytes
        num_numbered = run.iterations // run.checkpoint_every if run.checkpoint_every else 0
        # one more than are kept for the moment in which the oldest goes
        kept = num_numbered if run.keep_checkpoints is None else min(num_numbered, run.keep_checkpoints + 1)
        keeps_best = config.evaluation.every > 0 and config.evaluation.keep_best
        best = 2 * self._target_bytes if keeps_best else 0
        tokens = run.iterations * self._num_samples * config.sampling.max_new_tokens
        return (1 + kept) * (self._target_bytes + draft) + best + tokens * _ROLLOUT_BYTES_PER_TOKEN

    def _states(self) -> int:
        """On disk: the states that a run is resumed from, and one that is being written."""
        config, target, every = self._config, self._target, self._config.run.state_every
        if not every or config.run.iterations < every:
            return 0
        adapter = target.num_adapter_params
        has_reference = config.algorithm.kl_coef > 0.0 and adapter is None
        weights = target.num_params * (2 if has_reference else 1) + (adapter or 0)
        # a draft model with two moments; of a head what was published
        has_draft = self._draft is not None and (config.refits_draft or config.speculation.drafter == "head")
        draft = self._draft.num_params * (3 if config.refits_draft else 1) if self._draft and has_draft else 0
        one = (weights + draft) * _MASTER_BYTES + self._moments()
        return one * min(config.run.iterations // every, config.run.keep_states + 1)
